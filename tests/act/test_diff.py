"""What differs between runs: planted changes are found, and the same model again is called the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import npeff
from npeff.act.config import DiffConfig
from npeff.act.diff import Change, Diff, Side, View, _drops, diff, timeline
from npeff.cli import main
from npeff.utils.errors import UserError
from npeff.utils.files import read_object
from tests.synthetic import add_decomposition, make_run

TEXTS = [f"text number {n}" for n in range(160)]


def coefficients(C=6, n=400):
    random = np.random.default_rng(0)
    return torch.from_numpy(random.gamma(0.3, size=(n, C))).float()


def statuses(W, others, limit=0.1, chance=0.4, words=("split", "lost")):
    view, other = View.__new__(View), View.__new__(View)
    view.name, view.W, other.W, view.limit, view.usual = "a", W, others, limit, torch.full((W.shape[1],), 0.95)
    return view.changes(other, chance, np.zeros(len(W), bool), None, words)


def test_kept_split_changed_and_lost():
    W = coefficients()
    others = W[:, [1, 0, 3, 4, 5]].clone()  # component 2 is gone
    first = torch.rand(len(W), generator=torch.Generator().manual_seed(0)) < 0.5
    others = torch.cat([others[:, 1:] * 1.0, (W[:, 1] * first)[:, None], (W[:, 1] * ~first)[:, None]], 1)  # 1 is split
    generator = torch.Generator().manual_seed(1)
    mixed = others[:, 3].clone()  # component 5, half of whose examples are others now
    keep = torch.rand(len(W), generator=generator) < 0.5
    others[:, 3] = torch.where(keep, mixed, mixed[torch.randperm(len(W), generator=generator)])
    found = statuses(W, others)
    assert [change.status for change in found] == ["kept", "split", "lost", "kept", "kept", "changed"]
    assert found[1].parts == sorted(found[1].parts, key=lambda k: -found[1].similarity * (k == found[1].match))
    assert set(found[1].parts) == {4, 5}
    cosine = torch.nn.functional.cosine_similarity(W, others[:, found[5].match, None], dim=0)[5]
    assert found[5].similarity == pytest.approx(float(cosine), rel=1e-5)
    assert [change.status for change in statuses(others, W, words=("merged", "new"))][:3] == ["kept"] * 3


def test_a_drop_is_how_far_a_fit_is_below_the_others():
    usual = torch.tensor([[0.9, 0.8], [0.7, 0.8], [0.8, 0.2]])
    expected = [0.75 - 0.9, 0.5 - 0.8, 0.85 - 0.7, 0.5 - 0.8, 0.8 - 0.8, 0.8 - 0.2]
    torch.testing.assert_close(_drops(usual), torch.tensor(expected))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Twice the same model, then one with other rows that has its examples in another order."""
    folder, order = tmp_path_factory.mktemp("diff"), np.random.default_rng(3).permutation(160)
    made = [
        make_run(folder / "base", TEXTS),
        make_run(folder / "same", TEXTS),
        make_run(folder / "other", [TEXTS[i] for i in order], seed=1),
    ]
    for run in made:
        add_decomposition(run, components=4)
    return [str(run.path) for run in made]


def test_the_same_model_is_kept(runs):
    same = diff(DiffConfig((runs[0], runs[1])))
    assert same.examples == 160
    assert same.runs == ("base", "same")
    assert [(change.run, change.component) for change in same.changes] == [(r, j) for r in same.runs for j in range(4)]
    assert {change.status for change in same.changes} == {"kept"}
    assert all(
        change.similarity == pytest.approx(1) and change.direction == pytest.approx(1) for change in same.changes
    )
    assert same.answers == []


def test_another_model_is_not(runs, capsys):
    found = npeff.diff_runs(runs[2], runs[0], diff="other")
    last = [change for change in found.changes if change.run == "base"]
    assert {change.status for change in last} <= {"new", "changed", "merged"}
    assert found.answers
    table = npeff.open_run(runs[0]).table.to_pylist()
    assert all(table[each.example]["text"] == each.text for each in found.answers)
    assert all(table[each.example]["prediction_text"] == each.last != each.first for each in found.answers)
    weight, other = (Side(runs[n], None, 2) for n in (0, 2))
    assert all(each.after == int(weight.found.coefficients[each.example].argmax()) for each in found.answers)
    places = {text: i for i, text in enumerate(other.texts)}
    assert all(each.before == int(other.found.coefficients[places[each.text]].argmax()) for each in found.answers)
    differ, W = [each.example for each in found.answers], weight.found.coefficients
    shares = [float(W[differ, j].sum() / W[:, j].sum()) for j in range(4)]
    assert [change.answers for change in last] == pytest.approx(shares, rel=1e-4)
    folder = npeff.open_run(runs[0]).path / "diffs" / "other"
    assert {"diff.md", "diff.csv", "diff.tex", "diff.json"} <= {path.name for path in folder.iterdir()}
    assert read_object(folder / "diff.json")["runs"] == ["other", "base"]
    assert "answers differ" in capsys.readouterr().out


def test_a_component_appears_where_it_is_kept_from_then_on():
    def beside(name, *statuses):
        changes = [Change(name, 9, "lost", 0, 0.0, 0.0, None, [], 0.0)]
        changes += [Change("d", j, each, 0, j / 10, 0.9, None, [], 0.0) for j, each in enumerate(statuses)]
        return Diff((name, "d"), 100, (None, None), 0.1, (0.1, 0.1), changes, [])

    found = timeline(
        [
            beside("a", "kept", "new", "kept", "new"),
            beside("b", "kept", "kept", "changed", "new"),
            beside("c", "kept", "kept", "kept", "merged"),
        ],
        4,
    )
    assert [(each.component, each.appears) for each in found] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert found[1].similarities == [0.1, 0.1, 0.1]


def test_a_series_has_a_timeline(runs, capsys):
    found = npeff.diff_runs(runs[2], runs[1], runs[0], diff="series")
    assert found.runs == ("other", "base")
    assert sorted(each.component for each in found.timeline) == [0, 1, 2, 3]
    assert {each.appears for each in found.timeline} == {"same"}  # the same model as the last one
    assert all(each.similarities[1] == pytest.approx(1) for each in found.timeline)
    assert all(each.similarities[0] < 0.9 for each in found.timeline)
    folder = npeff.open_run(runs[0]).path / "diffs" / "series"
    assert {"timeline.png", "timeline.svg"} <= {path.name for path in folder.iterdir()}
    assert "When components of the last run appear" in capsys.readouterr().out
    assert npeff.diff_runs(runs[2], runs[0], diff="pair").timeline == []


def test_mistakes_are_told(runs, tmp_path, capsys):
    with pytest.raises(UserError, match="two runs"):
        DiffConfig((runs[0], runs[1]), ("npeff",))
    with pytest.raises(UserError, match="two runs"):
        DiffConfig((runs[0],))
    stranger = make_run(tmp_path / "stranger", [f"something else {n}" for n in range(60)])
    add_decomposition(stranger, components=4)
    assert main(["diff", runs[0], str(stranger.path)]) == 2
    assert "share 0 examples" in capsys.readouterr().err
