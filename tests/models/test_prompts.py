"""Prompts through chat templates, against what transformers renders itself."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
import transformers as hf

from npeff.models.answer_sets import resolve_answers
from npeff.models.load import embedded_model
from npeff.models.prompts import TODAY, Prompts
from npeff.tasks.data import Dataset
from npeff.tasks.task import Task
from npeff.utils.errors import UserError
from tests import tiny

INST = (  # a space between the marker and the answer, as some templates write
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('No system role!') }}"
    "{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n"
    "{% endif %}{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def review(answers="tokens", labels=tiny.LABELS, **options):
    return Task("t", "Review: {text}\nSentiment?", answers, labels, **{"chat": True, **options})


def table(*texts):
    return pa.table({"text": list(texts)})


def messages(*turns):
    return [{"role": role, "content": text} for role, text in turns]


def ids_of(task, made, texts, worked=()):
    writer = Prompts(task, made)
    return writer.encode(writer.write(Dataset(table(*texts), *task.before(worked))))


@pytest.mark.parametrize("bos", [False, True])
def test_token_ids_are_those_of_the_template(bos):
    """With a system prompt and few-shot turns; BOS only where the template writes it."""
    task, made = review(chat=({"system": "You are a critic."},)), tiny.tokenizer_with(tiny.CHATML, bos)
    worked = [{"text": "good", "label": "Positive"}, {"text": "dull", "label": "Negative"}]
    found = ids_of(task, made, ["fine .", "flat"], worked)
    shots = [("user", "Review: good\nSentiment?"), ("assistant", "Positive")]
    shots += [("user", "Review: dull\nSentiment?"), ("assistant", "Negative")]
    for ids, text in zip(found, ["fine .", "flat"], strict=True):
        turns = messages(("system", "You are a critic."), *shots, ("user", f"Review: {text}\nSentiment?"))
        assert ids == made.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def test_a_template_with_bos_does_not_get_a_second_one():
    made = tiny.tokenizer_with(INST, bos=True)
    (ids,) = ids_of(review(), made, ["fine ."])
    assert ids.count(made.bos_token_id) == 1
    turns = messages(("user", "Review: fine .\nSentiment?"))
    assert ids == made.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (tiny.CHATML, {}, ["Negative", "Positive"]),
        (INST, {}, [" Negative", " Positive"]),
        (THINKING, {}, ["Negative", "Positive"]),
        (tiny.CHATML, {"answer_start": "Sentiment:"}, [" Negative", " Positive"]),
        (tiny.CHATML, {"answer_start": "Sentiment:\n"}, ["Negative", "Positive"]),
    ],
)
def test_answers_continue_as_the_template_does(template, options, words):
    """Prompt and answer together are the tokens of the conversation with the answer in it."""
    task, made = review(answers="suffixes", **options), tiny.tokenizer_with(template)
    answers = resolve_answers(task, made)
    assert [made.decode(ids) for ids in answers.tokens] == words
    (prompt,) = ids_of(task, made, ["fine ."])
    for label, tokens in zip(tiny.LABELS, answers.tokens, strict=True):
        said = options.get("answer_start", "") + (task.gap if options else "") + label
        turns = messages(("user", "Review: fine .\nSentiment?"), ("assistant", said))
        whole = made.apply_chat_template(turns, return_dict=False)
        assert whole[: len(prompt) + len(tokens)] == [*prompt, *tokens]


def review_of(template):
    return Prompts(review(), tiny.tokenizer_with(template)).describe(("", ()))


def test_an_empty_train_of_thought_belongs_to_the_prompt():
    assert review_of(THINKING).endswith("<assistant>\n<think>\n\n</think>\n\n")
    assert review_of(tiny.CHATML) == "<|user|>\nReview: {text}\nSentiment?</s>\n<|assistant|>\n"


def test_a_date_in_a_template_does_not_depend_on_the_day():
    dated = "{{ strftime_now('%d %b %Y') }} " + tiny.CHATML
    assert datetime.date.today() != TODAY
    assert review_of(dated).startswith("01 Jan 2025 <|user|>")


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (None, {}, "no chat template.*--no-chat"),
        (INST, {"chat": ({"system": "Be kind."},)}, "cannot be rendered: No system role!; change the task's turns"),
        ("{{ messages[0].content.nothing() }}", {}, "cannot be rendered"),
        ("{% if %}", {}, "cannot be rendered"),
        ({"tool_use": "a", "rag": "b"}, {}, "cannot be rendered"),
        ("{{ messages[0].content }}", {}, "does not show what an assistant says"),
        (tiny.CHATML, {"labels": ("pay bill", "pay rent")}, "'pay bill' = 'pay rent'.*answers: suffixes"),
    ],
)
def test_templates_that_cannot_be_used(template, options, words):
    with pytest.raises(UserError, match=words) as error:
        resolve_answers(review(**options), tiny.tokenizer_with(template))
    assert "\n" not in str(error.value)


@pytest.mark.smollm2
def test_the_embedded_models_own_template():
    made = hf.AutoTokenizer.from_pretrained(embedded_model())
    (ids,) = ids_of(review(), made, ["fine ."])
    turns = messages(("user", "Review: fine .\nSentiment?"))
    assert ids == made.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert [made.decode(tokens) for tokens in resolve_answers(review(), made).tokens] == ["Negative", "Positive"]
