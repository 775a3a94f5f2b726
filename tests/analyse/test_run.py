"""`npeff analyse` from a run directory to its files."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from npeff import cli
from npeff.analyse import report
from npeff.analyse.config import AnalyseConfig
from npeff.analyse.records import Analysis, AnalysisInputs, AnalysisOptions
from npeff.analyse.run import analyse, read_analysis, read_examples, summarise
from npeff.analyse.tunings import Classes
from npeff.decompose.run import open_decomposition
from npeff.store.run import Run
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import write_json
from tests.synthetic import add_decomposition, make_run

TEXTS = [f"text {i}" for i in range(90)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("analyse") / "run", TEXTS, aside=[3])
    for method in ("npeff", "clusters", "svd-gradients"):
        add_decomposition(run, method)
    return run


def folder_of(run: Run, name: str) -> Path:
    return run.path / "decompositions" / name / "analysis"


def read(run: Run, name: str) -> dict[str, object]:
    return json.loads((folder_of(run, name) / "analysis.json").read_text())


def test_all_files_are_written_and_can_be_read(run: Run) -> None:
    analyses = analyse(AnalyseConfig(str(run.path), top=8))
    assert [analysis.name for analysis in analyses] == ["clusters", "npeff", "svd-gradients"]
    for folder in (folder_of(run, analysis.name) for analysis in analyses):
        assert sorted(file.name for file in folder.iterdir()) == sorted(report.FILES)
        for name in ("tunings", "density"):
            assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
            ElementTree.parse(folder / f"{name}.svg")
        rows = list(csv.DictReader((folder / "components.csv").open(encoding="utf-8")))
        assert [int(row["component"]) for row in rows] == list(range(6))


def test_numbers_equal_a_plain_computation(run: Run) -> None:
    analyse(AnalyseConfig(str(run.path), "npeff", top=8))
    found = read(run, "npeff")
    W = open_decomposition(run, "npeff").coefficients.numpy()
    table = run.table.to_pylist()
    tuned = 0
    for component in found["component"]:
        column = W[:, component["number"]]
        order = [i for i in np.argsort(-column, kind="stable").tolist() if column[i] > 0]
        (ordering,) = component["orderings"]
        assert ordering["top"] == order[:8]
        assert component["used"] == len(order)
        assert component["density"] == pytest.approx(len(order) / 89)
        assert component["energy"] == pytest.approx((column**2).sum() / (W.astype(float) ** 2).sum(), rel=1e-5)
        labels = {table[i]["label"] for i in order[:8]}
        predictions = {table[i]["prediction"] for i in order[:8]}
        assert component["lnp_tuned"] == (len(labels) == 1 and len(predictions) > 1)
        tuned += len(predictions) == 1
        others = [k for k in range(6) if k != component["number"]]
        r = np.corrcoef(W.T.astype(float))[component["number"]]
        assert component["correlated"] == sorted(others, key=lambda k: -abs(r[k]))
        assert component["correlation"] == pytest.approx([r[k] for k in component["correlated"]], abs=1e-4)
    assert found["tunings"]["prediction"]["tuned"] == tuned > 0
    assert found["examples"] == 89


def test_clusters_rank_by_proximity_to_the_centroid(run: Run) -> None:
    analyse(AnalyseConfig(str(run.path), "clusters", top=4))
    clusters = open_decomposition(run, "clusters")
    gradients = run.source("gradient")
    rows = torch.zeros(90, 16)
    rows[torch.from_numpy(gradients.ranks > 0)] = torch.nn.functional.normalize(gradients.read(0, 90), dim=1)
    for component in read(run, "clusters")["component"]:
        members = (clusters.coefficients[:, component["number"]] > 0).nonzero().flatten()
        distance = (rows[members] - clusters.components[component["number"]]).norm(dim=1)
        top = component["orderings"][0]["top"]
        assert set(top) <= set(members.tolist())
        assert top == members[distance.argsort()][:4].tolist()


def test_an_svd_has_three_orderings(run: Run) -> None:
    analyse(AnalyseConfig(str(run.path), "svd-gradients", top=8))
    found = read(run, "svd-gradients")
    assert found["orders"] == ["positive", "negative", "absolute"]
    for component in found["component"]:
        assert component["prediction_tuned"] == any(o["prediction_tuned"] for o in component["orderings"])


def test_shares_of_an_example_add_up_to_what_is_explained(run: Run) -> None:
    analyse(AnalyseConfig(str(run.path), "svd-gradients", top=8))
    W = open_decomposition(run, "svd-gradients").coefficients
    for component in read(run, "svd-gradients")["component"]:
        for ordering in component["orderings"]:
            squares = W[ordering["top"], component["number"]].square().tolist()
            assert ordering["shares"] == pytest.approx(squares, rel=1e-3, abs=1e-6)


def test_a_second_analysis_does_nothing_and_other_options_do(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    analyse(AnalyseConfig(str(run.path), "npeff", top=5))
    folder = folder_of(run, "npeff")
    before = (folder / "analysis.json").stat().st_mtime_ns
    analyse(AnalyseConfig(str(run.path), "npeff", top=5))
    assert "up to date" in capsys.readouterr().out
    assert (folder / "analysis.json").stat().st_mtime_ns == before
    (folder / "tunings.svg").unlink()  # what is not whole is made again
    analyse(AnalyseConfig(str(run.path), "npeff", top=5))
    assert (folder / "tunings.svg").is_file()
    analyse(AnalyseConfig(str(run.path), "npeff", top=6))
    assert read(run, "npeff")["top"] == 6


def test_the_same_analysis_gives_the_same_files(run: Run) -> None:
    contents = []
    for _ in range(2):
        analyse(AnalyseConfig(str(run.path), "npeff", top=7))
        folder = folder_of(run, "npeff")
        contents.append({file.name: file.read_bytes() for file in folder.iterdir()})
        (folder / "analysis.json").unlink()
    assert contents[0] == contents[1]


@pytest.mark.parametrize("task_labels", [["Negative", "Positive"], []])
def test_without_labels(tmp_path: Path, task_labels: list[str]) -> None:
    run = make_run(tmp_path / "run", TEXTS, labels=[None] * 90, task_labels=task_labels)
    add_decomposition(run)
    analyse(AnalyseConfig(str(run.path)))
    found = read(run, "npeff")
    assert found["labels"] is None
    assert found["tunings"]["label"] is None
    assert found["tunings"]["lnp"] is None
    assert found["tunings"]["prediction"]["of"] == 6 - found["left_out"]
    (row, *_) = csv.DictReader((tmp_path / "run/decompositions/npeff/analysis/components.csv").open())
    assert row["label_tuned"] == row["lnp_tuned"] == row["label_purity"] == ""


def test_unique_counts_texts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i % 10}" for i in range(60)])
    add_decomposition(run)
    analyse(AnalyseConfig(str(run.path), top=6, unique=True))
    for component in read(run, "npeff")["component"]:
        top = component["orderings"][0]["top"]
        assert len({i % 10 for i in top}) == len(top)
        assert component["orderings"][0]["active"] <= 10


def test_components_with_few_examples_are_left_out_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TEXTS)
    add_decomposition(run, "clusters", 12)
    analyse(AnalyseConfig(str(run.path)))
    found = read(run, "clusters")
    sizes = [component["used"] for component in found["component"]]
    assert found["left_out"] == sum(size < 16 for size in sizes) > 0
    assert found["eligible"] == 12 - found["left_out"]
    assert [c["prediction_tuned"] is None for c in found["component"]] == [size < 16 for size in sizes]


def test_markdown_shows_hostile_text_as_text(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", ["<script>alert(1)</script> | a *b* [c](http://d) \x07\n" + str(i) for i in range(60)]
    )
    add_decomposition(run)
    analyse(AnalyseConfig(str(run.path)))
    text = (folder_of(run, "npeff") / "tunings.md").read_text()
    assert r"\<script\>alert(1)\</script\> \| a \*b\* \[c\]" in text
    assert "\x07" not in text


@pytest.mark.parametrize("name", ["nothing", "../npeff"])
def test_unknown_names(run: Run, name: str) -> None:
    with pytest.raises(UserError, match="has no finished decomposition"):
        analyse(AnalyseConfig(str(run.path), name))


def test_a_run_without_decompositions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TEXTS[:20])
    with pytest.raises(UserError, match="npeff decompose"):
        analyse(AnalyseConfig(str(run.path)))


def test_the_command_line(run: Run) -> None:
    config = cli.parse("analyse", [str(run.path), "--decomposition", "npeff", "--top", "4", "--unique"])
    assert config == AnalyseConfig(str(run.path), "npeff", 4, True)
    with pytest.raises(UserError):
        AnalyseConfig("run", top=1)


def test_summaries_are_plain_json(run: Run) -> None:
    inputs = AnalysisInputs("run", "table", None, AnalysisOptions(16, False))
    found = summarise("npeff", open_decomposition(run, "npeff"), read_examples(run), inputs)
    values = to_dict(found)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert from_dict(Analysis, values) == found


def test_an_analysis_is_read_as_it_was_made(run: Run) -> None:
    (made,) = analyse(AnalyseConfig(str(run.path), "npeff", top=3, unique=True))
    before = (folder_of(run, "npeff") / "analysis.json").stat().st_mtime_ns
    assert read_analysis(run, "npeff") == made
    assert (folder_of(run, "npeff") / "analysis.json").stat().st_mtime_ns == before


def test_an_analysis_of_an_earlier_version_is_read_or_made_again(run: Run) -> None:
    (made,) = analyse(AnalyseConfig(str(run.path), "npeff", top=4))
    file = folder_of(run, "npeff") / "analysis.json"
    values = to_dict(made)
    values["inputs"]["options"]["correlated"] = 8  # an option of 0.1.0
    write_json(file, values, sealed=True)
    before = file.stat().st_mtime_ns
    assert read_analysis(run, "npeff") == made
    assert file.stat().st_mtime_ns == before
    del values["component"][0]["energy"]
    write_json(file, values, sealed=True)
    analyse(AnalyseConfig(str(run.path), "npeff", top=4))
    assert read_analysis(run, "npeff") == made


def test_a_damaged_analysis_is_named(run: Run) -> None:
    analyse(AnalyseConfig(str(run.path), "npeff", top=4))
    file = folder_of(run, "npeff") / "analysis.json"
    original = file.read_text()
    file.write_text(original.replace('"top": 4', '"top": 5'))
    with pytest.raises(UserError, match=r"analysis\.json is damaged"):
        read_analysis(run, "npeff")
    file.write_text(original)


@pytest.mark.parametrize("rare", [0, 1])
def test_one_prediction_for_nearly_all_is_told(
    tmp_path: Path, rare: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", TEXTS)
    add_decomposition(run)
    codes = np.array([1] * (90 - rare) + [0] * rare)
    examples = dataclasses.replace(read_examples(run), predictions=Classes(codes, ["Negative", "Positive"]))
    monkeypatch.setattr("npeff.analyse.run.read_examples", lambda run: examples)
    analyse(AnalyseConfig(str(run.path)))
    said = capsys.readouterr().out
    which = "All 90" if not rare else "89 of 90"
    assert f"{which} examples were predicted Positive: being tuned to a prediction means nothing here." in said
    assert "e+" not in said
    assert which in (folder_of(run, "npeff") / "tunings.md").read_text()
