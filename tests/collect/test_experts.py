"""Rows of mixtures of experts against plain autograd, one example at a time and with the models' own computation."""

from __future__ import annotations

import pytest
import torch

from npeff.collect.config import SketchConfig
from npeff.collect.sketch.make import make_sketch
from npeff.models.answer_sets import resolve_answers
from npeff.models.answers import AnswerModel
from npeff.models.select import select_parameters
from npeff.utils.errors import UserError
from tests import tiny
from tests.collect.test_capture import (
    INTENTS,
    SENTIMENT,
    captured_rows,
    plain_logits,
    prompts_of,
    random_directions,
)


def autograd_rows(model, selection, sketch, task, prompt, V):
    """Rows of one example, with weight gradients of whole parameters; experts are slices of these."""
    left = set(selection.left_out)
    weights = {n: p.requires_grad_(True) for n, p in model.network.named_parameters() if n not in left}
    z = plain_logits(model, task, prompt)
    rows = []
    for v in V:
        found = torch.autograd.grad(z @ v, list(weights.values()), retain_graph=True, allow_unused=True)
        found = {n: torch.zeros_like(weights[n]) if g is None else g for n, g in zip(weights, found, strict=True)}
        gradient = {}
        for m in selection.modules:
            if m.expert is None:
                gradient[m.name] = m.matrix(found.get(f"{m.name}.weight"), found.get(f"{m.name}.bias"))
                continue
            stack = m.name.rpartition(".")[0]
            parts = [found[stack][m.expert]] if stack in found else []
            parts = [part.T for part in parts] if "GptOss" in type(m.module).__name__ else parts
            parts += [found[name][m.expert][:, None] for name in [f"{stack}_bias"] if name in found]
            gradient[m.name] = torch.cat(parts, 1)
        assert sum(matrix.numel() for matrix in gradient.values()) == sum(w.numel() for w in weights.values())
        rows.append(sketch.matvec(gradient))
    model.network.requires_grad_(False)
    return torch.stack(rows)


def check_rows(model, selection, sketch, task):
    answer_model = AnswerModel(model, resolve_answers(task, model.tokenizer))
    prompts = prompts_of(task, model.tokenizer)[:4]
    V = random_directions(len(prompts), len(task.labels))
    _, rows = captured_rows(model, selection, sketch, answer_model, prompts, V)
    for i, prompt in enumerate(prompts):
        expected = autograd_rows(model, selection, sketch, task, prompt, V[i])
        assert (rows[i] - expected).norm(dim=1).div(expected.norm(dim=1)).max() < 1e-4


@pytest.mark.parametrize("task", [SENTIMENT, INTENTS], ids=lambda task: task.answers)
@pytest.mark.parametrize("family", tiny.MIXTURES)
def test_rows_equal_autograd(family, task):
    model = tiny.loaded(family)
    selection = select_parameters(model.network)
    names = {module.name for module in selection.modules}
    experts = {name for name in names if ".experts.gate_up_proj." in name}
    assert len(experts) >= 5
    assert {name for name in names if name.endswith((".gate", ".router"))}
    assert not any("expert" in name for name in selection.left_out)
    check_rows(model, selection, make_sketch(SketchConfig(dim=256), selection.modules), task)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_other_sketches_take_experts_one_by_one(kind):
    model = tiny.loaded("gpt_oss")
    selection = select_parameters(model.network)
    check_rows(model, selection, make_sketch(SketchConfig(kind, dim=256), selection.modules), SENTIMENT)


@pytest.mark.parametrize("pattern", ["*.0.*.router.*", "*.experts.*_bias", "*.experts.down_proj", "*.gate_up_proj*"])
def test_a_part_of_the_experts(pattern):
    """Also where nothing before the router, or before the experts, needs a gradient."""
    model = tiny.loaded("gpt_oss")
    selection = select_parameters(model.network, [pattern])
    check_rows(model, selection, make_sketch(SketchConfig(dim=256), selection.modules), SENTIMENT)


def test_the_model_computes_as_before_afterwards():
    model = tiny.loaded("qwen3_moe")
    ids = torch.arange(10)[None]
    before, config = model.network(ids).logits, model.network.config
    way = config._experts_implementation
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    answer_model = AnswerModel(model, resolve_answers(SENTIMENT, model.tokenizer))
    prompts = prompts_of(SENTIMENT, model.tokenizer)
    z, _ = captured_rows(model, selection, sketch, answer_model, prompts, random_directions(len(prompts), 2))
    assert config._experts_implementation == way != "npeff"
    assert torch.equal(model.network(ids).logits, before)
    torch.testing.assert_close(answer_model.logits(prompts)[0], z, rtol=1e-5, atol=1e-5)


def test_a_router_that_is_more_than_linear_is_refused():
    model = tiny.loaded("mixtral")
    router = model.network.model.layers[1].mlp.gate
    forward = router.forward
    router.forward = lambda hidden: (forward(hidden)[0].tanh() * 3, *forward(hidden)[1:])
    selection = select_parameters(model.network)
    with pytest.raises(UserError, match=r"router model.layers.1.mlp.gate is not a linear map.*--exclude"):
        check_rows(model, selection, make_sketch(SketchConfig(dim=256), selection.modules), SENTIMENT)
