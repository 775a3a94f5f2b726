"""The table of a reproduction: measured numbers beside the paper's."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from npeff.paper import report
from npeff.paper.recipe import Listing, Missing, parse_recipe
from npeff.paper.report import Cell, Reproduction, Settings
from npeff.utils.configs import read_record

RECIPE = parse_recipe(
    "x",
    {"label": "tab:x", "title": "X", "rows": ["a"], "columns": ["b", "c"], "numbers": {"a": [78, 0.25]}},
)


def result(tasks: tuple[str, ...] = ()) -> Reproduction:
    here, paper = ({**dict.fromkeys(report.SETTINGS, side), "tau": 1, "joint_rate": 1} for side in ("here", "paper"))
    return Reproduction(
        "x",
        "tab:x",
        "X",
        "0",
        {"tasks": list(tasks)},
        cells=[Cell("a", "b", 78, 1234.5, 0), Cell("more", "b", None, 12.345, 1)],
        settings=[Settings(paper, here), Settings(paper, here | {"tau": 0.5, "joint_rate": 2})],
        missing=[Missing("that", "this")],
        listings=[Listing("Texts", ("one | two", "*three*\nfour"))],
    )


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (78, "78"), (78.0, "78.0"), (1234.5, "1,234"), (0.1234, "0.123"), (0, "0")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert report.number(value) == text


def test_the_table() -> None:
    assert report.comparison(RECIPE, result().cells).markdown().splitlines() == [
        "| | b | c |",
        "| --- | --- | --- |",
        "| a | 1,234 (78) | - (0.25) |",
        "| more | 12.3 | - |",
    ]
    assert "| c |" not in report.comparison(RECIPE, result().cells, only_measured=True).markdown()


def test_files(tmp_path: Path) -> None:
    report.write(tmp_path, RECIPE, result())
    assert read_record(Reproduction, tmp_path / "table.json") == result()
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "- that: this" in text
    assert "0.5 (1)" in text, "a setting that differs is shown"
    assert "joint_rate" not in text.replace("\\", "")
    assert r"| one \| two |" in text
    assert r"| \*three\* four |" in text
    assert (tmp_path / "table.tex").read_text(encoding="utf-8").count(r"\begin{tabular}") == 3
    rows = list(csv.DictReader((tmp_path / "table.csv").open(encoding="utf-8")))
    assert [(row["row"], row["measured"], row["here_task"]) for row in rows] == [
        ("a", "1234.5", "here"),
        ("more", "12.345", "here"),
    ]
