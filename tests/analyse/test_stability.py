"""`npeff stability`: seeds and splits."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from npeff.analyse.config import StabilityConfig
from npeff.analyse.records import Stability
from npeff.analyse.stability import stability
from npeff.decompose.config import Method
from npeff.decompose.methods import load
from npeff.store.run import Run
from npeff.utils.configs import from_options, read_record, to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_json
from tests.synthetic import make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", [f"text {i}" for i in range(80)])


def test_the_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    config = StabilityConfig(str(run.path), components=(8, 4), seeds=(0, 1), top=6)
    result, directory = stability(config), run.path / "stability/npeff"
    assert read_record(Stability, directory / "stability.json") == result
    found = to_dict(result)
    assert [row["components"] for row in found["seeds"]] == [4, 8]
    assert all(row["pairs"] == 1 for row in found["seeds"])
    rounding = 1e-6
    for row in found["seeds"]:  # the best may repeat
        assert 0 < row["coefficients"] <= row["best"] + rounding <= 1 + 2 * rounding
    assert found["seeds"][0]["pseudo_fishers"] > 0.7  # four components were planted
    assert (directory / "stability.md").read_text() in capsys.readouterr().out
    assert "`npeff explore` draws the tree" in (directory / "stability.md").read_text()
    kinds = {name: {path.suffix for path in directory.glob(f"{name}.*")} for name in ("seeds", "splits")}
    assert kinds == {"seeds": {".csv", ".png", ".svg"}, "splits": {".csv"}}
    (line,) = csv.DictReader((directory / "splits.csv").open(encoding="utf-8"))
    assert (line["coarse"], line["fine"], line["tuned_splits"]) == ("4", "8", str(found["splits"][0]["tuned_splits"]))
    before = (run.path / "decompositions/npeff-8-1/tensors.safetensors").stat().st_mtime_ns
    stability(config)
    assert (run.path / "decompositions/npeff-8-1/tensors.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("method", ["npeff", "clusters", "svd-gradients"])
def test_splits_equal_plain_cosines(run: Run, method: Method) -> None:
    result = stability(StabilityConfig(str(run.path), components=(4, 8), seeds=(3,), method=method, top=6))
    (split,) = to_dict(result)["splits"]
    W, V = (load(run.path / f"decompositions/{method}-{n}-3").coefficients.double().numpy() for n in (4, 8))
    for j in range(8):
        cosines = [abs(W[:, i] @ V[:, j]) / np.sqrt((W[:, i] @ W[:, i]) * (V[:, j] @ V[:, j])) for i in range(4)]
        assert split["parent"][j] == (int(np.argmax(cosines)) if max(cosines) > 1e-5 else None)
        assert split["similarity"][j] == pytest.approx(max(cosines), abs=1e-5)
    assert split["with_splits"] == len(set(split["parent"]) - {None})
    if method == "svd-gradients":  # the first ones again, and new ones that are orthogonal to them
        assert split["parent"] == [0, 1, 2, 3, None, None, None, None]


def test_what_other_options_have_drawn_goes(run: Run) -> None:
    stability(StabilityConfig(str(run.path), components=(4, 8), seeds=(0, 1), top=6))
    directory = run.path / "stability/npeff"
    (directory / "tree.svg").write_text("of an earlier version")
    stability(StabilityConfig(str(run.path), components=(4,), seeds=(0, 1), top=6))
    assert not list(directory.glob("tree.*"))
    stability(StabilityConfig(str(run.path), components=(4, 8), seeds=(0,), top=6))
    assert {path.suffix for path in directory.glob("seeds.*")} == {".csv"}


def test_options() -> None:
    for options in ({"seeds": ()}, {"seeds": (1, 1)}, {"seeds": (1,), "components": (5,)}, {"top": 1}):
        with pytest.raises(UserError):
            StabilityConfig("run", **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="npeff diff RUN OTHER"):
        from_options(StabilityConfig, {"run": "run", "against": ("other",)})


def test_counts_are_chosen_from_the_number_of_examples(run: Run) -> None:
    result = stability(StabilityConfig(str(run.path), seeds=(0,), top=6))  # 80 examples
    assert [row.components for row in result.seeds] == [2, 8]
    assert result.options["components"] == [2, 8]
    notes = read_json(run.path / "decompositions/npeff-8-0/config.json")["notes"]
    assert notes["made_for"] == "stability"
