"""The demo: what it shows first, and the whole of it on the embedded model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from npeff.config import DemoConfig
from npeff.demo import _effect, demo
from npeff.perturb.elsewhere import Damage
from npeff.perturb.evaluate import Outcome
from npeff.perturb.records import ComponentRecord, Null, Results, summarise
from npeff.perturb.statistics import Permuted
from npeff.utils.errors import UserError


@pytest.mark.parametrize("value", ["many", "-5", "199", "1e3", ""])
def test_a_bad_number_of_examples_is_explained(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NPEFF_DEMO_EXAMPLES", value)
    with pytest.raises(UserError, match="NPEFF_DEMO_EXAMPLES"):
        demo()
    with pytest.raises(UserError, match="at least 200"):
        DemoConfig(examples=3)


def test_an_unknown_demo_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPEFF_DEMO", "poems")
    with pytest.raises(UserError, match="'poems'; it should be reviews or corpus"):
        demo()


@pytest.mark.smollm2
def test_the_whole_demo_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPEFF_DEMO_EXAMPLES", "200")
    for name, fewer in (("PERTURBED", 1), ("NULLS", 3), ("RANDOM", 16), ("CARRIERS", 16)):
        monkeypatch.setattr(f"npeff.demo.{name}", fewer)  # more would only take longer
    page = demo()
    first = capsys.readouterr().out
    assert page == tmp_path / "runs/demo-200/site/index.html"
    assert page.is_file()
    assert str(page) in first
    assert first.count("  Component ") >= 2
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert demo() == page
    second = capsys.readouterr().out
    assert second.count("up to date") == 2
    assert "is already complete" in second
    assert "is already there" in second
    assert first.split("most telling")[1] == second.split("most telling")[1]
    now = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    changed = {path.name for path in written if written[path] != now.get(path) and "perturbations" not in path.parts}
    assert changed <= {".lock"}
    assert first.count("Changing the model along it") == 1
    assert "held-out ones; 95% interval" in first
    assert "Random groups of examples in its place give" in first
    assert "prompts of other tasks up to" in first


def test_an_effect_within_chance_is_called_none() -> None:
    top, elsewhere = list(range(16)), [Damage("running text", 0.01, 9), Damage("yat", 0.05, 3), Damage("sst2", 0.02, 3)]
    outcome = Outcome(
        *(1.0, 0.1, 0.04, 2.5, "positive", 1, None, 1.0, {}, {}, None, top),
        interval=(1.5, 4.0),
        permuted=Permuted(0.5, 1.5, 0.01),
        elsewhere=elsewhere,
    )
    record = ComponentRecord(3, 1.0, 1.0, outcome)
    null = Null(4, 1.0, (0.8, 1.2), (0.5, 2.0))

    def words(null: Null) -> str:
        return " ".join(_effect(Results(replace(summarise([record], "heldout"), null=null), components=[record]), 3))

    said = words(null)
    assert "2.5 times as much as those of other held-out ones; 95% interval 1.5 to 4." in said
    assert "95% of them 0.5 to 2." in said
    assert "running text changes 0.1 times" in said
    assert "up to 0.5 times" in said
    assert "no effect" not in said
    assert "That is no effect above chance." in words(replace(null, single=(0.3, 3.0)))
    assert _effect(Results(summarise([record], "heldout"), components=[record]), 4) == _effect(None, 3) == []
