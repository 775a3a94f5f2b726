"""`npeff stability`: seeds, splits and their tree, other runs."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from npeff.analyse.config import StabilityConfig
from npeff.analyse.records import Level, Split, Stability
from npeff.analyse.stability import grow_tree, stability, tree_markdown, write
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
    assert all(0 < row["coefficients"] <= row["best"] <= 1 for row in found["seeds"])  # the best may repeat
    assert found["seeds"][0]["pseudo_fishers"] > 0.7  # four components were planted
    assert (directory / "stability.md").read_text() in capsys.readouterr().out
    kinds = {name: {path.suffix for path in directory.glob(f"{name}.*")} for name in ("seeds", "tree", "splits")}
    assert kinds == {"seeds": {".csv", ".png", ".svg"}, "tree": {".md"}, "splits": {".csv"}}
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
    assert [level.components for level in result.levels] == [2, 8]
    assert result.options["components"] == [2, 8]
    notes = read_json(run.path / "decompositions/npeff-8-0/config.json")["notes"]
    assert notes["made_for"] == "stability"


def by_hand() -> Stability:
    """Two components that become four: 0 into 2 and 0, 1 into 1, and 3 shares nothing with either."""
    levels = [
        Level(2, ["yes", None], ["good", "so\nso"]),
        Level(4, [None, "no", "yes", None], ["a", "$b_1$ | 日本", "c", ""]),
    ]
    split = Split(
        coarse=2,
        fine=4,
        with_splits=2,
        tuned_splits=2,
        preserved=1,
        share_preserved=0.5,
        mean_best_similarity=0.6,
        parent=[0, 1, 0, None],
        similarity=[0.3, 0.9, 0.8, 0.0],
    )
    return Stability("0", "run", {"seeds": [0]}, seeds=[], splits=[split], levels=levels)


def test_the_tree_by_hand(tmp_path: Path) -> None:
    roots = grow_tree(by_hand())
    assert [(root.level, root.number) for root in roots] == [(0, 0), (0, 1), (1, 3)]
    assert [[child.number for child in root.children] for root in roots] == [[2, 0], [1], []]
    lines = tree_markdown(by_hand()).splitlines()[4:]
    assert lines == [
        "- 2:0 **yes** good",
        "  - 4:2 (0.80) **yes** c",
        "  - 4:0 (0.30) a",
        "- 2:1 so so",
        r"  - 4:1 (0.90) **no** \$b\_1\$ \| 日本",
        "- 4:3 ",
    ]
    write(tmp_path, by_hand())
    assert (tmp_path / "tree.md").read_text(encoding="utf-8") == tree_markdown(by_hand())
