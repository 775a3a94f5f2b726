"""`npeff sweep`: losses and tunings for several numbers of components."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from npeff.analyse import sweep as sweeping
from npeff.analyse.config import SweepConfig
from npeff.analyse.sweep import USERS, SweepRow, advice, default_counts, held_out_tunings, reach, sweep
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose, fit
from npeff.utils.errors import UserError
from tests.synthetic import make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", [f"text {i}" for i in range(100)], aside=[3])


def test_sweep_compares_numbers_of_components(run, capsys):
    rows = sweep(SweepConfig(run=str(run.path), components=(8, 2), holdout=0.4)).rows
    assert [row.components for row in rows] == [2, 8]
    assert rows[1].held_out_loss < rows[0].held_out_loss
    directory = run.path / "sweeps" / "npeff-0"
    kinds = sorted(path.suffix for path in directory.glob("sweep.*"))
    assert kinds == [".csv", ".json", ".md", ".png", ".svg", ".tex"]
    assert json.loads((directory / "sweep.json").read_text())["rows"][1]["components"] == 8
    assert "| 8 |" in capsys.readouterr().out
    with pytest.raises(UserError, match="--components is 0; it should be at least 1"):
        SweepConfig(run=str(run.path), components=(8, 0))


def test_numbers_of_components_are_chosen_from_the_number_of_examples(run, capsys):
    assert default_counts(2500) == [16, 32, 64, 128, 256]
    assert default_counts(50) == [2, 4, 8, 16]
    assert default_counts(10) == [2, 4, 8]
    assert default_counts(1) == [1]
    assert [row.components for row in sweep(SweepConfig(run=str(run.path))).rows] == [2, 4, 8, 16]
    assert "16 components: loss per example" in capsys.readouterr().out


def test_a_sweep_continues(run, monkeypatch):
    config = SweepConfig(run=str(run.path), components=(2, 4, 8), holdout=0.4)
    fitted = []

    def until_killed(run, config, *rest, **options):
        fitted.append(config.components)
        if fitted == [2, 4, 8]:
            raise KeyboardInterrupt
        return fit(run, config, *rest, **options)

    monkeypatch.setattr(sweeping, "fit", until_killed)
    with pytest.raises(KeyboardInterrupt):
        sweep(config)
    result = sweep(config)
    assert fitted == [2, 4, 8, 8]
    assert result.rows == [sweep(replace(config, components=(count,))).rows[0] for count in (2, 4, 8)]
    assert fitted == [2, 4, 8, 8]  # what was measured is not measured again
    fitted.clear()
    assert sweep(config) == result
    assert not fitted
    sweep(replace(config, components=(2,), tolerance=1e-2))  # another fit
    (run.path / "sweeps/npeff-0/measured.json").write_text("{")
    assert sweep(config) == result
    assert fitted == [2, 2, 4, 8]
    assert not list((run.path / "sweeps/npeff-0").glob("*checkpoint"))


@pytest.mark.parametrize(("method", "top"), [("npeff", 3), ("svd-gradients", 3), ("npeff", 60)])
def test_held_out_tunings_equal_brute_force(run, method, top):
    decomposition = decompose(DecomposeConfig(run=str(run.path), method=method, components=12, holdout=0.4))
    predictions, labels = (run.table[name].to_pylist() for name in ("prediction", "label"))
    tuned = []
    for j in range(12):
        agree = []
        for order in decomposition.orders:
            scores = decomposition.scores(order)[:, j].tolist()
            active = [i for i in decomposition.notes.held_out if scores[i] > 0]
            if len(active) >= top:
                best = sorted(active, key=lambda i: (-scores[i], i))[:top]
                agree.append([len({values[i] for i in best}) == 1 for values in (predictions, labels)])
        if agree:
            tuned.append((any(first for first, _ in agree), any(label and not first for first, label in agree)))
    plain = tuple(sum(found) / len(tuned) for found in zip(*tuned, strict=True)) if tuned else (None, None)
    assert held_out_tunings(run, decomposition, top) == plain
    assert top == 60 or 0 < plain[0] < 1


def test_advice_says_which_number_to_take():
    def row(components, held_out, lnp=None):
        return SweepRow(components, held_out - 0.01, held_out, 0.5, lnp, 10)

    assert "still falls at 64" in advice([row(32, 0.5), row(64, 0.4)])
    assert "lowest at 32 components: more overfit" in advice([row(32, 0.4), row(64, 0.5)])
    assert "is at 32: start there" in advice([row(32, 0.5, 0.2), row(64, 0.4, 0.1)])
    assert "Beyond 64 components" in advice([row(32, 0.5), row(64, 0.4), row(128, 0.399)])
    assert "more than one" in advice([row(32, 0.5)])


def test_advice_says_how_rare_a_mechanism_may_be():
    assert f"{USERS / 3200:.0%} or more of them" in reach(3200)
    assert "40 fitted examples are few" in reach(40)
