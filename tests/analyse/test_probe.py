"""`npeff probe`: the components of new texts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npeff import cli
from npeff.analyse.config import ProbeConfig
from npeff.analyse.probe import probe, probe_texts
from npeff.collect.config import CollectConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose, open_decomposition
from npeff.explore.tryout import Tryout
from npeff.store.rows import ArrayRows
from npeff.store.run import Run
from npeff.utils.configs import from_options
from npeff.utils.errors import UserError
from tests.synthetic import make_run

TEXTS = ["a film of great charm", "dull and long , without a story"]


@pytest.mark.parametrize("method", ["npeff", "clusters", "svd-activations"])
def test_the_command_prints_the_components_of_a_text(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(100)])
    fitted = decompose(DecomposeConfig(run=str(run.path), method=method, components=4))  # type: ignore[arg-type]
    source = run.source(fitted.kind)
    collected = {
        "prediction": torch.tensor([1]),
        "probability": torch.tensor([0.9]),
        "set_aside": torch.tensor([False]),
        fitted.kind: source.read(7, 8),
    }
    rows = ArrayRows(source.read(7, 8), [source.ranks[7]])
    prepared = SimpleNamespace(answers=SimpleNamespace(names=["no", "yes"]))
    monkeypatch.setattr("npeff.analyse.probe.prepare_run", lambda run: prepared)
    monkeypatch.setattr("npeff.analyse.probe.collect_texts", lambda *arguments: (rows, collected))
    capsys.readouterr()
    [result] = probe(ProbeConfig(run=str(run.path), texts=("again",), components=2))
    said = capsys.readouterr().out
    assert f"Components of {method}-4-0\n\n'again': yes (90.0%)\n" in said
    assert re.search(r"component +share +coefficient +top example\n", said)
    weights = fitted.shares(fitted.coefficients)
    best = int((fitted.coefficients.abs() if weights is None else weights)[7].argmax())
    assert (result.components[0].component, result.prediction_text) == (best, "yes")
    assert result.components[0].coefficient == pytest.approx(float(fitted.coefficients[7, best]), abs=2e-3)
    assert re.search(rf"\n +{best} ", said)
    printed = [float(value) for value in re.findall(r"^ +\w+ +(-?[\d.]+)%", said, flags=re.MULTILINE)]
    if weights is None:
        assert printed == [pytest.approx(100 * result.residual, abs=0.06)]
    else:
        assert sum(printed) == pytest.approx(100, abs=0.25)  # the strongest, the others and what is unexplained
        assert len(printed) == len(result.components) + 2
    with pytest.raises(UserError, match="at least one text"):
        ProbeConfig(run=str(run.path), texts=())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_directory: Path, review_file: Path) -> Run:
    options = {"run": tmp_path_factory.mktemp("probe") / "run", "model": model_directory, "data": review_file}
    options |= {"task": "sst2", "dim": 256, "directions": "projection:2", "fisher": True, "gradient": True}
    run = collect(from_options(CollectConfig, options))
    for method in ("npeff", "svd-gradients"):
        decompose(DecomposeConfig(run=str(run.path), method=method, components=3))  # type: ignore[arg-type]
    return run


@pytest.mark.parametrize("name", ["npeff-3-0", "svd-gradients-3-0"])
def test_the_page_and_the_command_say_the_same(run: Run, name: str) -> None:
    tryout = Tryout(run)
    tryout._load()
    page = tryout.explain(name, TEXTS)
    probes = probe_texts(run, open_decomposition(run, name), TEXTS)
    for i, result in enumerate(probes):
        for component, coefficient, share in result.components:
            place = page.components.index(component)
            assert page.shares[i][place] == pytest.approx(share, abs=1e-4)
            assert page.coefficients[i][place] == pytest.approx(coefficient, abs=1e-4)
        assert page.residual[i] == pytest.approx(result.residual, abs=1e-4)
        assert result.prediction_text == page.answers[max(range(2), key=lambda k: page.probabilities[i][k])]
        shares = [item.share for item in result.components]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) + result.residual == pytest.approx(1, abs=1e-3)


def test_what_is_said_of_a_text_does_not_depend_on_other_texts(run: Run) -> None:
    decomposition = open_decomposition(run, "npeff-3-0")
    _, second = probe_texts(run, decomposition, TEXTS)
    (alone,) = probe_texts(run, decomposition, TEXTS[1:])
    assert [item.component for item in second.components] == [item.component for item in alone.components]
    assert second.residual == pytest.approx(alone.residual, abs=1e-4)


def test_answers_from_the_vocabulary_are_printed_as_tokens(
    tmp_path: Path, model_directory: Path, review_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "next.yaml"
    task.write_text('prompt: "Review: {text}"\nanswers: vocabulary\n', encoding="utf-8")
    options = {"run": tmp_path / "run", "model": model_directory, "data": review_file, "task": task, "dim": 256}
    run = collect(from_options(CollectConfig, {**options, "directions": "sampling:4"}))
    decompose(DecomposeConfig(run=str(run.path), components=2))
    assert cli.main(["probe", str(run.path), TEXTS[0]]) == 0
    (result,) = probe_texts(run, open_decomposition(run), TEXTS[:1])
    token = prepare_run(run).model.tokenizer.decode([result.prediction])
    assert result.prediction_text == token
    assert f"'{TEXTS[0]}': {token.strip()} (" in capsys.readouterr().out


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    config = cli.parse("probe", ["runs/x", "a text", "--components", "3"])
    assert config == ProbeConfig("runs/x", ("a text",), components=3)
    assert cli.main(["probe", "runs/x", "a text", "--top", "3"]) == 2
    assert "--top is now --components" in capsys.readouterr().err
