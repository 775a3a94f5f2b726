"""Which positions of running documents are asked: examples whose text is all that stands before a token.

Documents are read one by one and cut into chunks; however long they are, only chosen chunks and positions are kept.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from operator import gt, lt
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from npeff.collect.config import CollectConfig
from npeff.models.answers import AnswerModel
from npeff.models.prompts import encode, encode_all
from npeff.tasks.data import Dataset, Reader
from npeff.utils import UserError
from npeff.utils.distributed import everyone_has, rank
from npeff.utils.progress import progress

LIMIT = 1000
"""Positions that are chosen where no limit is given: documents have more than anybody wants."""
LEAST = 4
"""Tokens that stand before a position at least."""
SAME = 16
"""Positions with the same so many tokens before them and the same target are duplicates."""
CHUNKS = 4
"""Chunks that are looked at, at most, for each position that is wanted; a rule may hold nowhere in a gigabyte."""

_SCHEMA = pa.schema(
    {"source_row": pa.int64(), "text": pa.string(), "label": pa.int32(), "answer": pa.string()}
    | {"chunk": pa.int64(), "position": pa.int64(), "loss": pa.float32(), "entropy": pa.float32()}
)
_UNSTABLE = "whose context alone is split into other tokens"
_DUPLICATE = "with the context and target of an earlier one"


class Chunk(NamedTuple):
    """A part of a document."""

    order: int
    """What it is shuffled by."""
    row: int
    """Number of its document in the data."""
    start: int
    """Character of the document that it begins with."""
    text: str
    """The part itself."""


def choose_positions(answer_model: AnswerModel, config: CollectConfig, documents: Reader) -> Dataset:
    """Choose positions of documents.

    Args:
        answer_model: The model, which says how surprising each position is.
        config: Which positions, and how many.
        documents: What they are chosen from.

    Returns:
        An example for each: its text is the context up to there, its answer the token that comes next.

    Raises:
        UserError: There is no such position.
    """
    chooser, limit = _Chooser(answer_model, config), config.data.limit or LIMIT
    found: list[dict[str, Any]] = []
    with progress(total=limit, unit="ex", desc="Choosing positions", active=rank() == 0) as bar:
        for chunk in chosen_chunks(config, documents, max(64, CHUNKS * limit)):
            new = list(islice(chooser.positions(chunk), limit - len(found)))
            found += new
            bar.update(len(new))
            if len(found) == limit:
                break
    if not found:
        raise UserError(f"{documents.source.name}: {chooser.why_none()}")
    table = everyone_has(pa.Table.from_pylist(found, _SCHEMA))[0]  # ranks may round differently what a rule decides by
    left_out = [f"{count} positions {why}" for why, count in sorted(chooser.left_out.items())]
    few = [f"Only {len(found)} positions were found in {chooser.chunks} chunks."] if len(found) < limit else []
    loss = f"Mean loss at the {len(table)} positions: {np.mean(table['loss'].to_numpy()):.2f} nats."
    return Dataset(table, dropped=(*documents.dropped(), *left_out), notes=(*few, loss))


def chosen_chunks(config: CollectConfig, documents: Reader, most: int) -> Iterator[Chunk]:
    """Read documents, and choose chunks of them.

    Args:
        config: Their length, and the seed of the order; without one, they come as they stand in the data.
        documents: What to read; if there is a seed, to its end.
        most: How many to choose, and to hold in memory, at most.

    Yields:
        The chunks.
    """
    seed = config.data.shuffle_seed
    chunks = (
        Chunk(_hash(seed, row["source_row"], start), row["source_row"], start, text)
        for row in documents.examples()
        for start, text in _cut(row["text"], config.positions.chunk)
    )
    yield from islice(chunks, most) if seed is None else heapq.nsmallest(most, chunks)


def _cut(text: str, size: int) -> Iterator[tuple[int, str]]:
    """A document in chunks of at most `size` characters, with where they begin; cut before white space if there is."""
    start = 0
    while start < len(text):
        stop = start + size
        if stop < len(text):
            stop = next((i for i in range(stop, start, -1) if text[i].isspace()), stop)
        if text[start:stop].strip():
            yield start, text[start:stop]
        start = stop


def _hash(*key: object) -> int:
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest(), "big")


class _Chooser:
    """Chooses positions of one chunk after another."""

    def __init__(self, answer_model: AnswerModel, config: CollectConfig) -> None:
        self._model, self._tokenizer = answer_model, answer_model.model.tokenizer
        self._config, self._bounds = config, config.positions.bounds()
        self._seen: set[tuple[int, ...]] = set()
        self.left_out: Counter[str] = Counter()
        self.chunks = self._longest = self._looked = 0
        self._losses = [np.inf, -np.inf]

    def positions(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """The examples of a chunk, in the order of its tokens."""
        ids = encode(self._tokenizer, chunk.text)[: self._model.model.context]
        self.chunks, self._longest = self.chunks + 1, max(self._longest, len(ids))
        places = [place for place in self._candidates(chunk, len(ids)) if self._is_new(ids, place)]
        decode = self._tokenizer.decode
        contexts = [
            decode(ids[:place], skip_special_tokens=True, clean_up_tokenization_spaces=False) for place in places
        ]
        again = encode_all(self._tokenizer, contexts) if contexts else []
        stable = [i for i, place in enumerate(places) if again[i] == ids[:place]]
        self.left_out.update({_UNSTABLE: len(places) - len(stable)} if len(stable) < len(places) else {})
        if not stable:
            return
        measured = self._model.surprise(ids, [places[i] for i in stable])
        for i, loss, entropy in zip(stable, *measured, strict=True):
            self._looked, self._losses = self._looked + 1, [min(self._losses[0], loss), max(self._losses[1], loss)]
            values = {"loss": loss, "entropy": entropy}
            if all((lt if sign == "<" else gt)(values[name], bound) for name, sign, bound in self._bounds):
                own = {"source_row": chunk.row, "chunk": chunk.start, "position": places[i], "text": contexts[i]}
                yield {**own, **values, "answer": decode([ids[places[i]]])}

    def _candidates(self, chunk: Chunk, length: int) -> list[int]:
        asked = self._config.positions
        if asked.per_chunk is None:
            return [place for place in range(LEAST, length) if place % asked.every == 0]
        seed = self._config.data.shuffle_seed or 0
        drawn = sorted(range(LEAST, length), key=lambda place: _hash(seed, chunk.row, chunk.start, place))
        return sorted(drawn[: asked.per_chunk])

    def _is_new(self, ids: list[int], place: int) -> bool:
        key = tuple(ids[max(0, place - SAME) : place + 1])
        new = key not in self._seen or not self._config.data.unique
        self._seen.add(key)
        self.left_out.update({} if new else {_DUPLICATE: 1})
        return new

    def why_none(self) -> str:
        """Why there is no position, and what to do."""
        asked = self._config.positions
        if not self.chunks:
            return "there is no text in it."
        if self._looked:
            low, high = self._losses
            return f"--rule {asked.rule!r} holds at none of {self._looked} positions (losses {low:.3g} to {high:.3g})."
        if self.left_out:
            return f"none of the positions can be used: {dict(self.left_out)}."
        few = f"the longest of {self.chunks} chunks has {self._longest} tokens"
        wanted = f"{LEAST} of them" if asked.per_chunk else f"{max(asked.every, LEAST)} of them (--every {asked.every})"
        return f"{few}, and a position needs {wanted} before it. Choose a larger --chunk or a smaller --every."
