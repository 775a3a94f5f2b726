"""Writes the command-line reference from the configs of the commands."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from npeff.cli import COMMANDS

Field = tuple[dataclasses.Field[Any], Any, str]


def write_commands(path: Path) -> None:
    """One section per command, with its arguments and options."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(section(name) for name in COMMANDS)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:  # else Sphinx would build the page again
        path.write_text(text, encoding="utf-8")


def section(name: str) -> str:
    """A command's section, as Markdown; of a command with subcommands, one for each."""
    module, kind, _, _ = COMMANDS[name]
    config = getattr(importlib.import_module(module), kind)
    if isinstance(config, type):
        return _section(name, config)
    parts = [typing.get_args(part) for part in typing.get_args(config)]  # Annotated[config, its name]
    return "\n".join(_section(f"{name} {subcommand.name}", part) for part, subcommand in parts)


def _section(name: str, config: Any) -> str:
    arguments = [field for field, hint, _ in own_fields(config) if is_positional(hint)]
    usage = " ".join(["npeff", name, *(_usage(field) for field in arguments), "[options]"])
    lines = [f"## {name}", "", inspect.getdoc(config) or "", "", f"`{usage}`", ""]
    rows = list(_rows(config))
    if rows:
        lines += ["| | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def own_fields(config: Any) -> Iterator[Field]:
    """The fields of a config that the command line shows, with type and help."""
    hints = typing.get_type_hints(config, include_extras=True)
    helps = field_helps(config)
    for field in dataclasses.fields(config):
        if not _has_marker(hints[field.name], "Suppress"):
            yield field, hints[field.name], helps.get(field.name, "")


def field_helps(config: Any) -> dict[str, str]:
    """The docstrings under the fields of a class and of the classes it inherits from."""
    helps: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for first, second in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(first, ast.AnnAssign)
                and isinstance(first.target, ast.Name)
                and isinstance(second, ast.Expr)
                and isinstance(second.value, ast.Constant)
            ):
                helps[first.target.id] = " ".join(str(second.value.value).split())
    return helps


def is_positional(hint: Any) -> bool:
    return _has_marker(hint, "Positional")


def _has_marker(hint: Any, name: str) -> bool:
    """Whether a type is annotated with one of tyro's markers."""
    marked = typing.get_args(getattr(tyro.conf, name)[int])[1]
    return typing.get_origin(hint) is typing.Annotated and marked in typing.get_args(hint)[1:]


def _rows(config: Any) -> Iterator[str]:
    for field, hint, text in own_fields(config):
        if dataclasses.is_dataclass(hint):  # a group: its options stand by themselves
            yield from _rows(hint)
            continue
        option = field.name.replace("_", "-")
        if is_positional(hint):
            name = f"`{field.name.upper()}`"
        elif hint is bool:
            name = f"`--{option}`, `--no-{option}`"
        else:
            name = f"`--{option}`"
        choices = _choices(hint)
        shown = f"{text} ({choices})" if choices else text
        yield f"| {name} | {_default(field)} | {_cell(shown)} |"


def _choices(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return _choices(arguments[0])
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    return ""


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default in (None, ()):
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return f"`{' '.join(map(str, field.default))}`"
    return f"`{field.default}`"


def _usage(field: dataclasses.Field[Any]) -> str:
    name = field.name.upper()
    return name if field.default is dataclasses.MISSING else f"[{name}]"


def _cell(text: str) -> str:
    """A help text as the cell of a table: stars and bars are meant as such."""
    for character in "\\|*<":
        text = text.replace(character, "\\" + character)
    return text
