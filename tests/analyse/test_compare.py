"""`npeff compare`: one table of all methods."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from npeff import cli
from npeff.analyse.compare import compare, markdown
from npeff.analyse.config import CompareConfig
from npeff.decompose.config import METHODS, SaeConfig
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, write_json
from tests.synthetic import make_run


def test_all_methods_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    config = CompareConfig(str(run.path), components=6, top=8, sae=SaeConfig(top_k=3, sae_steps=50))
    directory = compare(config)
    found = read_json(directory / "table.json")
    assert [row["method"] for row in found["rows"]] == list(METHODS)
    for row in found["rows"]:
        analysis = read_json(run.path / "decompositions" / f"{row['method']}-6-0" / "analysis/analysis.json")
        assert row["tunings"] == analysis["tunings"]
    assert (directory / "table.md").read_text() in capsys.readouterr().out
    rows = list(csv.DictReader((directory / "table.csv").open(encoding="utf-8")))
    assert [row["method"] for row in rows] == ["NPEFF", "G-NPEFF", "GC", "SAE", "SVD-G", "SVD-A"]
    assert (directory / "table.png").is_file()
    assert (directory / "table.svg").is_file()
    lines = (directory / "table.tex").read_text().splitlines()
    assert [line.split(" & ")[0] for line in lines[5:-2]] == [row["method"] for row in rows]


def test_methods_without_rows_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    run.manifest["identity"]["collected"] = ["gradient"]
    write_json(run.path / "manifest.json", run.manifest)
    directory = compare(CompareConfig(str(run.path), components=20, methods=("npeff", "clusters", "svd-gradients")))
    found = read_json(directory / "table.json")
    assert [row["method"] for row in found["rows"]] == ["clusters"]
    assert found["missing"] == {
        "npeff": "the run was collected without fisher rows",
        "svd-gradients": "rows of 16 numbers have no 20 singular vectors",
    }
    with pytest.raises(UserError, match="none of these methods"):
        compare(CompareConfig(str(run.path), methods=("npeff",)))


def row(title: str, lnp: float | None) -> dict[str, Any]:
    rate = {"share": 0.5, "low": 0, "high": 1, "expected": 1e-6, "tuned": 1, "of": 2}
    tunings = {"prediction": rate, "label": rate, "lnp": None if lnp is None else {**rate, "share": lnp}}
    return {"title": title, "tunings": tunings, "left_out": 1, "components": 3}


def test_the_best_lnp_is_bold_and_the_second_underlined() -> None:
    found = {"task": "t", "model": "m", "options": {"components": 3}, "missing": {}}
    text = markdown({**found, "rows": [row("NPEFF", 0.2), row("GC", 0.0), row("SAE", 0.1), row("SVD-G", None)]})
    assert "| NPEFF | 50.0 | 50.0 | **20.0** | 0.0001% | 0.0001% | 1 of 3 |" in text
    assert "| SAE | 50.0 | 50.0 | <u>10.0</u> |" in text
    assert "| GC | 50.0 | 50.0 | 0.0 |" in text
    assert "| SVD-G | 50.0 | 50.0 |  | 0.0001% |  |" in text


def test_the_command_line() -> None:
    config = cli.parse("compare", ["runs/x", "--methods", "npeff", "sae", "--top-k", "8"])
    assert config == CompareConfig("runs/x", ("npeff", "sae"), sae=SaeConfig(top_k=8))
