"""Changes of answers from stored rows against derivatives of the model itself."""

from __future__ import annotations

import csv
import shutil

import numpy as np
import pytest
import torch

from npeff.analyse.answers import change_of_answers, signature
from npeff.analyse.config import AnalyseConfig
from npeff.analyse.report import in_words
from npeff.analyse.run import analyse, read_analysis
from npeff.collect.session import read_prompts
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose, open_decomposition
from npeff.perturb.evaluate import Divergence
from npeff.perturb.weights import EditedWeights
from npeff.store.run import Run
from tests.synthetic import make_run


def test_changes_are_those_of_the_model(run, prepared):
    """Along Rᵀh, whose inner product with any gradient g is ⟨h, Rg⟩, the prediction has no sketching error."""
    component = open_decomposition(run, "npeff").components[1]
    vector = {module.name: part for module, part in prepared.collector.sketch.rmatvec(component)}
    chosen = [3, 17, 40, 99]
    prompts = [read_prompts(run, prepared)[i] for i in chosen]
    predicted = change_of_answers(run, chosen, component[None])[:, 0]
    answers = Divergence(prepared, prompts, range(4))
    dz, p = answers.derivatives(vector), answers.probabilities
    torch.testing.assert_close(predicted, dz - (p * dz).sum(1, keepdim=True), rtol=1e-3, atol=1e-4)

    model = prepared.collector.answer_model
    step = 1e-4 / float(torch.stack([part.norm() for part in vector.values()]).norm())
    with EditedWeights(prepared.selection.modules) as weights, torch.inference_mode():
        sides = []
        for sign in (1, -1):
            weights.add(vector, sign * step)
            sides.append(model.logits(prompts)[0].double().log_softmax(1))
    measured = (sides[0] - sides[1]) / (2 * step)
    assert (predicted - measured).norm() < 0.05 * measured.norm()


def test_sign_and_coherence(run, monkeypatch):
    component = open_decomposition(run, "npeff").components[0]
    chosen = np.array([50, 3, 20])
    found = signature(run, component, chosen, ["no", "yes"].__getitem__)
    again = signature(run, -component, chosen, ["no", "yes"].__getitem__)
    assert found.sign == -again.sign
    np.testing.assert_allclose(found.changes, again.changes, rtol=1e-3)
    np.testing.assert_allclose(found.signature, again.signature, rtol=1e-3)
    assert 0 <= found.coherence <= 1
    assert found.examples == [50, 3, 20]
    own = run.tensor("probabilities")[[50, 3, 20]].argmax(1).tolist()
    names = [["no", "yes"][answer] for answer in own]
    likelier = [row[found.names.index(name)] for row, name in zip(found.changes, names, strict=True)]
    assert np.mean(likelier) >= 0

    changes = torch.tensor([[[1.0, -1.0]], [[-1.0, 1.0]], [[1.0, -1.0]]], dtype=torch.float64)
    monkeypatch.setattr("npeff.analyse.answers.change_of_answers", lambda *_: changes)
    assert signature(run, component, chosen, ["no", "yes"].__getitem__).coherence == pytest.approx(1 / 3, abs=1e-4)


def test_probabilities_of_a_pass_are_those_that_were_collected(run, prepared):
    found = Divergence(prepared, read_prompts(run, prepared), range(5)).probabilities
    torch.testing.assert_close(found.float(), run.tensor("probabilities")[:5], rtol=1e-4, atol=1e-6)


def test_tables_of_an_analysis_say_what_components_argue_for(run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    run = Run.open(path)
    (analysis,) = analyse(AnalyseConfig(str(path), "npeff", refits=0))
    decomposition, labels = open_decomposition(run, "npeff"), run.manifest.task.labels
    drawn = np.sort(np.random.default_rng(0).permutation(np.flatnonzero(run.usable))[:16]).tolist()
    by_chance = []
    for each in analysis.component:
        changes = {}
        for i in [*drawn, *each.orderings[0].top]:
            changes[i] = change_of_answers(run, [i], decomposition.components[each.number][None])[0, 0].numpy()
        own, others = (np.array([changes[i] for i in part]) for part in (each.orderings[0].top, drawn))
        p = run.tensor("probabilities")[each.orderings[0].top].double().numpy()
        sign = np.sign(np.mean([row[k] for row, k in zip(own, p.argmax(1), strict=True)]))
        assert each.argues_for == labels[int((sign * own * p).mean(0).argmax())]
        assert each.agreement == pytest.approx(_alike(own), abs=1e-4)
        by_chance.append(_alike(others))
    assert analysis.agreement_by_chance == pytest.approx(np.mean(by_chance))
    folder = run.path / "decompositions" / "npeff" / "analysis"
    (header, *lines) = csv.reader((folder / "components.csv").open(encoding="utf-8"))
    assert [line[header.index("argues_for")] for line in lines] == [each.argues_for for each in analysis.component]
    assert "argues for" in (folder / "tunings.md").read_text(encoding="utf-8")
    assert "argue for" in in_words(analysis)


def test_runs_that_do_not_tell_are_analysed_without_answers(tmp_path):
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(40)])
    decompose(DecomposeConfig(run=str(run.path), decomposition="npeff", components=2))
    analysis = read_analysis(run, "npeff")
    assert [each.argues_for for each in analysis.component] == [None, None]
    assert analysis.agreement_by_chance is None
    assert "argue" not in in_words(analysis)


def _alike(changes):
    return np.linalg.norm(changes.mean(0)) / np.mean([np.linalg.norm(row) for row in changes])
