"""`npeff compare`: one table of all methods."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from npeff import cli
from npeff.analyse.compare import ComparedMethod, Comparison, compare, table
from npeff.analyse.config import CompareConfig, StabilityConfig
from npeff.analyse.records import Rate
from npeff.analyse.run import read_analysis
from npeff.analyse.stability import stability
from npeff.analyse.tunings import compare_rates
from npeff.decompose.config import METHODS, DecomposeConfig, SaeConfig
from npeff.decompose.run import decompose, open_decomposition
from npeff.store.layout import choose_decomposition
from npeff.utils.configs import read_record, write_record
from npeff.utils.errors import UserError
from tests.synthetic import make_run


def test_all_methods_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(170)])
    config = CompareConfig(str(run.path), components=6, top=8, sae=SaeConfig(top_k=3, sae_steps=50))
    comparison, directory = compare(config), run.path / "comparisons/6-0"
    assert read_record(Comparison, directory / "table.json") == comparison
    assert [row.method for row in comparison.rows] == list(METHODS)
    first, second = (comparison.rows[n].tunings["lnp"] for n in (0, 2))
    assert comparison.rows[2].lnp_p == compare_rates(first, second)
    assert comparison.rows[0].lnp_p is None
    assert "LnP p, against NPEFF" in (directory / "table.md").read_text()
    held_out = [open_decomposition(run, f"{method}-6-0").notes.held_out for method in METHODS]
    assert len(held_out[0]) == 51
    assert held_out == [held_out[0]] * len(METHODS), "every method has the same split"

    for compared in comparison.rows:
        assert compared.tunings == read_analysis(run, f"{compared.method}-6-0").tunings
    assert (directory / "table.md").read_text() in capsys.readouterr().out
    rows = list(csv.DictReader((directory / "table.csv").open(encoding="utf-8")))
    assert [row["method"] for row in rows] == ["NPEFF", "G-NPEFF", "GC", "SAE", "SVD-G", "SVD-A"]
    assert (directory / "table.png").is_file()
    assert (directory / "table.svg").is_file()
    lines = (directory / "table.tex").read_text().splitlines()
    assert [line.split(" & ")[0] for line in lines[5:-2]] == [row["method"] for row in rows]


def test_all_methods_and_seeds_have_the_split_of_what_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(170)])
    decompose(DecomposeConfig(run=str(run.path), components=4, holdout=0.0))
    compare(CompareConfig(str(run.path), methods=("npeff", "clusters"), components=4))
    stability(StabilityConfig(str(run.path), components=(4,), seeds=(0, 1)))
    for name in ("npeff-4-0", "clusters-4-0", "npeff-4-1"):
        assert open_decomposition(run, name).notes.holdout == 0
    decompose(DecomposeConfig(run=str(run.path), components=4, seed=2))
    with pytest.raises(UserError, match=r"different shares.*npeff-4-0 0, npeff-4-2 0\.3"):
        stability(StabilityConfig(str(run.path), components=(4,), seeds=(0, 2)))


def test_methods_without_rows_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    run.manifest.identity["collected"] = ["gradient"]
    write_record(run.path / "manifest.json", run.manifest)
    comparison = compare(CompareConfig(str(run.path), components=20, methods=("npeff", "clusters", "svd-gradients")))
    assert [row.method for row in comparison.rows] == ["clusters"]
    assert comparison.missing == {
        "npeff": "the run was collected without fisher rows",
        "svd-gradients": "rows of 16 entries have no 20 singular vectors",
    }
    text = (run.path / "comparisons/20-0/table.md").read_text()
    assert "NPEFF is left out: the run was collected without fisher rows." in text
    with pytest.raises(UserError, match="none of these methods"):
        compare(CompareConfig(str(run.path), methods=("npeff",)))


def test_the_number_of_components_is_chosen_from_the_number_of_examples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(90)])
    comparison = compare(CompareConfig(str(run.path), methods=("clusters",)))
    assert comparison.options["components"] == comparison.rows[0].components == 8
    assert choose_decomposition(run.path, None) == "clusters-8-0"  # there is no other
    decompose(DecomposeConfig(run=str(run.path), components=3))
    compare(CompareConfig(str(run.path), methods=("clusters", "npeff"), components=4))
    assert choose_decomposition(run.path, None) == "npeff-3-0"


def row(title: str, lnp: float | None) -> ComparedMethod:
    rate = Rate(tuned=1, of=2, low=0, high=1, expected=1e-6, share=0.5)
    tunings = {"prediction": rate, "label": rate, "lnp": None if lnp is None else replace(rate, share=lnp)}
    counts = {"components": 3, "eligible": 2, "left_out": 1, "top": 16, "explained": None, "orders": ["positive"]}
    return ComparedMethod(title=title, name=title, method="npeff", tunings=tunings, **counts)  # type: ignore[arg-type]


def test_the_best_lnp_is_bold_and_the_second_underlined() -> None:
    rows = [row("NPEFF", 0.2), row("GC", 0.0), row("SAE", 0.1), row("SVD-G", None)]
    text = table(Comparison("0", "run", "t", "m", {"components": 3}, rows, {})).markdown()
    assert "| NPEFF | 50.0 | 50.0 | **20.0** | 0.0 to 100.0 | 0.0001% | 0.0001% | 1 of 3 | |" in text
    assert "| SAE | 50.0 | 50.0 | <u>10.0</u> |" in text
    assert "| GC | 50.0 | 50.0 | 0.0 |" in text
    assert "| SVD-G | 50.0 | 50.0 | |  | 0.0001% | |" in text


def test_the_command_line() -> None:
    config = cli.parse("compare", ["runs/x", "--methods", "npeff", "sae", "--top-k", "8"])
    assert config == CompareConfig("runs/x", ("npeff", "sae"), sae=SaeConfig(top_k=8))
