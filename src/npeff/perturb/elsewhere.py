"""What a change does to text that has nothing to do with the task: KL of next-token predictions."""

import contextlib
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from npeff.collect.batch import Collector
from npeff.collect.config import DirectionsConfig
from npeff.collect.session import Prepared, collect_prompts
from npeff.models.answer_sets import AnswerSet
from npeff.models.prompts import Prompts, encode_all
from npeff.store import layout
from npeff.store.run import Run
from npeff.tasks.data import Dataset
from npeff.tasks.task import load_task
from npeff.utils import Record, UserError, whole_file

EMBEDDED = Path(__file__).with_name("elsewhere.yaml")
PASSAGE = 128
"""Most tokens of a passage; longer texts are cut into several."""
MOST_TOKENS = 1024
"""Tokens of running text that are looked at: all log-probabilities of each are kept."""
RUNNING_TEXT = "running text"
BACKGROUND_POSITIONS, BACKGROUND_TOKENS, BACKGROUND_DRAWS = 96, 48, 2
"""Positions of other running text whose Fishers directions should avoid, the tokens before each at most, and the next
tokens that are drawn for each: a Fisher of the whole vocabulary has too many rows."""


class Damage(Record):
    """What a change along a component does elsewhere, at the length at which the component was measured."""

    text: str
    """`running text`, or the built-in task whose prompts these are."""
    kl: float
    """Mean KL divergence of the next-token predictions, a token; of prompts, at their last token."""
    tokens: int
    """Predictions that it is the mean of."""


def read_passages(file: str | None) -> list[str]:
    """Running text: a file's paragraphs, or the embedded ones.

    Args:
        file: Path of a text file; the embedded text if not given.

    Returns:
        The paragraphs that are not empty.

    Raises:
        UserError: The file cannot be read, is no text, or is empty.
    """
    if file is None:
        return list(yaml.safe_load(EMBEDDED.read_text(encoding="utf-8"))["text"])
    try:
        whole = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read --elsewhere {file} as text: {error}.") from error
    passages = [part.strip() for part in whole.split("\n\n") if part.strip()]
    if not passages:
        raise UserError(f"--elsewhere {file} has no text in it.")
    return passages


def background_rows(run: Run, prepared: Prepared, seed: int) -> torch.Tensor:
    """Fisher of next-token predictions on running text that is not measured, in the sketch of a run.

    They take as long as a hundred examples, and are kept in the run.

    Args:
        run: The run.
        prepared: Its model and sketch.
        seed: Of the positions that are drawn.

    Returns:
        Rows T [n, p]: TᵀT estimates the mean Fisher of a position. A classifier predicts no tokens, and has none.
    """
    if prepared.model.classifies:
        return torch.zeros(0, prepared.config.sketch.dim)
    drawn = (BACKGROUND_POSITIONS, BACKGROUND_TOKENS, BACKGROUND_DRAWS, seed, run.manifest.identity)
    name = hashlib.sha256(repr(drawn).encode() + EMBEDDED.read_bytes()).hexdigest()[:16]
    kept = run.path / layout.RUNNING_TEXT / f"{name}.safetensors"
    with contextlib.suppress(OSError, SafetensorError, KeyError):  # what is missing or damaged is made again
        return load_file(kept)["rows"]
    rows = _background_rows(prepared, seed)
    with whole_file(kept) as temporary:
        save_file({"rows": rows.contiguous()}, temporary)
    return rows


def _background_rows(prepared: Prepared, seed: int) -> torch.Tensor:
    texts = yaml.safe_load(EMBEDDED.read_text(encoding="utf-8"))["background"]
    generator = np.random.default_rng([seed, 5])
    longest = min(BACKGROUND_TOKENS, prepared.model.context)
    prefixes = []
    for ids in itertools.islice(itertools.cycle(encode_all(prepared.model.tokenizer, texts)), BACKGROUND_POSITIONS):
        end = int(generator.integers(1, len(ids) + 1))
        prefixes.append(ids[max(0, end - longest) : end])
    directions = DirectionsConfig(f"sampling:{BACKGROUND_DRAWS}")
    config = replace(prepared.config, directions=directions, gradient=False, activation=False)
    answers = AnswerSet("vocabulary", (), ())
    collector = Collector(config, prepared.model, answers, prepared.selection, prepared.collector.sketch)
    text = collect_prompts(replace(prepared, config=config, collector=collector), prefixes, [*range(len(prefixes))])
    sizes = text["pef_norm"].double().repeat_interleave(text["rank"].long()) / len(prefixes)
    return text["rows"].float() * sizes.sqrt().float()[:, None]


class Elsewhere:
    """Next-token predictions of the model as it is when this is made, to compare others with."""

    def __init__(self, prepared: Prepared, passages: list[str]) -> None:
        self._model = prepared.model
        tokens = encode_all(prepared.model.tokenizer, passages)
        longest = min(PASSAGE, prepared.model.context)
        pieces = [ids[start : start + longest] for ids in tokens for start in range(0, len(ids), longest)]
        pieces, left = [piece for piece in pieces if len(piece) > 1], MOST_TOKENS
        self._groups: dict[str, list[tuple[list[int], int]]] = {RUNNING_TEXT: []}
        for piece in pieces:
            if left > 0:
                self._groups[RUNNING_TEXT].append((piece[:left], 0))
                left -= len(piece)
        embedded = yaml.safe_load(EMBEDDED.read_text(encoding="utf-8"))["prompts"]
        for name, texts in embedded.items():
            task = load_task(name)
            if task.prompt != prepared.task.prompt:
                task = replace(task, chat=prepared.task.is_chat)
                writer = Prompts(task, prepared.model.tokenizer)
                prompts = writer.encode(writer.write(Dataset(pa.table({"text": texts}))))
                self._groups[name] = [(ids, len(ids) - 1) for ids in prompts if len(ids) <= prepared.model.context]
        self._groups = {name: pieces for name, pieces in self._groups.items() if pieces}
        self._before = {name: [self._predict(*piece) for piece in pieces] for name, pieces in self._groups.items()}

    def measure(self, prompts: bool = True) -> list[Damage]:
        """What the weights of now do to the predictions of before.

        Args:
            prompts: Whether to measure the tasks' prompts, too.

        Returns:
            One entry for the running text and one for each task's prompts.
        """
        found = []
        for name, pieces in self._groups.items() if prompts else [(RUNNING_TEXT, self._groups[RUNNING_TEXT])]:
            kls = []
            for piece, before in zip(pieces, self._before[name], strict=True):
                log_p, log_q = before.double(), self._predict(*piece).double()
                kls.append((log_p.exp() * (log_p - log_q)).sum(1).clamp_min(0))
            every = torch.cat(kls)
            found.append(Damage(name, float(every.mean()), len(every)))
        return found

    def _predict(self, ids: Sequence[int], first: int) -> torch.Tensor:
        """Log-probabilities of the next token behind every token from `first` on, float32 [n, vocabulary]."""
        with torch.inference_mode():
            inputs = torch.tensor([list(ids)], device=self._model.device)
            logits = self._model.network(input_ids=inputs, use_cache=False).logits[0, first:]
            return logits.float().log_softmax(1).cpu()
