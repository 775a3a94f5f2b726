from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.collect.session import read_prompts
from npeff.explain.parts import Anatomy, attention_from_end, check_parts, describe, mean_trace, trace
from npeff.models.select import blocks, select_parameters
from npeff.perturb.evaluate import Divergence
from npeff.perturb.weights import EditedWeights
from tests import tiny


def random_vector(modules, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {module.name: torch.randn(module.shape, generator=generator) for module in modules}


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_parameter_belongs_to_one_part(family):
    network = tiny.network(family)
    modules = select_parameters(network).modules
    anatomy = Anatomy(network, modules)
    counts = {kind: len([key for key in anatomy.keys if key[1] == kind]) for kind in ("head", "kv", "neuron")}
    settings = network.config
    layers, neurons = 2, getattr(settings, "intermediate_size", None) or getattr(settings, "ffn_dim", None) or 4 * 32
    assert counts["head"] == layers * 4
    assert counts["kv"] == (layers * anatomy.kv if anatomy.kv < anatomy.heads else 0)
    assert counts["neuron"] == layers * (settings.ffn_dim if family == "opt" else neurons)
    vector = random_vector(modules)
    energies = anatomy.energies(vector)
    assert energies.sum() == pytest.approx(1)
    others = sum(
        energy for key, energy in zip(anatomy.keys, energies, strict=True) if key[0] >= 0 and key[1] == "other"
    )
    assert others < 0.02  # biases of what writes to the residual stream
    halves = [anatomy.only(vector, np.arange(len(energies)) % 2 == half) for half in (0, 1)]
    for name, matrix in vector.items():
        torch.testing.assert_close(halves[0][name] + halves[1][name], matrix)


def test_shared_keys_and_values_by_hand():
    network = tiny.network("llama")  # 4 heads, 2 of keys and values
    modules = {module.name: module for module in select_parameters(network).modules}
    anatomy = Anatomy(network, list(modules.values()))
    vector = {name: torch.zeros(module.shape) for name, module in modules.items()}
    size = network.model.layers[0].self_attn.head_dim
    vector["model.layers.1.self_attn.q_proj"][2 * size : 3 * size] = 1.0  # head 2
    vector["model.layers.1.self_attn.o_proj"][:, 2 * size : 3 * size] = 1.0
    vector["model.layers.0.self_attn.v_proj"][size : 2 * size] = (
        2.0  # the second pair of keys and values, heads 2 and 3
    )
    vector["model.layers.0.mlp.down_proj"][:, 5] = 3.0
    head, kv, neuron = size * 33 + 32 * size, 4 * size * 33, 9 * 32
    whole = head + kv + neuron
    found = describe(anatomy, vector, np.zeros(len(anatomy.keys)))
    assert found.heads[1] == pytest.approx([0, 0, head / whole, 0], rel=1e-4)
    assert found.heads[0] == pytest.approx([0, 0, kv / whole / 2, kv / whole / 2], rel=1e-4)
    assert found.layers == pytest.approx([(kv + neuron) / whole, head / whole], rel=1e-4)
    first, second = found.leading_heads[:2]
    assert (first.layer, first.kind, first.number) == (0, "kv", 1)
    assert (second.layer, second.kind, second.number) == (1, "head", 2)
    assert (found.leading_neurons[0].layer, found.leading_neurons[0].number) == (0, 5)


def test_effects_of_parts(run, prepared):
    modules = prepared.selection.modules
    anatomy, vector = Anatomy(prepared.model.network, modules), random_vector(modules)
    prompts = read_prompts(run, prepared)[:5]
    points = check_parts(prepared, anatomy, vector, prompts)
    energies = anatomy.energies(vector)
    order = [n for n in np.argsort(-energies, kind="stable") if anatomy.keys[n][1] != "other"]
    last = points[-1]
    chosen = np.isin(np.arange(len(energies)), order[: round(last.parts * len(order))])
    answers = Divergence(prepared, prompts, range(5))
    whole, without = (answers.derivatives(part) for part in (vector, anatomy.only(vector, ~chosen)))
    assert last.energy == pytest.approx(energies[chosen].sum())
    assert last.left == pytest.approx(answers.effects(without).mean() / answers.effects(whole).mean(), rel=1e-3)
    assert points[2].random is not None


def test_a_change_travels_as_finite_differences_say(run, prepared):
    vector, prompt = random_vector(prepared.selection.modules), read_prompts(run, prepared)[0]
    layers = list(blocks(prepared.model.network))
    sizes = trace(prepared, layers, prompt, vector)
    assert (len(sizes), len(sizes[0])) == (2, len(prompt))

    def streams():
        kept = []
        hooks = [
            layer.register_forward_hook(
                lambda *call: kept.append((call[-1][0] if isinstance(call[-1], tuple) else call[-1])[:1])
            )
            for layer in layers
        ]
        with torch.inference_mode():
            prepared.collector.answer_model.logits([prompt])
        for hook in hooks:
            hook.remove()
        return kept

    step, sides = 1e-4, []
    plain = streams()
    with EditedWeights(prepared.selection.modules) as weights:
        for sign in (1, -1):
            weights.add(vector, sign * step)
            sides.append(streams())
    for n in range(2):
        measured = (sides[0][n] - sides[1][n])[0] / (2 * step)
        expected = (measured.norm(dim=1) / plain[n][0].norm(dim=1)).tolist()
        assert sizes[n] == pytest.approx(expected, rel=0.02)


def test_attention_of_the_last_token(run, prepared):
    network, prompt = prepared.model.network, read_prompts(run, prepared)[0]
    vector = random_vector(prepared.selection.modules)
    anatomy = Anatomy(network, prepared.selection.modules)
    heads = describe(anatomy, vector, np.zeros(len(anatomy.keys))).leading_heads[:3]
    before = network.config._attn_implementation
    weights = attention_from_end(network, prompt, heads)
    assert network.config._attn_implementation == before
    assert [len(row) for row in weights] == [len(prompt)] * 3
    assert [sum(row) for row in weights] == pytest.approx([1, 1, 1], abs=1e-3)


def test_the_mean_of_traces_is_by_place():
    """Of prompts `1 2 text 9`: the value of a text's token at 1/16, 3/16, ... of its length."""
    prompts = [[1, 2, *range(10, 18), 9], [1, 2, *range(30, 46), 9]]
    sizes = [[[float(t) for t in range(len(prompt))], [1.0] * len(prompt)] for prompt in prompts]
    places, mean = mean_trace(prompts, sizes, [f"t{token}" for token in prompts[0]])
    assert places == ["t1", "t2", *(f"text {n}/8" for n in range(1, 9)), "t9"]
    assert mean[0] == [0, 1, *((2 + k + 2 + 2 * k + 1) / 2 for k in range(8)), (10 + 18) / 2]
    assert mean[1] == [1.0] * 11
    assert mean_trace(prompts[:1], sizes[:1], list("abcdefghijk")) == (list("abcdefghijk"), sizes[0])
    shorter = mean_trace([[1, 2], [1, 2, 3]], [[[1.0, 2.0]], [[3.0, 4.0, 5.0]]], ["a", "b"])
    assert shorter == (["a", "b", *(f"text {n}/8" for n in range(1, 9))], [[2.0, 3.0, *[3.5] * 8]])
