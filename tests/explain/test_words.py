"""Leave-one-out by the short way against plain runs of the shortened prompts."""

from __future__ import annotations

import pytest
import torch

from npeff.collect.capture import Capture
from npeff.decompose.run import open_decomposition
from npeff.explain.words import LeaveOut, Words, _new_cache, leave_out_exactly, phrases, read_words
from npeff.models.answers import AnswerModel, resolve_answers
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


def test_positions_behind_the_removed_word_are_exact(run, prepared, monkeypatch):
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
        start, stop = example.spans[2]
        prompt = example.tokens[:start] + example.tokens[stop:]
        rest = example.tokens[stop:]
        rows, V = leave_out._run_rests([rest], [b], [start], whole)
        again = range(start, len(prompt))
        torch.testing.assert_close(
            rows[0, 0], positions(prepared, leave_out._part, prompt, V[0].float(), again), rtol=1e-3, atol=1e-4
        )


def test_nothing_is_guessed_for_the_first_word(run, prepared):
    """Without words before the removed one but the first token, the short way is the exact way."""
    decomposition = open_decomposition(run, "npeff")
    tokens = encode(prepared.model.tokenizer, "Review dull and long\nSentiment:")
    # the first word behind the first token
    example = Words("dull", {}, ["x"], [(0, 1)], tokens, [(1, 3)])
    (found,) = LeaveOut(run, decomposition, prepared).remove([example], [[(0, 1)]])
    collected = prepared.collector.collect([tokens, tokens[:1] + tokens[3:]], [0, 0])
    coefficients, _ = decomposition.explain(ArrayRows(collected["rows"][:, 0]))
    torch.testing.assert_close(torch.cat([found.coefficients[None], found.without]), coefficients, rtol=0.02, atol=0.01)


def test_the_short_way_agrees_with_the_exact_one(run, prepared):
    decomposition = open_decomposition(run, "npeff")
    texts = run.table["text"].to_pylist()[:6]
    examples = [read_words(prepared, ("", ()), text) for text in texts]
    spans = [phrases(len(each.words)) for each in examples]
    short = LeaveOut(run, decomposition, prepared).remove(examples, spans)
    exact = [leave_out_exactly(run, decomposition, prepared, *pair) for pair in zip(examples, spans, strict=True)]
    changes = [torch.cat([(each.without - each.coefficients).flatten() for each in way]) for way in (short, exact)]
    assert torch.corrcoef(torch.stack(changes))[0, 1] > 0.7


def test_methods_that_add_nothing_up_go_the_exact_way(run, prepared):
    decomposition = open_decomposition(run, "clusters")
    example = read_words(prepared, ("", ()), "a film of great charm")
    leave_out = LeaveOut(run, decomposition, prepared)
    assert not leave_out._short_way(example)
    (found,) = leave_out.remove([example], [[(0, 1), (2, 4)]])
    again = leave_out_exactly(run, decomposition, prepared, example, [(0, 1), (2, 4)])
    assert torch.equal(found.without, again.without)
