"""Components as sums of rows, and the same sums of gradients, against plain autograd one example at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.collect.capture import Capture
from npeff.collect.config import CollectConfig
from npeff.collect.directions import make_directions, predicted
from npeff.collect.run import collect
from npeff.collect.session import prepare_run, read_prompts
from npeff.decompose.run import open_decomposition
from npeff.models.answers import AnswerModel
from npeff.perturb import lift
from npeff.perturb.lift import (
    Lifter,
    RowSums,
    check_component,
    check_method,
    component_sums,
    norm,
    scale_to_unit,
    truncate,
)
from npeff.perturb.weights import by_parameter
from npeff.store.rows import read_tensors, tensor_names
from npeff.store.run import Run
from npeff.utils.configs import from_dict
from npeff.utils.errors import UserError

METHODS = ("npeff", "gnpeff", "clusters", "svd-gradients")


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1))


def brute_force(run, prepared, prompts, sums, j):
    """Σ α · (gradient of the output direction) by autograd on the parameters, one unpadded example after another."""
    network, modules = prepared.model.network, prepared.selection.modules
    names = list(dict.fromkeys(name for module in modules for name in module.unpack(torch.zeros(module.shape))))
    parameters = dict(network.named_parameters())
    total = {name: torch.zeros_like(parameters[name], dtype=torch.float64) for name in names}
    ranks, norms = run.source("fisher").ranks, run.table["pef_norm"].to_numpy()
    gradient_norms = run.tensor("gradient_norm")
    place = 0
    for name in names:
        parameters[name].requires_grad_(True)
    try:
        for i, prompt in enumerate(prompts):
            z, _ = prepared.collector.answer_model.logits([prompt])
            p = z.detach().double().softmax(1)
            V, _ = make_directions(prepared.config.directions, p, [i])
            u = torch.zeros(p.shape[1], dtype=torch.float64)
            if "fisher" in sums.weights:
                u += sums.weights["fisher"][j, place : place + ranks[i]].double() @ V[0, : ranks[i]] / norms[i] ** 0.5
            if "gradient" in sums.weights:
                u += sums.weights["gradient"][j, i].double() * predicted(p)[0] / gradient_norms[i].double()
            place += ranks[i]
            found = torch.autograd.grad(z, [parameters[name] for name in names], u[None].float())
            for name, gradient in zip(names, found, strict=True):
                total[name] += gradient.double()
    finally:
        for name in names:
            parameters[name].requires_grad_(False)
    return total


def flat(prepared, vector):
    """A lifted vector parameter by parameter."""
    return {name: part for name, (_, _, part) in by_parameter(prepared.selection.modules, vector).items()}


def check_against_autograd(run, prepared, prompts, sums):
    lifted = Lifter(run, prepared, prompts).lift(sums)
    for j, vector in enumerate(lifted):
        expected = brute_force(run, prepared, prompts, sums, j)
        found = flat(prepared, vector)
        assert found.keys() == expected.keys()
        size = sum(part.square().sum() for part in expected.values()) ** 0.5
        error = sum((found[name].double() - part).square().sum() for name, part in expected.items()) ** 0.5
        assert error < 1e-4 * size
        assert cosine(prepared.collector.sketch.matvec(vector), sums.vectors[j]) > 0.9999


@pytest.mark.parametrize("method", METHODS)
def test_lift_is_the_sum_of_plain_gradients(run, prepared, prompts, method):
    decomposition = open_decomposition(run, method)
    mix = torch.eye(6, dtype=torch.float64)[:2]
    mix[1, 3] = -0.7
    sums = component_sums(decomposition, run.source(decomposition.kind), mix)
    check_against_autograd(run, prepared, prompts, sums)


def random_sums(run, kinds):
    """Two sums of a run's rows, the first of which leaves most examples out."""
    generator = torch.Generator().manual_seed(0)
    weights = {kind: torch.randn(2, int(run.source(kind).ranks.sum()), generator=generator) for kind in kinds}
    for kind in kinds:
        weights[kind][0, 3 * int(run.source(kind).ranks.max()) :] = 0
    return RowSums(sum(weights[kind] @ run.source(kind).read(0, 40) for kind in kinds), weights)


@pytest.mark.parametrize("kinds", [("fisher", "gradient"), ("fisher",), ("gradient",)])
def test_lift_with_ten_answers_conv1d_and_any_kinds_of_rows(many_answers, kinds):
    prepared = prepare_run(many_answers, "cpu")
    assert many_answers.source("fisher").ranks.max() == 9
    prompts = read_prompts(many_answers, prepared)
    check_against_autograd(many_answers, prepared, prompts, random_sums(many_answers, kinds))


