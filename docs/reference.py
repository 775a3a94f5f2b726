"""Writes the command-line reference from the configs of the commands."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npeff.cli import COMMANDS, default_text, has_marker
from npeff.utils.configs import field_docs

Field = tuple[dataclasses.Field[Any], Any, str]


def write_commands(path: Path) -> None:
    """One section per command, with its arguments and options."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(section(name) for name in COMMANDS)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:  # else Sphinx would build the page again
        path.write_text(text, encoding="utf-8")


def section(name: str) -> str:
    """A command's section, as Markdown; of a command with subcommands, one for each."""
    config = COMMANDS[name].load_config()
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
    helps = field_docs(config)
    for field in dataclasses.fields(config):
        if not has_marker(hints[field.name], "Suppress"):
            yield field, hints[field.name], helps.get(field.name, "")


def is_positional(hint: Any) -> bool:
    return has_marker(hint, "Positional")


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
        yield f"| {name} | {_code(default_text(field))} | {_cell(shown)} |"


def _choices(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return _choices(arguments[0])
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    return ""


def _code(text: str) -> str:
    return text if text in ("", "on", "off") else f"`{text}`"


def _usage(field: dataclasses.Field[Any]) -> str:
    name = field.name.upper()
    return name if field.default is dataclasses.MISSING else f"[{name}]"


def _cell(text: str) -> str:
    """A help text as the cell of a table: stars and bars are meant as such."""
    for character in "\\|*<":
        text = text.replace(character, "\\" + character)
    return text


# --- records of files -------------------------------------------------------------------------------------------------

RECORDS = {
    "manifest.json": "npeff.store.schema:Manifest",
    "decompositions/NAME/config.json": "npeff.decompose.base:SavedDecomposition",
    "decompositions/NAME/diagnostics.json": "npeff.decompose.base:Diagnostics",
    "decompositions/NAME/analysis/analysis.json": "npeff.analyse.records:Analysis",
    "annotations/NAME.jsonl, each line": "npeff.explore.themes:Theme",
    "perturbations/NAME/config.json": "npeff.perturb.report:Made",
    "perturbations/NAME/results.json": "npeff.perturb.report:Results",
    "explanations/NAME/names.json": "npeff.explain.records:Names",
    "explanations/NAME/components/NNNNN.json": "npeff.explain.records:Explanation",
    "explanations/NAME/casestudies/NNNNN.json": "npeff.explain.records:CaseStudy",
    "explanations/NAME/judged/NNNNN.json": "npeff.explain.records:Judged",
    "diffs/NAME/diff.json": "npeff.act.diff:Diff",
    "comparisons/*/table.json": "npeff.analyse.compare:Comparison",
    "stability/*/stability.json": "npeff.analyse.records:Stability",
    "spectra/spectra.json": "npeff.analyse.spectra:Spectra",
    "sweeps/*/sweep.json": "npeff.analyse.sweep:Sweep",
    "icl/SHOTS-SEED/table.json": "npeff.paper.icl:IclTable",
    "share.json": "npeff.share.run:Index",
    "KIT/groups.json": "npeff.study.kit:Kit",
    "KIT/key/key.json": "npeff.study.kit:Key",
    "KIT/judges/*/NNN.json": "npeff.study.judge:JudgeReply",
    "answers-*.json": "npeff.study.kit:Sheet",
    "KIT/results/scores.json": "npeff.study.score:Scores",
}
"""Files of a run or of a study, and the dataclass that reads and writes each."""


def records() -> str:
    """The entries of every file in `RECORDS`, and of the dataclasses within them, as Markdown."""
    parts, described = [], set()
    for file, place in RECORDS.items():
        module, _, name = place.partition(":")
        waiting = [getattr(importlib.import_module(module), name)]
        title = f"### {file}"
        while waiting:
            kind = waiting.pop(0)
            if kind in described:
                continue
            described.add(kind)
            parts.append(_record(title, kind))
            hints = typing.get_type_hints(kind)
            waiting += [part for hint in hints.values() for part in _dataclasses_in(hint)]
            title = ""
    return "\n".join(parts)


def _record(title: str, kind: Any) -> str:
    """A table of a dataclass; the first of a file has the file's name as its heading."""
    about = (inspect.getdoc(kind) or "").splitlines()[0]
    lines = [title, ""] if title else []
    lines += [f"**{kind.__name__}**: {about}", "", "| entry | type | |", "|---|---|---|"]
    hints, docs = typing.get_type_hints(kind), field_docs(kind)
    for field in dataclasses.fields(kind):
        shown = _type_name(hints[field.name])
        lines.append(f"| `{field.name}` | {_cell(shown)} | {_cell(docs.get(field.name, ''))} |")
    return "\n".join([*lines, ""])


def _dataclasses_in(hint: Any) -> Iterator[Any]:
    """The dataclasses that a type is made of."""
    if dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _dataclasses_in(part)


def _type_name(hint: Any) -> str:
    """A type in words that readers of JSON know."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple):
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"{_type_name(arguments[0])} → {_type_name(arguments[1])}"
    if arguments:
        names = [_type_name(part) for part in arguments if part is not type(None)]
        return " or ".join(names) + (", or null" if type(None) in arguments else "")
    if hint is Any:
        return "JSON"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(
        hint, getattr(hint, "__name__", "?")
    )


if __name__ == "__main__":  # writes the records into docs/formats.md
    page = Path(__file__).parent / "formats.md"
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- records -->\n")
    after = rest.partition("<!-- /records -->")[2]
    page.write_text(f"{before}<!-- records -->\n{records()}<!-- /records -->{after}", encoding="utf-8")
