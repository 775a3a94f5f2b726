"""Changes of answers from stored rows against derivatives of the model itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.collect.session import read_prompts
from npeff.decompose.run import open_decomposition
from npeff.explain.answers import change_of_answers, signature
from npeff.perturb.evaluate import Divergence
from npeff.perturb.weights import EditedWeights


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
    assert (found.sign, found.signature, found.changes) == (-again.sign, again.signature, again.changes)
    assert 0 <= found.coherence <= 1
    assert found.examples == [50, 3, 20]
    own = run.tensor("probabilities")[[50, 3, 20]].argmax(1).tolist()
    names = [["no", "yes"][answer] for answer in own]
    likelier = [row[found.names.index(name)] for row, name in zip(found.changes, names, strict=True)]
    assert np.mean(likelier) >= 0

    changes = torch.tensor([[[1.0, -1.0]], [[-1.0, 1.0]], [[1.0, -1.0]]], dtype=torch.float64)
    monkeypatch.setattr("npeff.explain.answers.change_of_answers", lambda *_: changes)
    assert signature(run, component, chosen, ["no", "yes"].__getitem__).coherence == pytest.approx(1 / 3)


def test_probabilities_of_a_pass_are_those_that_were_collected(run, prepared):
    found = Divergence(prepared, read_prompts(run, prepared), range(5)).probabilities
    torch.testing.assert_close(found.float(), run.tensor("probabilities")[:5], rtol=1e-4, atol=1e-6)
