"""Scores against hand-made tables and brute force; files of answers; labels."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from npeff.explore.themes import Themes
from npeff.store.run import Run
from npeff.study.answers import Answer, Sheet, write_sheet
from npeff.study.config import ScoreConfig
from npeff.study.kit import read_key, read_kit
from npeff.study.score import save_themes, score
from npeff.utils.configs import replace
from npeff.utils.errors import UserError
from tests.synthetic import add_decomposition, make_run


def test_the_papers_table_in_small(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who sees a theme in exactly the component groups, and somebody who errs twice."""
    kit = read_kit(made)
    key = read_key(made, kit)
    right = {e.number: Answer("yes", "a theme") if e.decomposition else Answer("no") for e in key.groups}
    tops = [e.number for e in key.groups if e.decomposition == "npeff"]
    random = [e.number for e in key.groups if e.decomposition is None]
    other = {**right, tops[0]: Answer("no"), random[0]: Answer("maybe", "a | *guess*")}
    write_sheet(tmp_path / "ada.json", kit, Sheet("Ada", right))
    lines = [["group", "theme", "description"], *([n, a.theme.upper(), a.words] for n, a in other.items())]
    with (tmp_path / "bob.csv").open("w", newline="") as handle:
        csv.writer(handle).writerows(lines)
    copied = shutil.copytree(made, tmp_path / "kit")
    directory = score(ScoreConfig(str(copied), (str(tmp_path / "ada.json"), str(tmp_path / "bob.csv"))))
    said = capsys.readouterr().out
    assert "| Ada | npeff | 100% (5 of 5) | 57% to 100% | 0% (0 of 10) | 0% to 28% | 0 |" in said
    assert "| bob | npeff | 80% (4 of 5) |" in said
    assert "| people together | npeff | 90% (9 of 10) | | 5% (1 of 20) | | 0 |" in said
    assert "| Ada | bob | 90% (18 of 20) | 70% to 97% | 0.80 |" in said
    assert (directory / "scores.md").read_text().startswith(said.split("\nin ")[0].strip()[:200])
    values = json.loads((directory / "scores.json").read_text())
    assert values["pairs"][0]["kappa"] == pytest.approx(0.8)
    rows = list(csv.DictReader((directory / "scores.csv").open(newline="")))
    assert [row["themed_share"] for row in rows if row["annotator"] == "bob"] == ["0.8", "1.0"]
    assert len(list(csv.DictReader((directory / "themes.csv").open(newline="")))) == 20
    assert "a theme" in (directory / "scores.md").read_text()


def test_themes_become_labels_once(made: Path, run: Run, tmp_path: Path) -> None:
    run = Run.open(shutil.copytree(run.path, tmp_path / "run"))  # other tests use the same one
    kit = read_kit(made)
    key = read_key(made, kit)
    tops = [entry for entry in key.groups if entry.decomposition == "npeff"]
    random = next(entry for entry in key.groups if entry.decomposition is None)
    person = Sheet("Ada", {tops[0].number: Answer("yes", "w" * 300), random.number: Answer("yes", "nothing")})
    judged = Sheet("m", {tops[0].number: Answer("maybe", "auto"), tops[1].number: Answer("yes", "auto")}, "judge:m")
    assert save_themes(str(run.path), key, [judged, person]) == 3
    assert save_themes(str(run.path), key, [judged, person]) == 0
    labels = Themes(run, "npeff").current()
    assert tops[0].component is not None
    assert tops[1].component is not None
    first, second = labels[tops[0].component], labels[tops[1].component]
    assert (first.who, first.source, len(first.theme)) == ("Ada", "person", 200)
    assert (second.theme, second.source) == ("auto", "judge:m")
    assert set(labels) == {tops[0].component, tops[1].component}


def test_labels_do_not_go_to_another_run_or_decomposition(made: Path, run: Run, tmp_path: Path) -> None:
    key = read_key(made, read_kit(made))
    other = make_run(tmp_path / "run", [f"text {i}" for i in range(50)], seed=1)
    add_decomposition(other, components=3)
    with pytest.raises(UserError, match="another run"):
        save_themes(str(other.path), key, [])
    changed = replace(key, decompositions={"npeff": "0"})
    with pytest.raises(UserError, match="was replaced since"):
        save_themes(str(run.path), changed, [])