def confident_logits(monkeypatch, length):
    """Answers of which the first is nearly certain, so that directions are about this long, in any precision."""
    logits, rest = AnswerModel.logits, length**2 / 2

    def confident(self, prompts):
        z, places = logits(self, prompts)
        target = torch.full_like(z, rest / (z.shape[1] - 1)).log()
        target[:, 0] = 0
        return z - z.detach() + target, places

    monkeypatch.setattr(AnswerModel, "logits", confident)


def lift_in(run, dtype, precision, kinds):
    """Random sums, lifted with weights that are rounded to one precision in a model of another."""
    prepared = prepare_run(run, "cpu")
    prepared.model.network.to(dtype).to(precision)
    lifted = Lifter(run, prepared, read_prompts(run, prepared)).lift(random_sums(run, kinds))
    return [torch.cat([part.flatten() for part in vector.values()]) for vector in lifted]


@pytest.mark.parametrize(("dtype", "fidelity"), [(torch.float16, 0.9999), (torch.bfloat16, 0.999)], ids=str)
@pytest.mark.parametrize("length", [1e-1, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("kinds", [("fisher",), ("gradient",)])
def test_half_precision_lifts_confident_answers(run, monkeypatch, kinds, length, dtype, fidelity):
    confident_logits(monkeypatch, length)
    whole, half = lift_in(run, dtype, torch.float32, kinds), lift_in(run, dtype, dtype, kinds)
    for expected, found in zip(whole, half, strict=True):
        assert cosine(found / found.norm(), expected / expected.norm()) > fidelity
        assert float(found.norm() / expected.norm()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("kinds", [("fisher", "gradient"), ("fisher",), ("gradient",)])
def test_lengths_of_directions_do_not_change_a_bit_of_a_float32_lift(run, many_answers, monkeypatch, kinds):
    found = [lift_in(each, torch.float32, torch.float32, kinds) for each in (run, many_answers)]
    monkeypatch.setattr(lift, "split_length", lambda V: (V, V.new_ones(V.shape[:-1])))
    for each, before in zip((run, many_answers), found, strict=True):
        assert all(map(torch.equal, before, lift_in(each, torch.float32, torch.float32, kinds)))


def count_passes(monkeypatch):
    """A list that grows by one with every backward pass."""
    backward, passes = Capture.backward, []

    def counting(*arguments, **options):
        passes.append(1)
        backward(*arguments, **options)

    monkeypatch.setattr(Capture, "backward", counting)
    return passes


@pytest.mark.parametrize(
    ("kinds", "shared"), [(("fisher",), False), (("gradient",), True), (("fisher", "gradient"), False)]
)
def test_backward_passes_of_a_lift(many_answers, monkeypatch, kinds, shared):
    """Gradients have one direction, which vectors share; Fishers have nine, so each vector takes its own sum."""
    prepared = prepare_run(many_answers, "cpu")
    prompts = read_prompts(many_answers, prepared)
    passes = count_passes(monkeypatch)
    Lifter(many_answers, prepared, prompts).lift(random_sums(many_answers, kinds))
    batches = list(prepared.collector.batches(prompts, prepared.config.batch_tokens))
    with_first = sum(bool(set(batch) & {0, 1, 2}) for batch in batches)
    assert with_first < len(batches)
    assert len(passes) == (len(batches) if shared else len(batches) + with_first)


def test_lifted_components_have_the_component_as_sketch(run, prepared, lifter):
    decomposition = open_decomposition(run, "npeff")
    sums = component_sums(decomposition, run.source("fisher"), torch.eye(6))
    for j, vector in enumerate(lifter.lift(sums)):
        assert cosine(prepared.collector.sketch.matvec(vector), decomposition.components[j]) > 0.999
        scale_to_unit(vector)
        assert norm(vector) == pytest.approx(1, abs=1e-5)


def reduced(path, many_answers, directions):
    """A run whose rows were mixed after the sketch, and two sums of its rows."""
    made = many_answers.manifest.config | {"directions": {"directions": directions, "rank": 2}}
    run = collect(from_dict(CollectConfig, made | {"run": str(path)}))
    assert run.source("fisher").ranks.max() == 2
    weights = torch.randn(2, int(run.source("fisher").ranks.sum()), generator=torch.Generator().manual_seed(3))
    return run, RowSums(weights @ run.source("fisher").read(0, 40), {"fisher": weights})


@pytest.mark.parametrize("directions", ["exact", "projection:5", "sampling:5", "spectral:0.5"])
def test_rows_of_reduced_rank_are_lifted_without_collecting_again(tmp_path, many_answers, monkeypatch, directions):
    run, sums = reduced(tmp_path / "run", many_answers, directions)
    prepared = prepare_run(run, "cpu")
    prompts = read_prompts(run, prepared)
    passes = count_passes(monkeypatch)
    for j, vector in enumerate(Lifter(run, prepared, prompts).lift(sums)):
        assert cosine(prepared.collector.sketch.matvec(vector), sums.vectors[j]) > 0.99999
    assert len(passes) == 2 * len(list(prepared.collector.batches(prompts, prepared.config.batch_tokens)))


def test_rows_of_reduced_rank_need_their_mixture(tmp_path, many_answers):
    run, sums = reduced(tmp_path / "run", many_answers, "projection:5")
    prepared = prepare_run(run, "cpu")
    for shard in run.shards:
        names = [name for name in tensor_names(run.whole_shard(shard)) if name != "mixture"]
        run.write_shard(shard, read_tensors(run.whole_shard(shard), names))
    run.finish(run.table)
    with pytest.raises(UserError, match="how --rank mixed"):
        Lifter(Run.open(run.path), prepared, read_prompts(run, prepared)).lift(sums)


@pytest.mark.parametrize("method", METHODS)
def test_components_are_sums_of_rows(run, method):
    decomposition = open_decomposition(run, method)
    sums = component_sums(decomposition, run.source(decomposition.kind), torch.eye(6, dtype=torch.float64))
    rows = run.source(decomposition.kind).read(0, 40)
    rebuilt = sums.weights[decomposition.kind] @ rows
    torch.testing.assert_close(rebuilt, sums.vectors, rtol=1e-4, atol=1e-5)
    for j in range(6):
        assert cosine(sums.vectors[j], decomposition.components[j]) > 0.999, method


def test_truncation_reaches_the_fidelity_and_leaves_examples_out(run, prepared, lifter):
    decomposition = open_decomposition(run, "npeff")
    source = run.source("fisher")
    sums = component_sums(decomposition, source, torch.eye(6)[:3])
    cut, kept, cosines = truncate(sums, {"fisher": source}, 0.8, chunk=7)
    rows = source.read(0, 40)
    for j in range(3):
        used = int((cut.weights["fisher"][j] != 0).sum())
        assert used == kept[j] < 40
        assert cosines[j] >= 0.8
        torch.testing.assert_close(cut.weights["fisher"][j] @ rows, cut.vectors[j], rtol=1e-4, atol=1e-5)
        assert cosine(cut.vectors[j], sums.vectors[j]) == pytest.approx(cosines[j], abs=1e-4)
        kept_sizes = (sums.weights["fisher"][j].abs() * rows.norm(dim=1))[cut.weights["fisher"][j] != 0]
        left_sizes = (sums.weights["fisher"][j].abs() * rows.norm(dim=1))[cut.weights["fisher"][j] == 0]
        assert kept_sizes.min() >= left_sizes.max()
    assert set(lifter.examples(cut)) == set(np.flatnonzero((cut.weights["fisher"] != 0).any(0)))
    whole, kept, cosines = truncate(sums, {"fisher": source}, 1.1)
    assert min(cosines) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(whole.weights["fisher"], sums.weights["fisher"])


def test_held_out_examples_carry_no_weight(run):
    decomposition = open_decomposition(run, "npeff")
    decomposition.notes.held_out = [0, 5]
    sums = component_sums(decomposition, run.source("fisher"), torch.eye(6))
    assert not sums.weights["fisher"][:, [0, 5]].any()
    assert sums.weights["fisher"].any()


def test_wrong_components_and_methods_are_refused(run):
    decomposition = open_decomposition(run, "npeff")
    with pytest.raises(UserError, match="no component 6"):
        check_component(decomposition, 6)
    decomposition.coefficients = decomposition.coefficients.clone()
    decomposition.coefficients[:, 2] = 0
    with pytest.raises(UserError, match="Component 2 is dead"):
        check_component(decomposition, 2)
    object.__setattr__(decomposition.config, "method", "sae")
    with pytest.raises(UserError, match="activations"):
        check_method(decomposition)
