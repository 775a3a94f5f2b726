"""The demo: what it shows first, and the whole of it on the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npeff.analyse.telling import telling
from npeff.config import DemoConfig
from npeff.demo import demo
from npeff.utils.errors import UserError


def component(number: int, top: list[int], label: str = "yes", **values: Any) -> dict[str, Any]:
    ordering = {"top": top, "labels": {label: len(top)}, "predictions": {"no": len(top)}}
    default = {"prediction_tuned": False, "label_tuned": False, "lnp_tuned": False, "label_purity": 0.5, "energy": 0.1}
    return {"number": number, "prediction_purity": 0.5, "orderings": [ordering], **default, **values}


def test_telling_components_are_tuned_pure_strong_and_different() -> None:
    found = telling(
        [
            component(0, [0, 1, 2, 3], energy=0.9),
            component(1, [4, 5, 6, 7], label_purity=0.9),
            component(2, [8, 9, 10, 11], "no", label_tuned=True, label_purity=1.0, energy=0.2),
            component(3, [12, 13, 14, 15], "no", label_tuned=True, label_purity=1.0, energy=0.3),
            component(4, [16, 17, 18, 19], label_tuned=True, lnp_tuned=True, label_purity=1.0, energy=0.0),
            component(5, [12, 13, 20, 21], label_tuned=True, label_purity=1.0, energy=0.25),  # half of it is in 3
            component(6, [30], prediction_tuned=None, label_tuned=None, lnp_tuned=None, energy=1.0),  # too few examples
        ]
    )
    assert [c["number"] for c in found] == [4, 3, 2, 1, 0]


def test_no_label_takes_more_than_half_of_the_list() -> None:
    many = [component(n, [2 * n, 2 * n + 1], "yes" if n < 8 else "no", energy=1 / (n + 1)) for n in range(10)]
    assert [c["number"] for c in telling(many)] == [0, 1, 2, 8, 9]
    assert telling([]) == []


@pytest.mark.parametrize("value", ["many", "-5", "10", "1e3", ""])
def test_a_bad_number_of_examples_is_explained(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NPEFF_DEMO_EXAMPLES", value)
    with pytest.raises(UserError, match="NPEFF_DEMO_EXAMPLES"):
        demo()
    with pytest.raises(UserError, match="at least 64"):
        DemoConfig(examples=3)


@pytest.mark.smollm2
def test_the_whole_demo_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPEFF_DEMO_EXAMPLES", "64")
    monkeypatch.setattr("npeff.demo.PERTURBED", 1)  # the others would only take longer
    page = demo()
    first = capsys.readouterr().out
    assert page == tmp_path / "runs/demo-64/site/index.html"
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
