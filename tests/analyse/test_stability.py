"""`npeff stability`: seeds, splits and their tree, other runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npeff import cli
from npeff.analyse.config import StabilityConfig
from npeff.analyse.stability import stability
from npeff.analyse.stability_report import grow_tree, tree_markdown, write
from npeff.decompose.config import Method
from npeff.decompose.methods import load
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import read_json
from tests.synthetic import make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", [f"text {i}" for i in range(80)])


def test_the_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    config = StabilityConfig(str(run.path), components=(8, 4), seeds=(0, 1), top=6)
    directory = stability(config)
    found = read_json(directory / "stability.json")
    assert [row["components"] for row in found["seeds"]] == [4, 8]
    assert all(row["pairs"] == 1 for row in found["seeds"])
    assert all(0 < row["coefficients"] <= row["best"] <= 1 for row in found["seeds"])  # the best may repeat
    assert found["seeds"][0]["pseudo_fishers"] > 0.7  # four components were planted
    assert (directory / "stability.md").read_text() in capsys.readouterr().out
    kinds = {name: {path.suffix for path in directory.glob(f"{name}.*")} for name in ("seeds", "tree", "splits")}
    assert kinds == {"seeds": {".csv", ".png", ".svg"}, "tree": {".md", ".png", ".svg"}, "splits": {".csv"}}
    (line,) = csv.DictReader((directory / "splits.csv").open(encoding="utf-8"))
    assert (line["coarse"], line["fine"], line["tuned_splits"]) == ("4", "8", str(found["splits"][0]["tuned_splits"]))
    before = (run.path / "decompositions/npeff-8-1/tensors.safetensors").stat().st_mtime_ns
    stability(config)
    assert (run.path / "decompositions/npeff-8-1/tensors.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("method", ["npeff", "clusters", "svd-gradients"])
def test_splits_equal_plain_cosines(run: Run, method: Method) -> None:
    directory = stability(StabilityConfig(str(run.path), components=(4, 8), seeds=(3,), method=method, top=6))
    (split,) = read_json(directory / "stability.json")["splits"]
    W, V = (load(run.path / f"decompositions/{method}-{n}-3").coefficients.double().numpy() for n in (4, 8))
    for j in range(8):
        cosines = [abs(W[:, i] @ V[:, j]) / np.sqrt((W[:, i] @ W[:, i]) * (V[:, j] @ V[:, j])) for i in range(4)]
        assert split["parent"][j] == (int(np.argmax(cosines)) if max(cosines) > 1e-5 else None)
        assert split["similarity"][j] == pytest.approx(max(cosines), abs=1e-5)
    assert split["with_splits"] == len(set(split["parent"]) - {None})
    if method == "svd-gradients":  # the first ones again, and new ones that are orthogonal to them
        assert split["parent"] == [0, 1, 2, 3, None, None, None, None]


def test_what_other_options_have_drawn_goes(run: Run) -> None:
    directory = stability(StabilityConfig(str(run.path), components=(4, 8), seeds=(0, 1), top=6))
    stability(StabilityConfig(str(run.path), components=(4,), seeds=(0, 1), top=6))
    assert not list(directory.glob("tree.*"))
    stability(StabilityConfig(str(run.path), components=(4, 8), seeds=(0,), top=6))
    assert {path.suffix for path in directory.glob("seeds.*")} == {".csv"}


def test_other_runs_of_the_same_examples(run: Run, tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(80)]
    same = make_run(tmp_path / "same", texts)
    other = make_run(tmp_path / "other", texts, seed=1)
    config = StabilityConfig(str(run.path), (4,), seeds=(0, 1), against=(str(same.path), str(other.path)), top=6)
    directory = stability(config)
    first, second = read_json(directory / "stability.json")["against"]
    assert first["best"] == pytest.approx(1)
    assert first["differs"] == {}
    assert second["differs"] == {"seed": [0, 1]}
    plain = []
    for seed in (0, 1):
        W, V = (load(each.path / f"decompositions/npeff-4-{seed}").coefficients.numpy() for each in (run, other))
        cosines = np.abs(W.T @ V) / np.linalg.norm(W, axis=0)[:, None] / np.linalg.norm(V, axis=0)
        plain.append(np.mean([*cosines.max(0), *cosines.max(1)]))
    assert second["best_pairs"] == pytest.approx(plain, abs=1e-5)
    assert second["best"] < 0.9
    text = (directory / "stability.md").read_text()
    assert "| seed: 0 → 1 |" in text
    assert "| nothing |" in text


def test_a_run_of_other_examples_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_run(tmp_path / "other", [f"text {i}" for i in reversed(range(80))])
    assert cli.main(["stability", str(run.path), "--against", str(other.path)]) == 2
    assert "in another order: their coefficients cannot be compared" in capsys.readouterr().err
    assert not (run.path / "decompositions").exists()


def test_options() -> None:
    for options in ({"seeds": ()}, {"seeds": (1, 1)}, {"seeds": (1,), "components": (5,)}, {"top": 1}):
        with pytest.raises(UserError):
            StabilityConfig("run", **options)  # type: ignore[arg-type]
    StabilityConfig("run", seeds=(1,), components=(5,), against=("other",))


def by_hand() -> dict[str, Any]:
    """Two components that become four: 0 into 2 and 0, 1 into 1, and 3 shares nothing with either."""
    levels = [
        {"components": 2, "tuned": ["yes", None], "texts": ["good", "so\nso"]},
        {"components": 4, "tuned": [None, "no", "yes", None], "texts": ["a", "$b_1$ | 日本", "c", ""]},
    ]
    split = {"coarse": 2, "fine": 4, "preserved": 1, "tuned_splits": 2, "share_preserved": 0.5, "with_splits": 2}
    split |= {"parent": [0, 1, 0, None], "similarity": [0.3, 0.9, 0.8, 0.0]}
    return {"options": {"seeds": [0]}, "seeds": [], "splits": [split], "levels": levels, "against": []}


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
    drawing = (tmp_path / "tree.svg").read_text(encoding="utf-8")
    assert "1 $b_1$ | 日本" in drawing  # as text, not as a formula
    assert all(word in drawing for word in ("2 c<", "0 a<", "predicted yes", "predicted no"))
