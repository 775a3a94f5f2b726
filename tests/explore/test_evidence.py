"""What the pages show of perturbations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from npeff.decompose.run import open_decomposition
from npeff.explore.config import ExportConfig
from npeff.explore.evidence import heat_map
from npeff.explore.export import export
from npeff.perturb.records import chance_limit, read_results
from npeff.perturb.where import Place
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.explore.conftest import HELD_OUT, IN_SAMPLE
from tests.explore.test_export import data


def folder(run: Run, name: str) -> Path:
    return run.path / "perturbations" / name


def number_of(site: Path, name: str) -> int:
    return [d["analysis"]["name"] for d in data(site, "run")["decompositions"]].index(name)


@pytest.fixture(scope="module")
def perturbed_site(perturbed: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(ExportConfig(str(perturbed.path), str(tmp_path_factory.mktemp("site") / "site"))).parent


def test_a_component_shows_what_its_perturbations_measured(perturbed: Run, perturbed_site: Path) -> None:
    number = number_of(perturbed_site, "npeff-4-0")
    for j in (1, 3):
        page = data(perturbed_site, f"{number}/component/{j}")["perturbations"]
        assert [found["about"]["name"] for found in page] == [HELD_OUT, IN_SAMPLE]  # fewer components, but held out
        assert [found["about"]["summary"]["protocol"] for found in page] == ["heldout", "paper"]
        assert page[0]["about"]["parts"] == {"fit": 60, "tune": 20, "test": 40}
        for found in page:
            results = json.loads((folder(perturbed, found["about"]["name"]) / "results.json").read_text("utf-8"))
            record = next(each for each in results["components"] if each["component"] == j)
            shown, best = found["record"]["best"], record["best"]
            for name in ("ratio", "top_kl", "random_kl", "norm_ratio", "magnitude"):
                assert shown[name] == pytest.approx(best[name], rel=1e-4)
            for name in ("flipped", "interval", "permuted", "elsewhere"):
                assert shown[name] == best[name]
            assert shown["elsewhere"][0]["text"] == "running text"
            assert found["limit"] == max(results["summary"]["null"]["single"][1], best["permuted"]["high"])
            assert found["others"] == sum(kl is not None for kl in best["random_kls"])
            assert [trial["sign"] for trial in found["record"]["tried"]] == [1, -1]
            assert shown["top_kls"] == shown["random_kls"] == []
            assert len(found["record"]["curve"]) == 3
            assert len(found["record"]["largest"]) == 20
            heat = found["heat"]
            assert np.sum(heat["shares"]) == pytest.approx(1, abs=1e-4)
            for place in record["where"]:
                r, c = heat["layers"].index(place["layer"]), heat["kinds"].index(place["kind"])
                assert heat["shares"][r][c] == pytest.approx(place["share"], rel=1e-4, abs=1e-9)
    (only,) = data(perturbed_site, f"{number}/component/0")["perturbations"]
    assert only["about"]["name"] == IN_SAMPLE


def test_the_overview_has_effects_on_held_out_examples_alone(perturbed: Run, perturbed_site: Path) -> None:
    table = data(perturbed_site, f"{number_of(perturbed_site, 'npeff-4-0')}/components")
    results = read_results(folder(perturbed, HELD_OUT))
    measured = {record.component: record.best for record in results.components}
    for j, effect in enumerate(table["effects"]):
        assert (effect is None) == (j not in measured)
        if effect is not None:
            assert effect["ratio"] == measured[j].ratio
            assert tuple(effect["interval"]) == measured[j].interval
            assert effect["limit"] == chance_limit(measured[j], results.summary.null)
    assert [line["name"] for line in table["perturbations"]] == [HELD_OUT, IN_SAMPLE]
    for line in table["perturbations"]:
        assert line["summary"] == json.loads(
            json.dumps(read_results(folder(perturbed, line["name"])).summary, default=vars)
        )
    assert data(perturbed_site, f"{number_of(perturbed_site, 'npeff-8-0')}/components")["effects"] is None
    perturbed_components = {
        d["analysis"]["name"]: d["perturbed"] for d in data(perturbed_site, "run")["decompositions"]
    }
    assert perturbed_components == {"npeff-4-0": 4, "npeff-4-1": 0, "npeff-8-0": 0, "clusters-4-0": 0}


def test_the_page_is_made_again_when_perturbations_or_decompositions_change(
    perturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(perturbed.path, tmp_path / "run")
    run, config = Run.open(tmp_path / "run"), ExportConfig(str(tmp_path / "run"), str(tmp_path / "site"))
    site = export(config).parent
    number = number_of(site, "npeff-4-0")
    before = json.loads((site / "site.json").read_text())["files"]
    capsys.readouterr()
    export(config)
    assert "up to date" in capsys.readouterr().out
    shutil.rmtree(folder(run, HELD_OUT))
    (folder(run, IN_SAMPLE) / "results.json").unlink()  # as if it were still at work
    export(config)
    gone = (f"perturbations/{HELD_OUT}/", f"perturbations/{IN_SAMPLE}/results.json")
    files = json.loads((site / "site.json").read_text())["files"]
    assert files == {file: sha for file, sha in before.items() if not file.startswith(gone)} != before
    kept = {file.split("/")[2] for file in files if file.startswith("perturbations/")}
    assert {"config.json", "components", "nulls"} <= kept
    assert data(site, f"{number}/component/1")["perturbations"][0]["about"]["parts"] == {}
    assert len(data(site, f"{number}/component/1")["perturbations"]) == 1
    # results of a decomposition that is no longer there are not those of the new one
    saved = open_decomposition(run, "npeff-4-1")
    saved.save(run.path / "decompositions/npeff-4-0")
    export(config)
    assert data(site, f"{number}/component/1")["perturbations"] == []
    (folder(run, IN_SAMPLE) / "config.json").write_text("{}")
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
