"""Captured rows against plain autograd, one example at a time and without any of our hooks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers as hf
from torch import nn

from npeff.collect.batch import Collector
from npeff.collect.capture import Capture
from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.sketch.make import make_sketch
from npeff.models.answer_sets import resolve_answers
from npeff.models.answers import AnswerModel
from npeff.models.prompts import encode
from npeff.models.select import CapturedModule, select_parameters
from npeff.tasks.config import DataConfig
from npeff.tasks.task import Task
from npeff.utils.errors import UserError
from tests import tiny

SENTIMENT = Task("s", "Review: {text}\nSentiment:", "tokens", tiny.LABELS)
INTENTS = Task("i", "Query: {text}\nIntent:", "suffixes", tiny.INTENTS)
WORDS = Task("w", "Query: {text}\nAnswer:", "vocabulary")


def prompts_of(task, tokenizer):
    return [encode(tokenizer, task.render(text)) for text in tiny.TEXTS]


def plain_logits(model, task, ids):
    """Answer logits of one unpadded prompt, written as plainly as can be: one run per answer."""

    def log_probabilities(tokens):
        return model.network(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)

    if task.answers == "vocabulary":
        return log_probabilities(ids)[-1]
    answers = [model.tokenizer(f" {label}", add_special_tokens=False).input_ids for label in task.labels]
    if task.answers == "tokens":
        return log_probabilities(ids)[-1][[answer[0] for answer in answers]]
    scores = []
    for answer in answers:
        found = log_probabilities(ids + answer)
        scores.append(sum(found[len(ids) - 1 + i, token] for i, token in enumerate(answer)))
    return torch.stack(scores)


def plain_rows(model, selection, sketch, task, ids, V):
    """Gradients of ⟨V_k, z⟩ by autograd with weight gradients, projected as whole matrices."""
    weights = {n: p for m in selection.modules for n, p in m.module.named_parameters(prefix=m.name, recurse=False)}
    for weight in weights.values():
        weight.requires_grad_(True)
    z = plain_logits(model, task, ids)
    rows = []
    for v in V:
        found = dict(zip(weights, torch.autograd.grad(z @ v, list(weights.values()), retain_graph=True), strict=True))
        gradient = {}
        for module in selection.modules:
            matrix = found[f"{module.name}.weight"]
            if not isinstance(module.module, nn.Linear):
                matrix = matrix.T
            if f"{module.name}.bias" in found:
                matrix = torch.cat([matrix, found[f"{module.name}.bias"][:, None]], 1)
            gradient[module.name] = matrix
        rows.append(sketch.matvec(gradient))
    for weight in weights.values():
        weight.requires_grad_(False)
    return z.detach(), torch.stack(rows)


def random_directions(batch, answers):
    """Directions that sum to zero, as all of ours do: logits and log-probabilities then have the same gradient."""
    V = torch.randn(batch, 2, answers, generator=torch.Generator().manual_seed(5))
    return V - V.mean(2, keepdim=True)


def captured_rows(model, selection, sketch, answer_model, prompts, V):
    with Capture(selection.modules, sketch.fold_input) as capture:
        capture.start(len(prompts), *answer_model.sequences(prompts))
        z, _ = answer_model.logits(prompts)
        return z.detach(), capture.rows(z, V, sketch)


@pytest.mark.parametrize("task", [SENTIMENT, INTENTS, WORDS], ids=lambda task: task.answers)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_equal_autograd(family, task):
    model = tiny.loaded(family)
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    answers = resolve_answers(task, model.tokenizer)
    answer_model = AnswerModel(model, answers)
    prompts = prompts_of(task, model.tokenizer)
    assert len({len(prompt) for prompt in prompts}) > 2
    V = random_directions(len(prompts), len(task.labels) or len(model.tokenizer))
    z, rows = captured_rows(model, selection, sketch, answer_model, prompts, V)
    for i, prompt in enumerate(prompts):
        expected_z, expected = plain_rows(model, selection, sketch, task, prompt, V[i])
        torch.testing.assert_close(z[i].log_softmax(0), expected_z.log_softmax(0), rtol=1e-4, atol=1e-4)
        assert (rows[i] - expected).norm(dim=1).div(expected.norm(dim=1)).max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_batch_size_does_not_matter(family):
    model = tiny.loaded(family)
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    answer_model = AnswerModel(model, resolve_answers(SENTIMENT, model.tokenizer))
    prompts = prompts_of(SENTIMENT, model.tokenizer)
    V = random_directions(len(prompts), 2)
    _, whole = captured_rows(model, selection, sketch, answer_model, prompts, V)
    for size in (1, 2, 4):
        parts = [
            captured_rows(model, selection, sketch, answer_model, prompts[i : i + size], V[i : i + size])[1]
            for i in range(0, len(prompts), size)
        ]
        assert (torch.cat(parts) - whole).norm() < 1e-4 * whole.norm()


def test_separate_suffixes_give_the_same_rows():
    model = tiny.loaded("llama")
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    answers = resolve_answers(INTENTS, model.tokenizer)
    prompts = prompts_of(INTENTS, model.tokenizer)[:3]
    V = random_directions(3, len(tiny.INTENTS))
    z, rows = captured_rows(model, selection, sketch, AnswerModel(model, answers), prompts, V)
    plain = AnswerModel(model, answers, share_prompt=False)
    other_z, other = captured_rows(model, selection, sketch, plain, prompts, V)
    torch.testing.assert_close(z, other_z, rtol=1e-4, atol=1e-4)
    assert (rows - other).norm() < 1e-4 * rows.norm()


@pytest.mark.parametrize("kind", ["blocks", "kron", "sparse", "dense"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lengths_of_directions_do_not_change_a_bit_of_float32_rows(family, kind):
    """Runs that were collected when directions were backpropagated as they are can be continued."""
    model = tiny.loaded(family)
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(kind, dim=256), selection.modules)
    answer_model = AnswerModel(model, resolve_answers(INTENTS, model.tokenizer))
    prompts = prompts_of(INTENTS, model.tokenizer)
    V = random_directions(len(prompts), len(tiny.INTENTS))
    V *= 10.0 ** -torch.arange(6.0)[:, None, None]
    V[3, 1] = 0
    with Capture(selection.modules, sketch.fold_input) as capture:
        capture.start(len(prompts), *answer_model.sequences(prompts))
        z, _ = answer_model.logits(prompts)
        expected = []
        for row in range(2):
            total = sketch.accumulator(len(prompts))
            capture.backward(z, V[:, row], partial(sketch.accumulate, total=total), keep_graph=True)
            expected.append(sketch.finish(total))
        rows = capture.rows(z, V, sketch)
    assert torch.equal(rows, torch.stack(expected, 1))
    assert not rows[3, 1].any()
    assert rows[3, 0].any()


def collect_confident(task, directions, length, weights, dtype):
    """Everything about prompts that a tiny model answers with directions of about this length.

    Its weights are rounded to `weights` and its precision is `dtype`; probabilities are the same in every precision.
    """
    model = tiny.loaded("llama")
    model.network.to(weights).to(dtype)
    selection = select_parameters(model.network)
    config = CollectConfig("", DataConfig("sst2"), model.config, DirectionsConfig(directions), activation=False)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    collector = Collector(config, model, resolve_answers(task, model.tokenizer), selection, sketch)
    rest = torch.linspace(1, 2, collector.answer_model.count - 1).double()
    rest *= length**2 / 2 / rest.sum()
    target = torch.cat([1 - rest.sum()[None], rest]).log().float()
    logits = collector.answer_model.logits

    def confident(prompts):
        z, places = logits(prompts)
        return z - z.detach() + target, places

    collector.answer_model.logits = confident
    prompts = prompts_of(task, model.tokenizer)
    return collector.collect(prompts, list(range(len(prompts))))


@pytest.mark.parametrize(
    ("dtype", "cosine", "norm"), [(torch.float16, 0.9999, 0.002), (torch.bfloat16, 0.999, 0.02)], ids=str
)
@pytest.mark.parametrize("length", [1e-1, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize(
    ("task", "directions"),
    [(SENTIMENT, "exact"), (INTENTS, "exact"), (INTENTS, "spectral:2"), (INTENTS, "projection:4")],
)
def test_half_precision_keeps_rows_of_confident_answers(task, directions, length, dtype, cosine, norm):
    """The gradient of the prediction is a mix of exact rows, and a pass of its own beside others."""
    whole = collect_confident(task, directions, length, dtype, torch.float32)
    half = collect_confident(task, directions, length, dtype, dtype)
    assert not half["set_aside"].any()
    assert torch.equal(half["rank"], whole["rank"])
    assert half["probability"].min() >= 1 - length**2
    for name in ("rows", "gradient"):
        used = whole[name].norm(dim=-1) > 0
        assert used.any()
        assert torch.cosine_similarity(half[name], whole[name], dim=-1)[used].min() > cosine
    torch.testing.assert_close(half["pef_norm"].sqrt(), whole["pef_norm"].sqrt(), rtol=norm, atol=0)
    torch.testing.assert_close(half["gradient_norm"], whole["gradient_norm"], rtol=norm, atol=0)


@pytest.mark.parametrize("patterns", [["*.weight"], ["*.bias"], ["*.1.*fc*", "*.1.*out_proj*"]], ids=str)
def test_selected_parameters_only(patterns):
    """Weights without biases, biases alone, and a part of the layers."""
    model = tiny.loaded("opt")
    exclude = (
        ["*norm*", "*embed*", "*project*"] if patterns == ["*.weight"] else ["*norm*"] if "bias" in patterns[0] else []
    )
    selection = select_parameters(model.network, patterns, exclude)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    answer_model = AnswerModel(model, resolve_answers(SENTIMENT, model.tokenizer))
    prompts = prompts_of(SENTIMENT, model.tokenizer)
    V = random_directions(len(prompts), 2)
    _, rows = captured_rows(model, selection, sketch, answer_model, prompts, V)
    names = {n for n, _ in model.network.named_parameters()} - set(selection.left_out)
    weights = {n: p.requires_grad_(True) for n, p in model.network.named_parameters() if n in names}
    for i, prompt in enumerate(prompts):
        z = plain_logits(model, SENTIMENT, prompt)
        found = dict(zip(weights, torch.autograd.grad(z @ V[i, 0], list(weights.values())), strict=True))
        gradient = {
            m.name: m.matrix(found.get(f"{m.name}.weight"), found.get(f"{m.name}.bias")) for m in selection.modules
        }
        assert sum(matrix.numel() for matrix in gradient.values()) == sum(w.numel() for w in weights.values())
        expected = sketch.matvec(gradient)
        assert (rows[i, 0] - expected).norm() < 1e-4 * expected.norm()


def test_a_module_used_twice_adds_both_uses():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    torch.manual_seed(0)
    network = Twice().requires_grad_(False)
    module = CapturedModule("layer", network.layer, True, True)
    sketch = make_sketch(SketchConfig(dim=64), [module])
    x = torch.randn(3, 4, 6)
    with Capture([module], sketch.fold_input) as capture:
        capture.start(3, 3, 4)
        z = network(x)[:, -1, :2]
        V = torch.randn(3, 1, 2)
        rows = capture.rows(z, V, sketch)
    network.requires_grad_(True)
    for i in range(3):
        gradient = torch.autograd.grad(network(x[i : i + 1])[0, -1, :2] @ V[i, 0], list(network.layer.parameters()))
        expected = sketch.matvec({"layer": module.matrix(*gradient)})
        torch.testing.assert_close(rows[i, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "fits"), [((3, 4), True), ((3, 9), True), ((3, 7), False), ((4, 3), False)])
def test_only_shapes_that_tell_examples_apart_are_taken(shape, fits):
    """Three sequences of four tokens behind five in a cache: other numbers of tokens are not of these examples."""
    module = CapturedModule("layer", nn.Linear(6, 6).requires_grad_(False), True, True)
    with Capture([module], make_sketch(SketchConfig(dim=64), [module]).fold_input) as capture:
        capture.start(3, 3, 4, 5)
        with nullcontext() if fits else pytest.raises(UserError, match="mixes the examples"):
            module.module(torch.randn(*shape, 6))


def test_experts_of_an_unknown_kind_are_named_and_refused_until_excluded():
    config = hf.Llama4TextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
    )
    network = hf.Llama4ForCausalLM(config)
    with pytest.raises(UserError, match=r"experts.*--exclude") as refused:
        select_parameters(network)
    patterns = [word.strip("'") for word in str(refused.value).split("--exclude ")[1].split()]
    selection = select_parameters(network, exclude=patterns)
    assert not any(".experts." in module.name for module in selection.modules)


def test_default_leaves_out_embeddings_norms_and_head():
    for family in tiny.FAMILIES:
        selection = select_parameters(tiny.network(family))
        left = set(selection.left_out)
        assert all("norm" in n or "embed" in n or "head" in n or "wte" in n or "wpe" in n or "ln_" in n for n in left)
        assert selection.modules
        assert not any("head" in module.name or "embed_out" in module.name for module in selection.modules)


def test_patterns_that_match_nothing_are_errors():
    with pytest.raises(UserError, match="matches no parameter"):
        select_parameters(tiny.network("llama"), include=["nonsense*"])


def test_hooks_are_gone_afterwards():
    model = tiny.loaded("llama")
    selection = select_parameters(model.network)
    with Capture(selection.modules, lambda module, x: x):
        pass
    assert not any(module._forward_hooks for module in model.network.modules())
