"""Which decomposition of a run is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose, open_decomposition
from npeff.store.layout import check_name, choose_decomposition, decomposition_folder, decomposition_names
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.synthetic import make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", [f"text {i}" for i in range(60)])


def fit(run: Run, components: int, made_for: str | None = None, method: str = "npeff") -> str:
    config = DecomposeConfig(run=str(run.path), components=components, method=method, max_passes=2)  # type: ignore[arg-type]
    decompose(config, made_for)
    return f"{method}-{components}-0"


def test_the_default_is_the_newest_that_was_asked_for(run: Run) -> None:
    with pytest.raises(UserError, match="npeff decompose"):
        choose_decomposition(run.path)
    first = fit(run, 3)
    assert choose_decomposition(run.path) == first
    by_the_way = fit(run, 4, made_for="compare")
    fit(run, 5, made_for="stability", method="clusters")
    assert choose_decomposition(run.path) == first  # other commands do not change it
    second = fit(run, 2)
    assert choose_decomposition(run.path) == second
    assert len(open_decomposition(run).components) == 2
    assert choose_decomposition(run.path, first) == first
    assert fit(run, 4) == by_the_way  # asked for now, though it was there already
    config = run.path / "decompositions" / by_the_way / "config.json"
    assert "made_for" not in config.read_text() or '"made_for": null' in config.read_text()
    assert len(decomposition_names(run.path)) == 4


def test_without_any_that_was_asked_for_npeff_comes_first(run: Run) -> None:
    fit(run, 3, made_for="compare", method="clusters")
    npeff = fit(run, 3, made_for="compare")
    fit(run, 3, made_for="compare", method="svd-gradients")
    assert choose_decomposition(run.path) == npeff


def test_names(run: Run) -> None:
    with pytest.raises(UserError, match="has no finished decomposition 'x'"):
        decomposition_folder(run.path, "x")
    for name in ("", "..", "a/b", ".hidden", "a\0"):
        with pytest.raises(UserError, match="--decomposition"):
            check_name(name, "--decomposition")
    check_name(None, "--decomposition")
