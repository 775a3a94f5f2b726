"""What the columns of a run's example table mean. m is the number of examples."""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from npeff.tasks.config import FIELD
from npeff.utils import Array

_MEASURED = ("loss", "entropy")
PLACE = ("chunk", "position", *_MEASURED)
"""Of positions of documents: first character of the chunk, tokens before the position; loss and entropy in nats as they
were when it was chosen, known up to rounding."""

WRITTEN_COLUMNS = ("written_tokens", "written")
"""Of generated answers: token ids and text of each continuation that was sampled."""


def usable(table: pa.Table) -> Array:
    """Which examples were not set aside, bool [m]. An example is set aside if one of its values was not finite."""
    return ~table["set_aside"].is_valid().to_numpy(zero_copy_only=False)


def label_texts(table: pa.Table, labels: Sequence[str]) -> list[str | None]:
    """The right answer of each example as text.

    Args:
        table: An example table.
        labels: The task's labels; none where answers are open.

    Returns:
        For each example one of the labels or an open answer, None where it is not known, [m].
    """
    answers = table["answer"].to_pylist() if "answer" in table.column_names else [None] * len(table)
    numbers = table["label"].to_pylist() if "label" in table.column_names else [None] * len(table)
    return [
        answer if number is None or not labels else labels[number]
        for number, answer in zip(numbers, answers, strict=True)
    ]


def shown_texts(table: pa.Table, length: int = 80) -> pa.ChunkedArray:
    """What lists of examples show: texts; of a position, so many characters before it, and the token that follows."""
    if "position" not in table.column_names:
        return table["text"]
    tails = pc.utf8_slice_codeunits(table["text"], -length, None)
    return pc.binary_join_element_wise(tails, "»", table["answer"], "«", "")


def accuracy(table: pa.Table, labels: Sequence[str]) -> float | None:
    """Share of right predictions among usable examples with a label; None without such, or where answers are open."""
    known = table.filter(pc.and_(table["label"].is_valid(), pc.is_null(table["set_aside"])))
    return pc.mean(pc.equal(known["label"], known["prediction"])).as_py() if labels and len(known) else None


def whole_texts(table: pa.Table) -> pa.ChunkedArray:
    """Text and fields of each example: what makes two of them the same to the model."""
    parts = [table["text"], *(table[name] for name in table.column_names if name.startswith(FIELD))]
    return pc.binary_join_element_wise(*parts, "\x00") if len(parts) > 1 else parts[0]


def encode(values: pa.ChunkedArray) -> tuple[Array, list[str]]:
    """Numbers of the distinct strings, int64 [m], and these strings."""
    encoded = values.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def inputs_of(examples: pa.Table) -> pa.Table:
    """The columns that a collection starts from, without those that it found."""
    asked = {"source_row", "text", "label", "answer", *PLACE, *WRITTEN_COLUMNS}
    return examples.select([name for name in examples.column_names if name in asked or name.startswith(FIELD)])


def inputs_hash(examples: pa.Table) -> str:
    """Hash of what is asked: texts, labels, answers and fields."""
    digest = hashlib.sha256()
    for name in sorted(set(examples.column_names) - {*_MEASURED, *WRITTEN_COLUMNS}):
        digest.update(json.dumps([name, examples[name].to_pylist()], ensure_ascii=False).encode())
    return digest.hexdigest()
