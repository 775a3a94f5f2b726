"""Rows of data from local files and from the Hub, one reader a format; what a row means is decided in `data`."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from npeff.utils.errors import UserError

Rows = Iterator[tuple[int, Mapping[str, Any]]]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
BATCH = 8192
LONGEST_LINE = 1 << 28
"""Bytes; a file of zeros that was compressed to nothing should not take all memory."""


@dataclass(frozen=True)
class Source:
    """Opened data: what its columns are called, and the rows when asked for."""

    name: str
    """How messages call it."""
    unit: str
    """What the numbers of the rows count from 1: lines of a text file, or rows."""
    columns: tuple[str, ...]
    """Column names; of JSON records, the keys of the first one (later ones may have more or fewer)."""
    rows: Callable[[Collection[str]], Rows]
    """Number and values of each row, of (at least) the columns asked for. To be called once."""

    def describe_columns(self) -> str:
        """The columns, for a message."""
        more = f" and {len(self.columns) - 30} more" if len(self.columns) > 30 else ""
        return f"The columns are {', '.join(map(repr, self.columns[:30]))}{more}."


def open_file(path: Path) -> Source:
    """Data in a local file, by its suffix."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    kind = plain.suffix.lower()
    if path.is_dir():
        raise UserError(f"{path} is a directory; give one of the files in it.")
    if kind not in SUFFIXES or (kind == ".parquet" and plain != path):
        raise UserError(f"{path}: cannot tell the format from the name; it should end in {', '.join(SUFFIXES)}.")
    with reading(path):
        if kind == ".parquet":
            return _open_parquet(path)
        numbered = _csv_rows(path, kind) if kind in (".csv", ".tsv") else _json_rows(path, kind)
        first = next(numbered, None)
        if first is None:
            raise UserError(f"{path} is empty: it has no examples.")
        unit = "row" if _is_json_list(path, kind) else "line"
    rows = _guarded(path, chain([first], numbered))
    return Source(str(path), unit, tuple(first[1]), lambda _: rows)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a missing, unreadable or damaged file raises into a message for the user."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"No such file: {path}.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a whole gzip file: {error}. Download or compress it again.") from error
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error


