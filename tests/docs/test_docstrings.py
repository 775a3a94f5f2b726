"""What is public says what it takes, gives and refuses. pydoclint, in `make lint`, compares that with the signature."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.docs.blocks import ROOT

SHORT = 5
"""Lines of a body that a one-line docstring is enough for."""
MODULES = sorted((ROOT / "src" / "npeff").rglob("*.py"))


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def needs_sections(function: ast.FunctionDef) -> bool:
    """Whether a function is more than a short helper, and has something to say about arguments or result."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
    arguments = [
        each.arg for each in (*function.args.args, *function.args.kwonlyargs) if each.arg not in ("self", "cls")
    ]
    nothing = isinstance(function.returns, ast.Constant) and function.returns.value is None
    return lines > SHORT and (bool(arguments) or not nothing)


SECTIONS = ("Args:", "Returns:", "Yields:")
DESCRIBED = {
    function.name
    for path in MODULES
    for function in public_functions(ast.parse(path.read_text(encoding="utf-8")).body)
    if any(title in (ast.get_docstring(function) or "") for title in SECTIONS)
}
"""Functions and methods that some class describes in full: those that stand in for them need not do it again."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "src" / "npeff")))
def test_public_functions_say_what_they_take_and_give(path: object) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    silent = [
        function.name
        for function in public_functions(tree.body)
        if needs_sections(function)
        and not any(title in (ast.get_docstring(function) or "") for title in SECTIONS)
        and not (function.name in DESCRIBED and ast.get_docstring(function) is None)
    ]
    assert not silent
