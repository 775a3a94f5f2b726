"""Scores against hand-made tables and brute force; files of answers; labels."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from npeff.explore.themes import Themes
from npeff.store.run import Run
from npeff.study.config import ScoreConfig
from npeff.study.kit import Answer, Sheet, read_key, read_kit
from npeff.study.score import count, kappa, save_themes, score
from npeff.utils.configs import replace, write_record
from npeff.utils.errors import UserError
from tests.study.conftest import drawn
from tests.synthetic import add_decomposition, make_run


def test_the_papers_table_in_small(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who sees a theme in exactly the component groups, and somebody who errs twice."""
    kit = read_kit(made)
    key = read_key(made, kit)
    right = {e.number: Answer("yes", "a theme") if e.decomposition else Answer("no") for e in key.groups}
    tops = [e.number for e in key.groups if e.decomposition == "npeff"]
    random = [e.number for e in key.groups if e.decomposition is None]
    other = {**right, tops[0]: Answer("no"), random[0]: Answer("maybe", "a | *guess*")}
    write_record(tmp_path / "ada.json", Sheet("Ada", right, kit=kit.id))
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


def test_kappa_by_hand() -> None:
    # both yes 20, first only 5, second only 10, both no 15: agreement 0.7, by chance 0.5 · 0.6 + 0.5 · 0.4 = 0.5
    first = [True] * 25 + [False] * 25
    second = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    assert kappa(first, second) == pytest.approx(0.4)
    assert kappa(second, first) == pytest.approx(0.4)
    assert kappa([True, False], [True, False]) == 1
    assert kappa([True, False], [False, True]) == -1
    assert kappa([True, True], [True, True]) is None
    assert kappa([True, True], [False, True]) == 0
    assert kappa([], []) is None


def test_scores_against_brute_force(made: Path) -> None:
    kit = read_kit(made)
    key = read_key(made, kit)
    where = json.loads((made / "key" / "key.json").read_text())["groups"]
    sheets = [drawn(0, key, "Ada"), drawn(1, key, "Bob"), drawn(2, key, "m", source="judge:m")]
    scores = count(sheets, key)
    *singles, together = scores.annotators
    assert [row.title for row in singles] == ["Ada", "Bob", "m (automatic)"]
    sums: dict[str | None, list[int]] = {}
    for sheet, row in zip(sheets, singles, strict=True):
        assert row.unanswered == 20 - len(sheet.answers)
        for name in ("npeff", "clusters", None):
            hits = [
                sheet.answers[entry["number"]].theme in ("yes", "maybe")
                for entry in where
                if entry["decomposition"] == name and entry["number"] in sheet.answers
            ]
            got = row.false_positives if name is None else row.themed[name]
            assert (got.count, got.of) == (sum(hits), len(hits))
            assert got.share == pytest.approx(np.mean(hits))
            assert 0 <= got.low <= got.share <= got.high <= 1
            if not sheet.automatic:
                total = sums.setdefault(name, [0, 0])
                total[0] += sum(hits)
                total[1] += len(hits)
    assert together.title == "people together"
    assert [getattr(together.false_positives, name) for name in ("count", "of", "low")] == [*sums[None], None]
    assert [getattr(together.themed["npeff"], name) for name in ("count", "of")] == sums["npeff"]
    assert len(scores.pairs) == 3
    for pair, (a, b) in zip(scores.pairs, [(0, 1), (0, 2), (1, 2)], strict=True):
        both = sorted(set(sheets[a].answers) & set(sheets[b].answers))
        table = np.zeros((2, 2))
        for number in both:
            table[int(sheets[a].answers[number].theme != "no"), int(sheets[b].answers[number].theme != "no")] += 1
        observed = np.trace(table) / len(both)
        chance = (table.sum(0) * table.sum(1)).sum() / len(both) ** 2
        assert (pair.agreement.share, pair.agreement.of) == (pytest.approx(observed), len(both))
        assert pair.kappa == pytest.approx((observed - chance) / (1 - chance))
    for row in scores.themes:
        assert where[row.group - 1]["component"] == row.component
        assert where[row.group - 1]["decomposition"] == row.decomposition