def _guarded(path: Path, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Rows:
    with reading(path):
        yield from rows


def _open_binary(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, each decoded by itself so that a wrong byte can be located."""
    with _open_binary(path) as handle:
        for number, raw in enumerate(iter(lambda: handle.readline(LONGEST_LINE + 1), b""), 1):
            if len(raw) > LONGEST_LINE:
                raise UserError(f"{path}, line {number} has more than {LONGEST_LINE} bytes. Is it broken into lines?")
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                where = f"line {number}, byte {error.start + 1} (0x{raw[error.start]:02x})"
                raise UserError(f"{path} is not UTF-8: {where}. Save the file as UTF-8.") from error


def _is_json_list(path: Path, kind: str) -> bool:
    """Whether a .json file holds one list, rather than an object a line."""
    if kind != ".json":
        return False
    with _open_binary(path) as handle:
        return handle.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _json_rows(path: Path, kind: str) -> Rows:
    if _is_json_list(path, kind):
        content = _parse_json("".join(line for _, line in _lines(path)), str(path))
        for number, record in enumerate(content, 1):
            yield number, _record(record, f"{path}, row {number}")
    else:
        for number, line in _lines(path):
            if line.strip():
                where = f"{path}, line {number}"
                yield number, _record(_parse_json(line.rstrip(), where), where)


def _parse_json(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        at = f"character {error.colno}" if "\n" not in text else f"line {error.lineno}, character {error.colno}"
        hint = " Each line should be one JSON object." if not text.lstrip().startswith("[") else ""
        raise UserError(f"{where}: broken JSON at {at}: {error.msg}.{hint}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: broken JSON: {error}.") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError(f"the key {_repeated(key for key, _ in pairs)!r} is there twice")
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)  # made once: it costs as much as reading a line


def _record(value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, dict) and value:
        return value
    found = "an empty one" if isinstance(value, dict) else type(value).__name__
    raise UserError(f'{where}: expected a JSON object such as {{"text": "..."}}, found {found}.')


def _csv_rows(path: Path, kind: str) -> Rows:
    """Numbered records of a CSV (quoted as in RFC 4180) or TSV file (no quoting, as in GLUE's files)."""
    csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))  # the limit is global and too small for long texts
    lines = (line for _, line in _lines(path))
    if kind == ".csv":
        reader = csv.reader(lines, strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    header: list[str] | None = None
    start = 1
    try:
        for record in reader:
            if record and header is None:
                header = [name.strip() for name in record]
                if len(set(header)) != len(header):
                    raise UserError(f"{path} has two columns named {_repeated(header)!r}. Rename one of them.")
            elif record and header is not None:
                if len(record) != len(header):
                    raise UserError(
                        f"{path}, line {start}: {len(record)} fields, but the header has {len(header)} "
                        f"({', '.join(header)[:100]}). Does a field need quotes?"
                    )
                yield start, dict(zip(header, record, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        reason = "a carriage return outside quotes" if "new-line" in str(error) else error
        raise UserError(f"{path}, line {start}: broken {kind[1:].upper()}: {reason}.") from error


def _open_parquet(path: Path) -> Source:
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
    except (pa.ArrowException, ValueError) as error:
        raise UserError(f"{path} is not a Parquet file that can be read: {_first_line(error)}.") from error
    if len(set(schema.names)) != len(schema.names):
        raise UserError(f"{path} has two columns named {_repeated(schema.names)!r}. Rename one of them.")
    if file.metadata.num_rows == 0:
        raise UserError(f"{path} is empty: it has no examples.")

    def batches(wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
        with reading(path):
            yield from file.iter_batches(BATCH, columns=[name for name in schema.names if name in wanted])

    names = _class_names_in_schema(schema)
    return Source(str(path), "row", tuple(schema.names), lambda wanted: _arrow_rows(str(path), batches(wanted), names))


def _class_names_in_schema(schema: pa.Schema) -> dict[str, list[str]]:
    """Names of the class labels that `datasets` notes in a Parquet file it writes, by column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _arrow_rows(where: str, batches: Iterable[Any], names: Mapping[str, list[str]]) -> Rows:
    """Numbered rows of Arrow batches, with the numbers of class labels replaced by their names."""
    number = 0
    try:
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                for column, classes in names.items():
                    value = row.get(column)
                    if isinstance(value, int) and 0 <= value < len(classes):
                        row[column] = classes[value]
                yield number, row
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise UserError(f"{where}, after row {number}: cannot be read: {_first_line(error)}.") from error


def open_hub(name: str, config: str | None, split: str | None) -> Source:
    """A data set of the Hugging Face Hub, through `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name!r} is not a local file, and reading it from the Hub needs the package datasets: "
            "pip install 'npeff[hub]'."
        ) from error
    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # anything from a proxy's refusal to a misspelt split; the Hub's own words tell best
        raise UserError(
            f"Cannot load {name!r}{f' ({config})' if config else ''} from the Hub: {_first_line(error)}. "
            "Check the name, the configuration, the split and the network, or give a local file."
        ) from error
    if isinstance(data, dict):
        if len(data) != 1:
            raise UserError(f"{name!r} has the splits {', '.join(map(str, data))}; choose one with --split.")
        (data,) = data.values()
    if len(data) == 0:
        raise UserError(f"{name!r} is empty: it has no examples.")
    names = {column: list(f.names) for column, f in data.features.items() if isinstance(f, datasets.ClassLabel)}
    columns = tuple(data.column_names)

    def rows(wanted: Collection[str]) -> Rows:
        chosen = data.select_columns([column for column in columns if column in wanted]).with_format("arrow")
        return _arrow_rows(name, chosen.iter(BATCH), names)

    return Source(name, "row", columns, rows)


def _repeated(names: Iterable[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
