"""The exported files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npeff.analyse.config import AnalyseConfig
from npeff.analyse.run import analyse
from npeff.analyse.tunings import Classes, Examples
from npeff.decompose.run import open_decomposition
from npeff.explore import export as module
from npeff.explore.config import ExportConfig
from npeff.explore.export import export
from npeff.explore.pages import Histogram, cross_table, histogram
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.synthetic import add_decomposition, make_run

TEXTS = [f"text number {i}" for i in range(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("export") / "run", TEXTS, aside=[5])
    for method in ("clusters", "npeff", "svd-gradients"):
        add_decomposition(run, method)
    return run


@pytest.fixture(scope="module")
def site(run: Run) -> Path:
    return export(ExportConfig(str(run.path), str(run.path / "site"))).parent


def data(site: Path, key: str) -> Any:
    text = (site / "data" / f"{key}.js").read_text(encoding="ascii")
    found = re.fullmatch(r'npeffData\("([^"]*)",(.*)\);\n', text, re.DOTALL)
    assert found
    assert found[1] == key
    return json.loads(found[2])


def test_npeff_comes_first(site: Path) -> None:
    run = data(site, "run")
    assert [d["analysis"]["name"] for d in run["decompositions"]] == ["npeff", "clusters", "svd-gradients"]
    assert run["examples"] == 300
    assert run["decompositions"][0]["losses"]


def test_the_page_opens_on_the_decomposition_that_is_meant(run: Run, site: Path, tmp_path: Path) -> None:
    assert data(site, "run")["default"] == 0  # made at one time: NPEFF
    other = export(ExportConfig(str(run.path), str(tmp_path / "site"), decomposition="clusters")).parent
    assert data(other, "run")["default"] == 1
    with pytest.raises(UserError, match="absent"):
        export(ExportConfig(str(run.path), str(tmp_path / "site"), decomposition="absent"))


def test_every_example_is_in_its_block(site: Path) -> None:
    blocks = [data(site, f"examples/{n}") for n in range(2)]
    assert blocks[0]["text"] + blocks[1]["text"] == TEXTS
    assert blocks[0]["aside"][5] == "not finite"
    assert not (site / "data/examples/2.js").exists()


def test_a_component_page_lists_top_and_bands_in_order(run: Run, site: Path) -> None:
    W = open_decomposition(run, "npeff").coefficients.numpy()
    for j in range(6):
        page = data(site, f"0/component/{j}")
        (ordering,) = page["orderings"]
        order = [i for i in np.argsort(-W[:, j], kind="stable").tolist() if W[i, j] > 0]
        assert ordering["active"] == len(order)
        for part in ordering["lists"]:
            assert part["examples"] == order[part["place"] : part["place"] + len(part["examples"])]
            assert part["coefficients"] == pytest.approx([W[i, j] for i in part["examples"]], rel=1e-4)
            for i in part["examples"]:
                assert page["shown"][str(i)][0] == TEXTS[i]
        assert len(ordering["lists"]) > 1
        assert page["histogram"]["zero"] + sum(page["histogram"]["counts"]) == 299
        assert np.sum(ordering["cross"]["top"]) == min(16, len(order))
        assert np.sum(ordering["cross"]["active"]) == len(order)


def test_an_example_says_what_explains_it(run: Run, site: Path) -> None:
    npeff = open_decomposition(run, "npeff")
    block = data(site, "0/examples/1")
    for at in range(len(block["used"])):
        i = 256 + at
        assert sorted(block["components"][at]) == npeff.coefficients[i].nonzero().flatten().tolist()
        assert block["shares"][at] == sorted(block["shares"][at], reverse=True)
        assert sum(block["shares"][at]) == pytest.approx(1 - block["residual"][at], abs=5e-3)
    clusters = data(site, "1/examples/0")
    assert clusters["shares"][0] is None
    assert clusters["used"][5] == 0  # set aside


def test_a_second_export_does_nothing_until_something_changes(
    run: Run, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (site / "index.html").stat().st_mtime_ns
    export(ExportConfig(str(run.path), str(site)))
    assert "up to date" in capsys.readouterr().out
    assert (site / "index.html").stat().st_mtime_ns == before


def test_options_of_an_analysis_are_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TEXTS[:60])
    add_decomposition(run)
    analyse(AnalyseConfig(str(run.path), top=5, unique=True))
    site = export(ExportConfig(str(run.path), str(tmp_path / "site"))).parent
    assert data(site, "run")["decompositions"][0]["analysis"]["top"] == 5
    analyse(AnalyseConfig(str(run.path), top=6))
    export(ExportConfig(str(run.path), str(tmp_path / "site")))
    assert data(site, "run")["decompositions"][0]["analysis"]["top"] == 6


def test_other_directories_are_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        export(ExportConfig(str(run.path), str(tmp_path)))
    assert [file.name for file in tmp_path.iterdir()] == ["precious.txt"]


def test_a_failed_export_leaves_the_old_one(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = export(ExportConfig(str(run.path), str(tmp_path / "site"))).parent
    (site / "site.json").write_text("{}")  # out of date

    def broken(*_: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(module, "_write_examples", broken)
    with pytest.raises(RuntimeError):
        export(ExportConfig(str(run.path), str(site)))
    assert [item.name for item in tmp_path.iterdir()] == ["site"]
    assert (site / "index.html").is_file()


def test_what_killed_exports_left_goes_away(run: Run, tmp_path: Path) -> None:
    old, new = tmp_path / ".site.12345678.new", tmp_path / ".site.87654321.new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    export(ExportConfig(str(run.path), str(tmp_path / "site")))
    assert {item.name for item in tmp_path.iterdir()} == {"site", new.name}


def test_the_page_asks_no_other_host_and_makes_no_markup_of_data(site: Path) -> None:
    assert {"index.html", "core.js", "style.css"} < set(module.ASSETS)
    for asset in module.ASSETS:
        text = (site / asset).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert set(re.findall(r'<script src="([^"]*)" defer>', page)) == {n for n in module.ASSETS if n.endswith(".js")}


def test_the_cross_table_counts_every_example_once() -> None:
    labels = np.array([0, 0, 1, -1, 1, 0])
    predictions = np.array([9, 8, 9, 9, 1, 9])
    names = [str(i) for i in range(30)]
    examples = Examples(Classes(predictions, names), Classes(labels, names), np.arange(6), np.ones(6, bool))
    found = cross_table(np.array([5, 0, 2, 3, 1]), 3, examples)
    assert found.labels == ["0", "1", "no label"]
    assert found.predictions == ["9", "8"]
    assert found.top == [[2, 0], [1, 0], [0, 0]]
    assert found.active == [[2, 1], [1, 0], [1, 0]]


def test_rare_classes_are_put_together() -> None:
    codes = np.arange(40)
    classes = Classes(codes, [f"class {i}" for i in codes])
    examples = Examples(classes, Classes(np.full(40, -1), []), codes, np.ones(40, bool))
    found = cross_table(codes, 16, examples)
    assert found.labels is None
    assert found.predictions == [f"class {i}" for i in range(8)] + ["other"]
    assert found.active == [[1] * 8 + [32]]


def test_a_histogram_leaves_out_zeros() -> None:
    found = histogram(np.array([0, 0, 1, 2, 2, -1], np.float32))
    assert found.zero == 2
    assert sum(found.counts) == 4
    assert (found.edges[0], found.edges[-1]) == (-1, 2)
    near = np.array([0.5, np.nextafter(np.float32(0.5), np.float32(1))], np.float32)
    assert sum(histogram(near).counts) == 2
    assert histogram(np.zeros(3, np.float32)) == Histogram(zero=3, counts=[], edges=[])
