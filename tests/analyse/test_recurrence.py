from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import npeff
from npeff.analyse.config import AnalyseConfig
from npeff.analyse.recurrence import again, find, half, recurrence, usual_refits
from npeff.analyse.run import analyse, read_analysis
from npeff.decompose.config import DecomposeConfig, FitConfig
from npeff.decompose.npeff import Npeff
from npeff.decompose.run import decompose
from npeff.store.layout import decomposition_folder
from npeff.store.rows import ArrayRows
from npeff.utils.files import read_json
from tests.synthetic import make_run


def test_found_is_half_of_the_squared_length_in_its_own_match():
    e = torch.eye(4)
    turned = (0.8**0.5) * e[0] + (0.2**0.5) * e[3]
    assert find(e[:3], torch.stack([-e[1], turned, e[3]])).tolist() == [1, 1, 0]
    assert find(e[:2], torch.stack([e[0], e[0]])).tolist() == [1, 0]  # one match for one component
    assert find(e[:2], e[:1]).tolist() == [1, 0]


def test_halves_share_no_example_and_miss_none():
    examples = np.array([3, 5, 8, 9, 12])
    first, second = half(examples, 0, 0), half(examples, 0, 1)
    assert sorted([*first, *second]) == examples.tolist()
    assert not set(first) & set(second)


class Rows:
    """A run with rows only."""

    def __init__(self, source):
        self._source = source

    def source(self, kind):
        assert kind == "fisher"
        return self._source


def test_what_all_examples_share_recurs_and_what_is_noise_does_not():
    generator = torch.Generator().manual_seed(0)
    planted = torch.linalg.qr(torch.randn(60, 4, generator=generator))[0].T
    shared = planted[torch.randint(4, (120,), generator=generator)] + 0.02 * torch.randn(120, 60, generator=generator)
    noise = torch.randn(80, 60, generator=generator)
    source = ArrayRows(torch.cat([shared, noise]))
    fitted = Npeff(FitConfig(components=12, seed=1)).fit(source)
    shares, chance = recurrence(Rows(source), fitted, 4)
    is_planted = (fitted.components @ planted.T).abs().amax(dim=1) > 0.95
    assert is_planted.sum() == 4
    assert all(share == 1 for share, known in zip(shares, is_planted, strict=True) if known)
    others = [share for share, known in zip(shares, is_planted, strict=True) if not known]
    assert np.mean(others) < 0.6
    assert chance < 0.2


def test_refits_are_fits_of_other_seeds_and_of_both_halves():
    generator = torch.Generator().manual_seed(0)
    source = ArrayRows(torch.randn(40, 20, generator=generator))
    config = FitConfig(components=3, seed=4)
    made = [fit.components for fit in again(source, Npeff(config).fit(source), 4)]
    expected = [
        Npeff(replace(config, seed=5)).fit(source),
        Npeff(replace(config, seed=6)).fit(ArrayRows(source.rows[half(np.arange(40), 0, 0)])),
        Npeff(replace(config, seed=7)).fit(source),
        Npeff(replace(config, seed=8)).fit(ArrayRows(source.rows[half(np.arange(40), 0, 1)])),
    ]
    for components, fitted in zip(made, expected, strict=True):
        torch.testing.assert_close(components, fitted.components)
    few = Npeff(replace(config, components=30)).fit(source)
    assert [len(fit.components) for fit in again(source, few, 2)] == [30, 30]


@pytest.fixture
def run(tmp_path):
    made = make_run(tmp_path / "run", [f"text {i}" for i in range(80)])
    decompose(DecomposeConfig(run=str(made.path), components=4, decomposition="one", holdout=0.0))
    decompose(DecomposeConfig(run=str(made.path), components=4, decomposition="groups", method="clusters", holdout=0.0))
    return made


def test_the_command_measures_it_where_it_is_cheap_and_keeps_it(run, capsys):
    assert read_analysis(run, "one").component[0].recurrence is None  # not on the way to something else
    (made,) = analyse(AnalyseConfig(str(run.path), "one"))
    expected, chance = recurrence(
        run, decompose(DecomposeConfig(run=str(run.path), components=4, decomposition="one")), 4
    )
    assert [each.recurrence for each in made.component] == expected
    assert made.recurrence_by_chance == chance
    assert "recur in half or more of 4 other fits" in capsys.readouterr().out
    assert read_analysis(run, "one") == made
    listed = npeff.list_components(run, "one").to_pandas()
    assert listed["recurrence"].tolist() == expected
    smallest = [min((g.members for g in made.groups if j in g.members), key=len, default=None) for j in range(4)]
    assert [group if isinstance(group, list) else None for group in listed["group"]] == smallest
    assert analyse(AnalyseConfig(str(run.path), "one", refits=0)) == [made]
    (clusters,) = analyse(AnalyseConfig(str(run.path), "groups", refits=2))
    assert clusters.recurrence_by_chance is None


def test_it_is_not_measured_unasked_where_it_takes_long(run, capsys):
    folder = decomposition_folder(run.path, "one")
    assert usual_refits(run, folder) == 4
    lines = (folder / "history.csv").read_text().splitlines()
    (folder / "history.csv").write_text("\n".join([*lines, lines[-1].rsplit(",", 1)[0] + ",3600"]) + "\n")
    assert usual_refits(run, folder) == 0
    assert "--refits 4" in capsys.readouterr().out


def test_tables_lead_with_what_recurs(run):
    (made,) = analyse(AnalyseConfig(str(run.path), "one", refits=2))
    folder = decomposition_folder(run.path, "one") / "analysis"
    rows = [line.split("|") for line in (folder / "tunings.md").read_text().splitlines() if line.startswith("| ")]
    head = next(row for row in rows if " recurrence " in row)
    listed = [int(row[1]) for row in rows[rows.index(head) + 2 :]]
    assert all(made.component[a].recurs >= made.component[b].recurs for a, b in pairwise(listed))
    assert [each["recurrence"] for each in read_json(folder / "analysis.json")["component"]] == [
        each.recurrence for each in made.component
    ]
