"""npeff in Python: what `import npeff` offers, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import npeff
from npeff.collect.config import CollectConfig
from npeff.collect.run import collect
from npeff.decompose.methods import load
from npeff.utils.configs import from_options
from npeff.utils.errors import UserError

OPTIONS = {"task": "sst2", "dim": 256, "storage": "float32"}

TEN_LINES = """
import sys
import npeff

run = npeff.collect_run(sys.argv[1], model=sys.argv[2], task="sst2", data=sys.argv[3], dim=256)
found = npeff.decompose_run(run, components=4)
for j in found.energy.argsort(descending=True).tolist():
    print(j, [example.text for example in npeff.top_examples(run, j, found, count=2)])
for probe in npeff.probe_texts(run, ["a film of great charm"], found):
    print(probe.text, probe.components[0])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_directory: Path, review_file: Path) -> npeff.Run:
    path = tmp_path_factory.mktemp("api") / "run"
    run = npeff.collect_run(path, model=model_directory, data=review_file, **OPTIONS)
    npeff.decompose_run(run, components=3, decomposition="npeff")
    npeff.decompose_run(run, components=3, method="svd-gradients", decomposition="svd")
    return run


def test_ten_lines(tmp_path, model_directory, review_file, monkeypatch, capsys):
    arguments = ["script.py", str(tmp_path / "run"), str(model_directory), str(review_file)]
    monkeypatch.setattr(sys, "argv", arguments)
    exec(TEN_LINES, {})
    assert "a film of great charm ProbedComponent(" in capsys.readouterr().out.splitlines()[-1]
    assert len(TEN_LINES.strip().splitlines()) <= 10


def test_importing_is_quick_and_names_do_not_depend_on_what_else_was_imported():
    code = """
import sys, npeff
assert "torch" not in sys.modules and "numpy" not in sys.modules
import npeff.collect.run, npeff.decompose, npeff.perturb, npeff.analyse.run
assert all(callable(getattr(npeff, name)) for name in npeff.__all__ if name != "__version__")
assert callable(npeff.collect.run.collect)
assert not hasattr(npeff, "nonsense")
from npeff import *
assert callable(collect_run)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_listed_once():
    from npeff import api

    assert set(npeff.__all__) == {*api.__all__, "__version__"}
    assert dir(npeff) == sorted(npeff.__all__)
    assert all(getattr(api, name).__doc__ for name in api.__all__)


def test_a_dry_run_returns_the_cost(tmp_path, model_directory, review_file):
    found = npeff.collect_run(tmp_path / "run", model=model_directory, data=review_file, dry_run=True, **OPTIONS)
    assert found.seconds > 0
    # rows and gradient of 256 numbers, an activation of 32, and a few numbers beside them
    assert 40 * 4 * (256 + 256 + 32) < found.disk < 40 * 4 * (256 + 256 + 32 + 32)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="estimate_collection"):
        collect(from_options(CollectConfig, {"run": "x", "dry_run": True}))


def test_top_examples_are_those_with_the_largest_coefficients(run):
    found = npeff.open_decomposition(run, "svd")
    for order, sign in (("positive", 1), ("negative", -1)):
        examples = npeff.top_examples(run.path, 1, "svd", count=5, order=order)
        column = sign * found.coefficients[:, 1]
        assert [example.number for example in examples] == column.argsort(descending=True)[:5].tolist()
        for example in examples:
            assert example.text == run.table["text"][example.number].as_py()
            assert example.label == ("Negative", "Positive")[example.number % 2]
            assert example.prediction == run.table["prediction_text"][example.number].as_py()
            assert example.coefficient == pytest.approx(float(found.coefficients[example.number, 1]))
    with pytest.raises(UserError, match="components 0 to 2"):
        npeff.top_examples(run, 3, "svd")
    default = npeff.top_examples(run, 0)  # the newest decomposition that was asked for
    assert default == npeff.top_examples(run, 0, "svd")


def test_tables_of_components_and_examples(run):
    fitted = npeff.open_decomposition(run, "npeff")
    components = npeff.list_components(run, "npeff", count=3)
    assert [component.number for component in components] == [0, 1, 2]
    assert [component.energy for component in components] == pytest.approx(fitted.energy.tolist(), rel=1e-5)
    for component in components:
        top = npeff.top_examples(run, component.number, "npeff", count=3)
        assert component.top == [example.text for example in top]
        assert component.shares == pytest.approx([example.share for example in top], rel=1e-4)
        assert component.theme is None
    examples = npeff.list_examples(run, "npeff")
    assert [example.number for example in examples] == list(range(len(run.table)))
    gram = (fitted.components.double() @ fitted.components.double().T).square()
    for example in examples:  # the definition of a share, by hand
        w = fitted.coefficients[example.number].double()
        shares = w * (gram @ w)
        assert example.component == int(shares.argmax())
        assert example.share == pytest.approx(float(shares.max()), rel=1e-4)
        assert float(shares.sum()) == pytest.approx(1 - float(fitted.residuals[example.number]), abs=1e-3)
    table = components.to_pandas()
    assert table.loc[1, "top"] == components[1].top
    assert examples.to_pandas().loc[4, "probability"] == examples[4].probability
    assert len(npeff.top_examples(run, 0, "npeff", count=2).to_pandas()) == 2


def test_probed_texts_of_the_run_have_their_own_coefficients(run):
    found = npeff.open_decomposition(run, "npeff")
    texts = run.table["text"].to_pylist()[:2]
    for row, probe in enumerate(npeff.probe_texts(run, texts, found, top=3)):
        coefficients = torch.zeros(3)
        for number, coefficient, _ in probe.components:
            coefficients[number] = coefficient
        torch.testing.assert_close(coefficients, found.coefficients[row], rtol=2e-3, atol=2e-3)
    with pytest.raises(UserError, match="list of texts"):
        npeff.probe_texts(run, "one text", found)


def test_a_lifted_component_has_the_component_as_its_sketch(run):
    from npeff.collect.session import prepare_run

    vector = npeff.lift_component(run, 1, "npeff", direction="plain")
    assert sum(float(part.square().sum()) for part in vector.values()) == pytest.approx(1, abs=1e-4)
    sketched = prepare_run(run).collector.sketch.matvec(vector)
    component = npeff.open_decomposition(run, "npeff").components[1]
    assert float(torch.nn.functional.cosine_similarity(sketched, component, dim=0)) > 0.98


def test_analysis_perturbation_and_sharing(run, tmp_path):
    analysis = npeff.analyse_run(run, "npeff", top=4)
    assert len(analysis.component) == 3
    found = npeff.perturb_components(run, [0], decomposition="npeff", top=4, random=8, protocol="paper")
    assert found.summary.components == 1
    digest = npeff.push_run(run, tmp_path / "place")
    pulled = npeff.pull_run(tmp_path / "place", tmp_path / "run", sha256=digest)
    assert npeff.open_run(pulled).fingerprint == run.fingerprint
    assert torch.equal(
        load(pulled.path / "decompositions/npeff").components, npeff.open_decomposition(run, "npeff").components
    )


def test_unknown_options_are_named(run):
    with pytest.raises(UserError, match=r"no option 'component'\. Did you mean components"):
        npeff.decompose_run(run, component=3)
    with pytest.raises(UserError, match=r"'dims'\. Did you mean dim"):
        npeff.collect_run("x", dims=3)
    with pytest.raises(UserError, match="dim cannot be 'many'"):
        npeff.collect_run("x", dim="many")
