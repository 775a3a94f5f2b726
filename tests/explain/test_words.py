"""Leave-one-out by the short way against plain runs of the shortened prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npeff.collect.capture import Capture
from npeff.decompose.run import open_decomposition
from npeff.explain.words import LeaveOut, Words, _new_cache, leave_out_exactly, phrases, read_words, rounds
from npeff.models.answer_sets import resolve_answers
from npeff.models.answers import AnswerModel
from npeff.models.prompts import encode
from npeff.store.rows import ArrayRows
from npeff.tasks.task import Task
from tests import tiny


def test_words_have_their_own_tokens(prepared):
    text = "it's not good , at all"
    found = read_words(prepared, ("", ()), text)
    assert found.words == ["it's", "not", "good", ",", "at", "all"]
    decode = prepared.model.tokenizer.decode
    assert [decode(found.tokens[a:b]).strip() for a, b in found.spans] == found.words
    template = [t for t in range(len(found.tokens)) if not any(a <= t < b for a, b in found.spans)]
    assert decode([found.tokens[t] for t in template]) == "Review:\nSentiment:"


@pytest.mark.parametrize(
    ("span", "left"), [((0, 1), "bad film ."), ((1, 2), "a film ."), ((1, 3), "a ."), ((3, 4), "a bad film")]
)
def test_a_text_without_words(prepared, span, left):
    assert read_words(prepared, ("", ()), "a bad film .").without(span) == left


def test_long_texts_lose_phrases():
    assert phrases(3) == [(0, 1), (1, 2), (2, 3)]
    assert phrases(0) == []
    spans = phrases(150)
    assert spans[0] == (0, 3)
    assert spans[-1][1] == 150
    assert len(spans) == 50


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_the_rest_behind_a_cache_answers_as_the_whole_prompt(family):
    model, task = tiny.loaded(family), Task("s", "Review: {text}\nSentiment:", "tokens", tiny.LABELS)
    answers = AnswerModel(model, resolve_answers(task, model.tokenizer))
    prompts = [encode(model.tokenizer, task.render(text)) for text in tiny.TEXTS[:3]]
    with torch.inference_mode():
        cache = _new_cache([])
        whole = answers.logits_after(prompts, cache, [range(len(each)) for each in prompts], [range(0)] * 3)
        torch.testing.assert_close(whole, answers.logits(prompts)[0], rtol=1e-4, atol=1e-4)
        cut = [4, 6, 5]
        where = [[0, *range(at, len(each))] for at, each in zip(cut, prompts, strict=True)]
        rests = [[each[t] for t in own] for each, own in zip(prompts, where, strict=True)]
        again = answers.logits_after(rests, cache, where, [range(1, at) for at in cut])
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-4)


def positions(prepared, sketch, prompt, V, which):
    """Rows of some positions of one prompt, from a plain run of all of it."""
    with Capture(prepared.selection.modules, sketch.fold_input) as capture:
        capture.start(1, 1, len(prompt))
        z, _ = prepared.collector.answer_model.logits([prompt])
        total = sketch.accumulator(1)
        mask = torch.zeros(1, len(prompt), 1)
        mask[0, which] = 1
        capture.backward(
            z, V, lambda module, delta, folded: sketch.accumulate(module, delta * mask, folded, total), False
        )
    return sketch.finish(total)[0]


@pytest.fixture
def unrounded(monkeypatch):
    monkeypatch.setattr("npeff.explain.words.rounds", lambda _: False)


def test_positions_behind_the_removed_word_are_exact(run, prepared, monkeypatch, unrounded):
    monkeypatch.setattr("npeff.explain.words.FIRST", 0)
    leave_out = LeaveOut(run, open_decomposition(run, "npeff"), prepared)
    examples = [read_words(prepared, ("", ()), text) for text in ("a film of great charm", "dull and far too long")]
    assert leave_out._short_way(examples[0])
    whole = leave_out._run_whole(examples)
    for b, example in enumerate(examples):
        every = positions(prepared, leave_out._part, example.tokens, whole.V[b].float(), slice(None))
        torch.testing.assert_close(whole.sums[b, 0, -1], every, rtol=1e-3, atol=1e-4)
        at = example.spans[2][0]
        before = positions(prepared, leave_out._part, example.tokens, whole.V[b].float(), slice(0, at))
        torch.testing.assert_close(whole.before(b, at)[0], before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("first", [0, 1])
def test_variants_of_several_examples_share_a_batch(run, prepared, monkeypatch, unrounded, first):
    """Each sees its own example's tokens before the removed words, at their places, whatever else is in the batch."""
    monkeypatch.setattr("npeff.explain.words.FIRST", first)
    leave_out = LeaveOut(run, open_decomposition(run, "npeff"), prepared)
    texts = ("a film of great charm and wit", "dull", "far too long , and flat")
    examples = [read_words(prepared, ("", ()), text) for text in texts]
    whole = leave_out._run_whole(examples)
    cuts = [
        (b, example.spans[i][0], example.spans[min(i + size, len(example.spans)) - 1][1])
        for b, example in enumerate(examples)
        for i in range(len(example.spans))
        for size in (1, 2)
    ]
    generator = torch.Generator().manual_seed(0)
    cuts = [cuts[i] for i in torch.randperm(len(cuts), generator=generator).tolist()]
    rests = [[*examples[b].tokens[: min(first, start)], *examples[b].tokens[stop:]] for b, start, stop in cuts]
    rows, V = leave_out._run_rests(rests, [b for b, _, _ in cuts], [start for _, start, _ in cuts], whole)
    assert len({len(rest) for rest in rests}) > 4
    for n, (b, start, stop) in enumerate(cuts):
        prompt = [*examples[b].tokens[:start], *examples[b].tokens[stop:]]
        with torch.inference_mode():
            alone = leave_out._directions(prepared.collector.answer_model.logits([prompt])[0])
        torch.testing.assert_close(V[n], alone[0], rtol=1e-4, atol=1e-6)
        if not first:  # a gradient to the first token also comes through what is not run again
            behind = range(start, len(prompt))
            exact = positions(prepared, leave_out._part, prompt, V[n].float(), behind)
            torch.testing.assert_close(rows[n, 0], exact, rtol=1e-3, atol=1e-4)


