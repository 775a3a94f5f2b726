"""The demo: what it shows first, and the whole of it on the embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from npeff.config import DemoConfig
from npeff.demo import demo
from npeff.utils.errors import UserError


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
