"""Loading models, and naming what cannot be loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from npeff.models.answers import AnswerModel, AnswerSet, TokenTree, encode, resolve_answers
from npeff.models.config import ModelConfig
from npeff.models.load import EMBEDDED_FILE, EMBEDDED_PACKAGE, LoadedModel, load_model
from npeff.models.select import select_parameters
from npeff.tasks.task import Task, load_task
from npeff.utils.errors import UserError
from tests import tiny


def test_a_local_directory(model_directory):
    model = load_model(ModelConfig(model=str(model_directory)))
    assert not model.network.training
    assert not any(parameter.requires_grad for parameter in model.network.parameters())
    assert model.context == 128
    again = load_model(ModelConfig(model=str(model_directory)))
    assert model.fingerprint() == again.fingerprint()
    with torch.no_grad():
        next(again.network.parameters()).view(-1)[0] += 1
    assert model.fingerprint() != again.fingerprint()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_precision(model_directory, dtype):
    model = load_model(ModelConfig(model=str(model_directory), dtype=dtype))
    assert {parameter.dtype for parameter in model.network.parameters()} == {getattr(torch, dtype)}


@pytest.mark.smollm2
def test_the_embedded_model_equals_its_gguf_file():
    embedded = load_model(ModelConfig())
    package = importlib.util.find_spec(EMBEDDED_PACKAGE)
    path = Path(package.submodule_search_locations[0]) / EMBEDDED_FILE
    direct = load_model(ModelConfig(model=str(path)))
    assert embedded.fingerprint() == direct.fingerprint()
    assert select_parameters(embedded.network).size == 106_168_320
    ids = torch.tensor([encode(embedded.tokenizer, "The capital of France is")])
    with torch.no_grad():
        best = embedded.network(ids).logits[0, -1].argmax()
    assert embedded.tokenizer.decode([int(best)]) == " Paris"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "no model directory"),
        ("nowhere.gguf", "no GGUF file"),
        ("a/b/c", "no model directory"),
    ],
)
def test_models_that_are_not_there(model, words):
    with pytest.raises(UserError, match=words):
        load_model(ModelConfig(model=model))


def test_fingerprint_of_a_lone_number(model_directory):
    model = load_model(ModelConfig(str(model_directory)))
    before = model.fingerprint()
    model.network.scale = torch.nn.Parameter(torch.tensor(2.0))
    assert model.fingerprint() != before


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(ModelConfig(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="Could not load model"):
        load_model(ModelConfig(model=str(tmp_path)))


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
    assert tree.depths() == [1, 2]
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