def test_nothing_is_guessed_for_the_first_word(run, prepared, unrounded):
    """Without words before the removed one but the first token, the short way is the exact way."""
    decomposition = open_decomposition(run, "npeff")
    tokens = encode(prepared.model.tokenizer, "Review dull and long\nSentiment:")
    # the first word behind the first token
    example = Words("dull", {}, ["x"], [(0, 1)], tokens, [(1, 3)])
    (found,) = LeaveOut(run, decomposition, prepared).remove([example], [[(0, 1)]])
    collected = prepared.collector.collect([tokens, tokens[:1] + tokens[3:]], [0, 0])
    coefficients, _ = decomposition.explain(ArrayRows(collected["rows"][:, 0]))
    torch.testing.assert_close(torch.cat([found.coefficients[None], found.without]), coefficients, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("rounded", [False, True])
def test_the_short_way_agrees_with_the_exact_one(run, prepared, monkeypatch, rounded):
    monkeypatch.setattr("npeff.explain.words.rounds", lambda _: rounded)
    decomposition = open_decomposition(run, "npeff")
    texts = run.table["text"].to_pylist()[:6]
    examples = [read_words(prepared, ("", ()), text) for text in texts]
    spans = [phrases(len(each.words)) for each in examples]
    short = LeaveOut(run, decomposition, prepared).remove(examples, spans)
    exact = [leave_out_exactly(run, decomposition, prepared, *pair) for pair in zip(examples, spans, strict=True)]
    changes = [torch.cat([(each.without - each.coefficients).flatten() for each in way]) for way in (short, exact)]
    assert torch.corrcoef(torch.stack(changes))[0, 1] > 0.7


def test_only_plain_layers_in_full_precision_are_rounded(prepared, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert rounds(prepared)
    half = replace(prepared, model=replace(prepared.model, config=replace(prepared.model.config, dtype="float16")))
    assert not rounds(half)
    monkeypatch.setattr("torch.cpu.get_capabilities", dict, raising=False)
    assert not rounds(prepared)


def test_batches_of_variants_have_little_padding(run, prepared):
    leave_out = LeaveOut(run, open_decomposition(run, "npeff"), prepared)
    rests = [[0] * (3 + n % 17) for n in range(400)]
    batches = list(leave_out._batches(rests))
    assert sorted(i for batch in batches for i in batch) == list(range(400))
    padded = sum(len(batch) * max(len(rests[i]) for i in batch) for batch in batches)
    assert padded < 1.05 * sum(map(len, rests))
    assert max(len(batch) * len(rests[batch[0]]) for batch in batches) <= prepared.config.batch_tokens
    assert len(batches) < 30


def test_methods_that_add_nothing_up_go_the_exact_way(run, prepared):
    decomposition = open_decomposition(run, "clusters")
    example = read_words(prepared, ("", ()), "a film of great charm")
    leave_out = LeaveOut(run, decomposition, prepared)
    assert not leave_out._short_way(example)
    (found,) = leave_out.remove([example], [[(0, 1), (2, 4)]])
    again = leave_out_exactly(run, decomposition, prepared, example, [(0, 1), (2, 4)])
    assert torch.equal(found.without, again.without)
