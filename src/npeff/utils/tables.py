"""Tables as files: Markdown to read, LaTeX for papers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from npeff.utils.files import write_text

_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")
_MARK = re.compile(r"\\(?P<literal>.)|\*\*(?P<bold>.+?)\*\*|<u>(?P<underlined>.+?)</u>|`(?P<code>[^`]+)`|(?P<plain>.)")
_STYLES = {"bold": "textbf", "underlined": "underline", "code": "texttt"}
_NUMBER = re.compile(r"[-+\u2212]?[\d.,]*\d(e[-+]?\d+)?%?( ?± ?[\d.,]+| \([-\d.,]+%?\))?|-?")
_CHARACTERS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "→": r"$\to$",
    "±": r"$\pm$",
    "÷": r"$\div$",
    "\u2212": "$-$",
    "√": r"$\surd$",
    "τ": r"$\tau$",
    "…": r"\ldots{}",
    "[": "{[}",  # at the beginning of a line it would be an option of the line before
    "]": "{]}",
}


def write_tables(path: Path, markdown: str) -> None:
    """Write a text as `path`.md, and its tables as `path`.tex, to \\input where the package booktabs is loaded."""
    write_text(path.with_name(f"{path.name}.md"), markdown)
    write_text(path.with_name(f"{path.name}.tex"), latex(markdown))


def latex(markdown: str) -> str:
    """The tables of a Markdown text as tabulars, each behind a comment with the last line of text before it."""
    return "\n".join(_tabular(before, rows) for before, rows in _tables(markdown))


def _tables(markdown: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The text before each table, and its cells: the head first."""
    before, rows = "", []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            if not _RULE.fullmatch(line.strip()):
                rows.append(_cells(line))
        elif rows:
            yield before, rows
            before, rows = line, []
        elif line.strip():
            before = line


def _cells(line: str) -> list[str]:
    """Cells of a line; a bar behind a backslash is part of one."""
    return [cell.strip() for cell in re.findall(r"((?:\\.|[^|\\])*)\|", line.strip()[1:])]


def _tabular(before: str, rows: list[list[str]]) -> str:
    width = len(rows[0])
    numeric = [all(_NUMBER.fullmatch(re.sub(r"\*\*|</?u>", "", row[n])) for row in rows[1:]) for n in range(width)]
    lines = [" & ".join(map(_text, row)) + r" \\" for row in rows]
    return "\n".join(
        [
            f"% {before.strip('# ')}",
            f"\\begin{{tabular}}{{{''.join('r' if right else 'l' for right in numeric)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _text(markdown: str) -> str:
    """Markdown within a cell as LaTeX."""
    return "".join(_piece(found) for found in _MARK.finditer(markdown))


def _piece(found: re.Match[str]) -> str:
    kind = str(found.lastgroup)
    content = found[kind]
    if kind in _STYLES:
        return f"\\{_STYLES[kind]}{{{_text(content)}}}"
    return _CHARACTERS.get(content, content)
