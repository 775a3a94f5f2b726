"""Dataclasses as options and as JSON.

A config is a `Record`: the command line, the Python call and the replay file are made from the same class. A
record is a dataclass that one stage hands to another, or writes as JSON. The docstring under a field says what it is:
it is the help text of an option and the documentation of an entry. `to_dict` and `from_dict` are inverse to each other.

A config class may say what has become of options of earlier versions, and which options most people set:

    common: ClassVar[tuple[str, ...]]     options that `--help` shows first
    renamed: ClassVar[dict[str, str]]     old name → new name
    removed: ClassVar[dict[str, str]]     old name → why it is gone
    least: ClassVar[dict[str, int]]       name → the smallest number that it may be; of several, that each may be
    above: ClassVar[dict[str, int]]       name → what it must be above
    most: ClassVar[dict[str, int]]        name → the largest number that it may be

Files of earlier versions are read with their old names; people who use one are told the new one.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import operator
import os
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import replace as replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from npeff.utils.errors import UserError
from npeff.utils.files import read_object, write_json

Config = TypeVar("Config")


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Record:
    """Base of configs and records: every class that inherits from it is a frozen dataclass."""

    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, **options)(cls)

    def __post_init__(self) -> None:
        """Refuse numbers that are too small or too large."""
        for bound, (fits, words) in _BOUNDS.items():
            for name, limit in getattr(self, bound, {}).items():
                value = getattr(self, name, None)
                for number in value if isinstance(value, tuple) else (value,):
                    if number is not None and not fits(number, limit):
                        raise UserError(f"--{name.replace('_', '-')} is {number}; it should be {words} {limit}.")
        self._check()

    def _check(self) -> None:
        """Refuse what else is wrong: a config with rules of its own has them here."""


_BOUNDS = {"least": (operator.ge, "at least"), "above": (operator.gt, "above"), "most": (operator.le, "at most")}
"""Class variable of a config → how a number compares with its limit, and how that is said."""


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def read_record(kind: type[Config], path: Path) -> Config:
    """A record of class `kind` from a JSON file of ours.

    Args:
        kind: A dataclass.
        path: The file, as `write_record` wrote it.

    Returns:
        The record.

    Raises:
        UserError: The file cannot be read, is damaged, or does not hold such a record.
    """
    values = read_object(path)
    try:
        return from_dict(kind, values)
    except UserError as error:
        raise UserError(f"{path} is damaged, or was written by another version: {error}") from error


def write_record(path: Path, record: Any, sealed: bool = False) -> None:
    """Write a dataclass as JSON, whole or not at all; `sealed` as for `write_json`."""
    write_json(path, to_dict(record), sealed=sealed)


def from_dict(kind: type[Config], values: dict[str, Any]) -> Config:
    """A dataclass from what `to_dict` gave.

    Args:
        kind: Its class.
        values: JSON values; names of earlier versions are understood.

    Returns:
        The config or record.

    Raises:
        UserError: An entry is unknown, missing, or of the wrong type.
    """
    if not isinstance(values, dict):
        raise UserError(f"{kind.__name__} should be a mapping, not {type(values).__name__}.")
    hints = _hints(typing.cast(Any, kind))
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    renamed, removed = getattr(kind, "renamed", {}), getattr(kind, "removed", {})
    values = {renamed.get(name, name): value for name, value in values.items() if name not in removed}
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise UserError(f"Unknown option {', '.join(unknown)} in {kind.__name__}; it knows {', '.join(names)}.")
    try:
        config = kind(**{name: _typed(hints[name], value, name) for name, value in values.items()})
    except TypeError as error:
        raise UserError(f"{kind.__name__}: {error}.") from error
    check_numbers(config)
    return config


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields of a class; kept, because a file may hold thousands of records."""
    return typing.get_type_hints(kind, include_extras=True)


LARGEST = 2**53
"""Whole numbers beyond this are not the same in every program that reads JSON."""
LARGEST_SEED = 2**32
"""Every generator of random numbers takes seeds below this."""


