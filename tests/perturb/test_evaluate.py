"""Divergences against a loop over examples, the search for a magnitude, and weights put back bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from npeff.collect.session import prepare_run, read_prompts
from npeff.perturb.evaluate import Divergence, find_magnitude
from npeff.perturb.weights import EditedWeights


def random_vector(prepared, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {m.name: torch.randn(m.shape, generator=generator) for m in prepared.selection.modules}


def test_divergence_is_that_of_a_loop_over_examples(prepared, prompts):
    vector = random_vector(prepared)
    examples = [3, 17, 0, 25, 31]
    answer_model = prepared.collector.answer_model

    def distributions():
        with torch.no_grad():
            return [answer_model.logits([prompts[i]])[0][0].double().softmax(0) for i in examples]

    before = distributions()
    divergence = Divergence(prepared, prompts, examples)
    with EditedWeights(prepared.selection.modules) as weights:
        weights.add(vector, 0.02)
        found, predictions = divergence.measure()
        after = distributions()
    expected = [float((p * (p / q).log()).sum()) for p, q in zip(before, after, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-9)
    assert predictions.tolist() == [int(q.argmax()) for q in after]
    assert divergence.predictions.tolist() == [int(p.argmax()) for p in before]


@pytest.mark.parametrize("kind", ["two answers", "ten answers, Conv1D"])
def test_second_order_is_the_quadratic_form_of_the_fisher(run, many_answers, kind):
    """½ vᵀFv with F = Σ_y p_y ∇log p_y ∇log p_yᵀ from plain autograd, one example at a time."""
    run = run if kind == "two answers" else many_answers
    prepared = prepare_run(run, "cpu")
    prompts = read_prompts(run, prepared)
    vector = random_vector(prepared)
    examples = [3, 17, 0, 25]
    answers = Divergence(prepared, prompts, examples)
    found = answers.effects(answers.derivatives(vector))
    changes = {
        name: (getattr(module.module, name.rsplit(".", 1)[1]), change)
        for module in prepared.selection.modules
        for name, change in module.unpack(vector[module.name]).items()
    }
    parameters = [parameter.requires_grad_(True) for parameter, _ in changes.values()]
    expected = []
    for i in examples:
        log_p = prepared.collector.answer_model.logits([prompts[i]])[0][0].log_softmax(0)
        form = 0.0
        for value in log_p:
            gradients = torch.autograd.grad(value, parameters, retain_graph=True)
            pairs = zip(gradients, changes.values(), strict=True)
            slope = sum(float((gradient.double() * change.double()).sum()) for gradient, (_, change) in pairs)
            form += 0.5 * float(value.detach().exp()) * slope**2
        expected.append(form)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_unchanged_weights_diverge_by_exactly_zero(prepared, prompts):
    divergence = Divergence(prepared, prompts, range(12))
    assert not divergence.measure()[0].any()


@pytest.mark.parametrize("start", [1e-6, 1.0, 1e5])
def test_the_search_reaches_the_divergence_asked_for(start):
    magnitude, value = find_magnitude(lambda m: 0.3 * m**2 / (1 + 0.1 * m), 0.05, start)
    assert value == pytest.approx(0.05, rel=0.03)
    assert 0.3 * magnitude**2 / (1 + 0.1 * magnitude) == value


def test_the_search_returns_the_nearest_value_where_there_is_no_better():
    magnitude, value = find_magnitude(lambda m: 0.2 * math.tanh(m), 0.5, 1.0)
    assert value == pytest.approx(0.2, rel=0.01)
    assert magnitude > 1
    jump = find_magnitude(lambda m: 0.1 if m < 3 else 9.0, 0.5, 1.0)
    assert jump[1] == 0.1
    infinite = find_magnitude(lambda m: m**2 if m < 1 else math.inf, 0.25, 8.0)
    assert infinite[1] == pytest.approx(0.25, rel=0.03)
