"""From a model and texts to components and back, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from npeff.analyse.config import ProbeConfig
from npeff.analyse.probe import probe
from npeff.cli import main
from npeff.collect.check import check
from npeff.collect.config import CheckConfig
from npeff.decompose.methods import load
from npeff.store.run import Run


@pytest.fixture(scope="module")
def run_path(tmp_path_factory, model_directory, review_file):
    path = tmp_path_factory.mktemp("pipeline") / "run"
    options = ["--task", "sst2", "--data", str(review_file), "--model", str(model_directory), "--dim", "256"]
    assert main(["collect", str(path), *options, "--storage", "float32"]) == 0
    assert main(["decompose", str(path), "--components", "5"]) == 0
    return path


def test_collect_decompose_analyse_export(run_path, tmp_path):
    assert main(["analyse", str(run_path)]) == 0
    assert main(["export", str(run_path), str(tmp_path / "site")]) == 0
    assert (tmp_path / "site" / "index.html").is_file()
    assert json.loads((run_path / "decompositions/npeff-5-0/analysis/analysis.json").read_text())


@pytest.mark.parametrize("method", ["npeff", "gnpeff", "clusters", "sae", "svd-gradients", "svd-activations"])
def test_a_text_of_the_run_probes_to_its_own_coefficients(run_path, method):
    """Collected again, alone, and fitted with fixed components, a text has the coefficients that it had in the run."""
    name = f"probe-{method}"
    arguments = ["--method", method, "--components", "5", "--decomposition", name, "--sae-steps", "200"]
    assert main(["decompose", str(run_path), *arguments]) == 0
    run = Run.open(run_path)
    fitted = load(run_path / "decompositions" / name)
    text = run.table["text"][3].as_py()
    [found] = probe(ProbeConfig(str(run_path), (text,), decomposition=name, components=5))
    assert found.prediction == run.table["prediction"][3].as_py()
    expected = fitted.coefficients[3]
    coefficients = torch.zeros(5)
    for j, value, _ in found.components:
        coefficients[j] = value
    torch.testing.assert_close(coefficients, expected, rtol=2e-3, atol=2e-3)


def test_a_decomposition_is_replayed(run_path, tmp_path, capsys):
    made = run_path / "decompositions" / "npeff-5-0"
    before = load(made)
    assert main(["replay", str(made)]) == 0
    assert "already there" in capsys.readouterr().out
    copy = tmp_path / "copy"
    assert main(["replay", str(run_path), "--to", str(copy)]) == 0
    assert main(["replay", str(made), "--to", str(copy)]) == 0
    assert torch.equal(load(copy / "decompositions" / "npeff-5-0").coefficients, before.coefficients)
    (tmp_path / "empty").mkdir()
    assert main(["replay", str(tmp_path / "empty")]) == 2


@pytest.mark.smollm2
def test_the_embedded_model_fits(capsys):
    report = check(CheckConfig("smollm2-135m", "reviews", examples=2))
    assert report.fits
    assert report.autograd_error < 1e-4
    assert "This model and task fit." in capsys.readouterr().out


def test_check_of_a_tiny_model(model_directory, review_file, capsys):
    arguments = ["check", str(model_directory), "sst2", "--data", str(review_file), "--dim", "256"]
    assert main(arguments) == 0
    assert Path(model_directory).is_dir()
    assert "plain autograd" in capsys.readouterr().out