def check_numbers(config: Any) -> None:
    """Refuse numbers that no option can mean: not a number, beyond what computers count with, odd seeds.

    Args:
        config: A dataclass; those in it are checked too.

    Raises:
        UserError: An option is such a number.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_numbers(value)
            continue
        limit = LARGEST_SEED if field.name.endswith(("seed", "seeds")) else LARGEST
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, float) and number != number:
                raise UserError(f"Option {field.name} is not a number.")
            if isinstance(number, int) and not -limit < number < limit:
                # Python refuses to write out integers of thousands of digits
                value = number if number.bit_length() < 1000 else "so large"
                raise UserError(f"Option {field.name} cannot be {value}; it must be below {limit}.")


def from_options(kind: type[Config], options: dict[str, Any]) -> Config:
    """A config from options that all lie on one level, as on the command line; those of its parts are found by name.

    Args:
        kind: Config class.
        options: Name → value.

    Returns:
        The config.

    Raises:
        UserError: There is no such option, or not any more.
    """
    known = leaves(kind)
    values: dict[str, Any] = {}
    for name, value in options.items():
        refuse_old(kind, name)
        if name not in known:
            raise UserError(f"There is no option {name!r}.{did_you_mean(name, known)} Options are {', '.join(known)}.")
        place = values
        for part in known[name]:
            place = place.setdefault(part, {})
        place[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return from_dict(kind, values)


def did_you_mean(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    """A sentence with the nearest of the names that exist, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def refuse_old(kind: Any, name: str, form: str = "{}") -> None:
    """Tell people who use an option of an earlier version what has become of it.

    Args:
        kind: Config class.
        name: Name of the option, with underscores.
        form: How options are written where it was given: as they are, or `--{}`.

    Raises:
        UserError: The option has another name now, or is gone.
    """
    for part in (kind, *(hint for hint in typing.get_type_hints(kind).values() if dataclasses.is_dataclass(hint))):
        old = form.format(name.replace("_", "-") if form != "{}" else name)
        if name in getattr(part, "renamed", {}):
            new = part.renamed[name]
            raise UserError(f"{old} is now {form.format(new.replace('_', '-') if form != '{}' else new)}.")
        if name in getattr(part, "removed", {}):
            raise UserError(f"{old} is gone: {part.removed[name]}")


def leaves(kind: Any, parts: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Where the options of a config lie.

    Args:
        kind: Config class.
        parts: The nested configs that it lies in itself, outermost first.

    Returns:
        Option → the nested configs that it lies in.
    """
    hints = typing.get_type_hints(kind)
    places: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            places |= leaves(hints[field.name], (*parts, field.name))
        else:
            places[field.name] = parts
    return places


def field_docs(kind: Any) -> dict[str, str]:
    """What the fields of a dataclass are.

    Args:
        kind: The class.

    Returns:
        Field → the docstring under it, in one line; fields of inherited classes too.
    """
    docs: dict[str, str] = {}
    for base in reversed(inspect.getmro(kind)):
        if dataclasses.is_dataclass(base):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(typing.cast(type, base)))).body
            for pair in pairwise(typing.cast(ast.ClassDef, tree).body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[name] = " ".join(text.split())
    return docs


def _typed(hint: Any, value: Any, name: str) -> Any:
    """`value` as `hint` wants it; JSON has no tuples and no dataclasses."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _typed(arguments[0], value, name)
    if origin in (typing.Union, types.UnionType):  # of several plain types, the one that the value has
        kinds = [kind for kind in arguments if isinstance(kind, type) and isinstance(value, kind)] or arguments
        return _typed(kinds[0], value, name)
    if dataclasses.is_dataclass(hint):
        try:
            return from_dict(typing.cast(Any, hint), value)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    if origin is tuple and isinstance(value, list | tuple):
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        if len(kinds) == len(value):
            return tuple(_typed(kind, item, name) for kind, item in zip(kinds, value, strict=True))
    if origin is list and isinstance(value, list | tuple):
        return [_typed(arguments[0], item, name) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _typed(arguments[1], item, name) for key, item in value.items()}
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if origin is typing.Literal:
        fits = value in arguments
    elif hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    else:
        fits = hint is Any or (origin is not tuple and isinstance(value, origin or hint))
    if not fits:
        raise UserError(f"Option {name} cannot be {value!r}; it should be {hint}.")
    return value
