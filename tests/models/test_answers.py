"""Answers as tokens, and suffixes that share a prompt."""

from __future__ import annotations

import pytest
import torch

from npeff.models.answer_sets import AnswerSet, TokenTree, resolve_answers
from npeff.models.answers import AnswerModel
from npeff.models.config import ModelConfig
from npeff.models.load import LoadedModel, load_model
from npeff.models.prompts import encode
from npeff.tasks.task import Task, load_task
from npeff.utils.errors import UserError
from tests import tiny


def test_bos_as_the_model_expects_it():
    plain, with_bos = tiny.tokenizer(), tiny.tokenizer(bos=True)
    assert encode(with_bos, "good") == [with_bos.bos_token_id, *encode(plain, "good")]
    task = Task("t", "{text}\nSentiment:", "tokens", tiny.LABELS)
    assert resolve_answers(task, with_bos) == resolve_answers(task, plain)


@pytest.mark.smollm2
def test_answers_of_the_built_in_tasks():
    tokenizer = load_model(ModelConfig()).tokenizer
    for name in ("sst2", "yat"):
        task = load_task(name)
        answers = resolve_answers(task, tokenizer)
        firsts = [tokenizer.decode(ids) for ids in answers.tokens]
        assert all(f" {label}".startswith(first) for label, first in zip(task.labels, firsts, strict=True))
        assert len(set(firsts)) == len(task.labels)
    clinc = resolve_answers(load_task("clinc150"), tokenizer)
    assert [tokenizer.decode(ids) for ids in clinc.tokens] == [f" {label}" for label in clinc.names]


def test_a_token_tree_holds_every_suffix():
    suffixes = [(1, 2, 3), (1, 2), (1, 4), (5,), (1,)]
    tree = TokenTree.build(suffixes)
    assert tree.tokens == (1, 2)  # only tokens that another one follows
    assert tree.parents == (0, 1)
    assert tree.ancestors().sum(1).tolist() == [1, 2]
    assert tree.ancestors().tolist() == [[True, False], [True, True]]
    for suffix, path in zip(suffixes, tree.paths, strict=True):
        assert tuple(token for _, token in path) == suffix
    assert AnswerSet("suffixes", tuple("abcde"), tuple(suffixes)).longest == 2


def test_suffixes_that_cannot_share_a_prompt_are_refused():
    """A sliding window shorter than the prompt: a mask for the tree would replace the window's."""
    network = tiny.network("gemma3")
    settings = type(network.config).from_dict(network.config.to_dict() | {"sliding_window": 8})
    windowed = type(network)(settings).eval()
    windowed.load_state_dict(network.state_dict())
    tokenizer = tiny.tokenizer()
    answers = resolve_answers(Task("t", "Q: {text}\nIntent:", "suffixes", tiny.INTENTS), tokenizer)
    prompt = encode(tokenizer, "Q: it never finds a story worth telling , and the jokes are old\nIntent:")
    AnswerModel(LoadedModel(ModelConfig(), network, tokenizer, torch.device("cpu")), answers).check_tree(prompt)
    model = LoadedModel(ModelConfig(), windowed, tokenizer, torch.device("cpu"))
    AnswerModel(model, answers).check_tree(prompt[:4])
    with pytest.raises(UserError, match="--no-share-prompt"):
        AnswerModel(model, answers).check_tree(prompt)
    AnswerModel(model, answers, share_prompt=False).check_tree(prompt)


@pytest.mark.parametrize(
    ("answers", "labels", "words"),
    [
        ("tokens", ("pay bill", "pay rent"), "'pay bill' = 'pay rent'.*answers: suffixes"),
        ("suffixes", ("pay", "<s>", "\ufffd"), None),
    ],
)
def test_labels_that_begin_with_the_same_token(answers, labels, words):
    task = Task("t", "Q: {text}\nIntent:", answers, labels)
    if words is None:
        assert len(set(resolve_answers(task, tiny.tokenizer()).tokens)) == len(labels)
        return
    with pytest.raises(UserError, match=words):
        resolve_answers(task, tiny.tokenizer())


def test_labels_that_the_tokenizer_cannot_tell_apart():
    class Blind:
        eos_token_id, eos_token = None, None

        def __call__(self, texts, add_special_tokens=True):
            many = [texts] if isinstance(texts, str) else texts
            ids = [[ord(letter) for letter in text.lower()] for text in many]
            return type("Encoded", (), {"input_ids": ids[0] if isinstance(texts, str) else ids})

    with pytest.raises(UserError, match="the same to the tokenizer: 'Yes' = 'YES'"):
        resolve_answers(Task("t", "{text}:", "suffixes", ("Yes", "no", "YES")), Blind())
