"""Configs are frozen dataclasses: the command line, the Python call and the replay file are made from the same class.

A field's docstring is its help text. `to_dict` and `from_dict` are inverse to each other, an unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from dataclasses import replace
from typing import Any, TypeVar

from npeff.utils.errors import UserError

__all__ = ["check_numbers", "from_dict", "from_options", "replace", "to_dict"]

Config = TypeVar("Config")


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return list(value) if isinstance(value, tuple) else value


def from_dict(kind: type[Config], values: dict[str, Any]) -> Config:
    """A config of class `kind` from what `to_dict` gave."""
    if not isinstance(values, dict):
        raise UserError(f"{kind.__name__} should be a mapping, not {type(values).__name__}.")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise UserError(f"Unknown option {', '.join(unknown)} in {kind.__name__}; it knows {', '.join(names)}.")
    try:
        config = kind(**{name: _typed(hints[name], value, name) for name, value in values.items()})
    except TypeError as error:
        raise UserError(f"{kind.__name__}: {error}.") from error
    check_numbers(config)
    return config


LARGEST = 2**53
"""Whole numbers beyond this are not the same in every program that reads JSON."""
LARGEST_SEED = 2**32
"""Every generator of random numbers takes seeds below this."""


def check_numbers(config: Any) -> None:
    """Refuse numbers that no option can mean: not a number, beyond what computers count with, odd seeds."""
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
                raise UserError(f"Option {field.name} cannot be {_brief(number)}; it must be below {limit}.")


def _overflows(number: float) -> bool:
    """Whether a whole number is too large to be a float."""
    try:
        float(number)
    except OverflowError:
        return True
    return False


def _brief(number: int) -> str:
    # Python refuses to write out integers of thousands of digits
    return str(number) if number.bit_length() < 100 else f"{number:.3e}" if number.bit_length() < 1000 else "so large"


def from_options(kind: type[Config], options: dict[str, Any]) -> Config:
    """A config from options that all lie on one level, as on the command line; those of its parts are found by name."""
    known = _leaves(kind)
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise UserError(f"There is no option {name!r}.{hint} Options are {', '.join(known)}.")
        place = values
        for part in known[name]:
            place = place.setdefault(part, {})
        place[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return from_dict(kind, values)


def _leaves(kind: Any, parts: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Options of a config → the nested configs that they lie in, outermost first."""
    hints = typing.get_type_hints(kind)
    found: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            found |= _leaves(hints[field.name], (*parts, field.name))
        else:
            found[field.name] = parts
    return found


def _typed(hint: Any, value: Any, name: str) -> Any:
    """`value` as `hint` wants it; JSON has no tuples and no dataclasses."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _typed(arguments[0], value, name)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _typed(next(kind for kind in arguments if kind is not type(None)), value, name)
    if origin is typing.Literal:
        fits = value in arguments
    elif dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(Any, hint), value)
    elif origin is tuple:
        fits = isinstance(value, list | tuple)
        if fits:
            return tuple(_typed(arguments[0], item, name) for item in value)
    elif hint is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and not _overflows(value)
        value = float(value) if fits else value
    elif hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    else:
        fits = not isinstance(hint, type) or isinstance(value, hint)
    if not fits:
        raise UserError(f"Option {name} cannot be {value!r}; it should be {hint}.")
    return value
