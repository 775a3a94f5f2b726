"""What the pages show of perturbations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npeff.decompose.run import open_decomposition
from npeff.explore.config import ExportConfig
from npeff.explore.evidence import digests, heat_map
from npeff.explore.export import export
from npeff.perturb.where import Place
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.explore.test_export import data


def records(run: Run, label: str) -> dict[int, dict[str, Any]]:
    found = json.loads((run.path / "perturbations" / label / "results.json").read_text(encoding="utf-8"))
    return {record["component"]: record for record in found["components"]}


def number_of(site: Path, name: str) -> int:
    return [d["analysis"]["name"] for d in data(site, "run")["decompositions"]].index(name)


@pytest.fixture(scope="module")
def perturbed_site(perturbed: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(ExportConfig(str(perturbed.path), str(tmp_path_factory.mktemp("site") / "site"))).parent


def test_a_component_shows_what_its_perturbations_measured(perturbed: Run, perturbed_site: Path) -> None:
    number = number_of(perturbed_site, "npeff-4-0")
    labels = ["npeff-4-0-plain-lift", "npeff-4-0-reject-lift"]
    for j in (1, 3):
        page = data(perturbed_site, f"{number}/component/{j}")["perturbations"]
        assert [found["about"]["name"] for found in page] == labels
        for found in page:
            record = records(perturbed, found["about"]["name"])[j]
            written = found["record"]
            assert written["best"]["ratio"] == pytest.approx(record["best"]["ratio"], rel=1e-4)
            assert [outcome["sign"] for outcome in written["outcomes"]] == [1, -1]
            for shown, outcome in zip(written["outcomes"], record["outcomes"], strict=True):
                for name in ("top_kl", "random_kl", "norm_ratio", "magnitude"):
                    assert shown[name] == pytest.approx(outcome[name], rel=1e-4)
                assert shown["flipped"] == outcome["flipped"]
            assert len(written["curve"]) == 3
            assert len(written["largest"]) == 20
            heat = found["heat"]
            assert np.sum(heat["shares"]) == pytest.approx(1, abs=1e-4)
            for place in record["where"]:
                r, c = heat["layers"].index(place["layer"]), heat["kinds"].index(place["kind"])
                assert heat["shares"][r][c] == pytest.approx(place["share"], rel=1e-4, abs=1e-9)
    assert data(perturbed_site, f"{number}/component/0")["perturbations"] == []


def test_the_overview_has_the_largest_ratio(perturbed: Run, perturbed_site: Path) -> None:
    table = data(perturbed_site, f"{number_of(perturbed_site, 'npeff-4-0')}/components")
    measured = [records(perturbed, f"npeff-4-0-{direction}-lift") for direction in ("plain", "reject")]
    for j in range(4):
        ratios = [found[j]["best"]["ratio"] for found in measured if j in found]
        assert table["kl_ratio"][j] == (pytest.approx(max(ratios), rel=1e-4) if ratios else None)
    names = [line["name"] for line in table["perturbations"]]
    assert names == ["npeff-4-0-plain-lift", "npeff-4-0-reject-lift"]
    ratios = [measured[0][j]["best"]["ratio"] for j in (1, 3)]
    assert table["perturbations"][0]["summary"]["kl_ratio"] == pytest.approx(np.exp(np.mean(np.log(ratios))), rel=1e-4)
    assert data(perturbed_site, f"{number_of(perturbed_site, 'npeff-8-0')}/components")["kl_ratio"] is None
    perturbed_components = {
        d["analysis"]["name"]: d["perturbed"] for d in data(perturbed_site, "run")["decompositions"]
    }
    assert perturbed_components == {"npeff-4-0": 2, "npeff-4-1": 0, "npeff-8-0": 0, "clusters-4-0": 0}


def test_the_page_is_made_again_when_perturbations_or_decompositions_change(
    perturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(perturbed.path, tmp_path / "run")
    run, config = Run.open(tmp_path / "run"), ExportConfig(str(tmp_path / "run"), str(tmp_path / "site"))
    site = export(config).parent
    number = number_of(site, "npeff-4-0")
    before = digests(run)
    capsys.readouterr()
    export(config)
    assert "up to date" in capsys.readouterr().out
    shutil.rmtree(run.path / "perturbations/npeff-4-0-plain-lift")
    assert digests(run) == {file: sha for file, sha in before.items() if file.startswith("npeff-4-0-reject-lift/")}
    assert {file.split("/")[1] for file in digests(run)} == {"config.json", "components"}
    export(config)
    assert len(data(site, f"{number}/component/1")["perturbations"]) == 1
    # results of a decomposition that is no longer there are not those of the new one
    saved = open_decomposition(run, "npeff-4-1")
    saved.save(run.path / "decompositions/npeff-4-0")
    export(config)
    assert data(site, f"{number}/component/1")["perturbations"] == []
    (run.path / "perturbations/npeff-4-0-reject-lift/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"reject-lift.* is damaged"):
        export(config)
    shutil.rmtree(run.path / "perturbations")
    shutil.rmtree(run.path / "decompositions/clusters-4-0")
    export(config)
    assert len(data(site, "run")["decompositions"]) == 3


def test_experts_of_a_layer_are_put_together() -> None:
    where = [
        Place(module="", layer=layer, kind=kind, share=share, ranks={})
        for layer, kind, share in (
            (0, "mlp.experts.0.up", 0.1),
            (0, "mlp.experts.1.up", 0.2),
            (1, "mlp.experts.0.up", 0.3),
            (1, "attn.q", 0.4),
        )
    ]
    found = heat_map(where)
    assert found.kinds == ["mlp.experts.*.up", "attn.q"]
    assert found.shares == [[pytest.approx(0.3), 0], [0.3, 0.4]]
