"""Every command and every Python block of the README and the documents works.

A command is first parsed as it is printed: an option that does not exist is a failure. Then it is run, in this process
and in a directory of its own, with a tiny model in place of the one it names (`MODELS`), options that make it
small (`SMALL`), and a tiny run in place of a run that the block has not made itself. What is not run is listed in
`NOT_RUN`, with the reason; it is parsed all the same.
"""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from typing import Any

import pytest
import torch

from npeff.cli import COMMANDS, main, parse
from npeff.models.select import select_parameters
from npeff.store.run import Run
from tests import tiny
from tests.docs.blocks import COMMAND_BLOCKS, PYTHON_PAGES, ROOT, Block, read_blocks
from tests.docs.conftest import Sandbox

MODELS = ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-3B", "smollm2-135m")
"""Models for which the tiny one stands."""

STANDS_FOR = {"npeff-128-0": "npeff"}
"""Other words: the decomposition that `npeff decompose RUN` would make, and the one that the tiny run has."""

SMALL = {
    "collect": "--dim 256 --limit 40 --batch-tokens 1024 --dtype float32",
    "check": "--dim 256",
    "decompose": "--components 8 --sae-steps 50",
    "compare": "--components 4 --sae-steps 50",
    "stability": "--components 3 6 --seeds 0 1",
    "sweep": "--components 2 4",
    "perturb": "--count 2 --top 2 --nulls 2",
    "steer": "--tokens 2",
    "icl": "--sets 2 --shots 2 --scored 16",
    "reproduce": "--tasks sst2 --examples sst2=64 --data data",
}
"""Options in place of the printed ones."""

_DONE: set[tuple[str, ...]] = set()
"""Commands that were run on a fresh run: the same command on another one would do the same."""

NOT_RUN = {
    r"npeff explore": "serves until it is stopped; tests/explore drives it",
    r"npeff reproduce all": "takes minutes at any scale; tests/paper runs it with few recipes",
    r"npeff reproduce tab:icl": "its prompts are longer than the tiny model takes; tests/paper has shorter ones",
    r"npeff perturb .*--way sensing": "needs a sketch of 16,384 numbers; tests/perturb runs it",
    r"npeff perturb .*--group": "the tiny run may have no group; tests/perturb runs it",
    r"npeff (push|pull) .*hf://": "needs the Hub; tests/share runs it against a local one",
    r"npeff check .*polite": "the tiny tokenizer begins Yes and No with the same token; tests/tasks loads the file",
    r"npeff check .*--chat": "the tiny tokenizer has no chat template; tests/collect/test_asked.py has one with",
    r"npeff (check|collect) .*--adapter": "needs an adapter; tests/models/test_adapter.py makes one",
    r"npeff study score": "needs forms that were filled in; tests/study fills some",
    r"npeff study (judge|detect)": "needs a server with a language model; tests/study runs it against a local one",
}
"""Commands that are only parsed, and why."""

TASKS_FROM_THE_HUB = ("yat", "sst2", "clinc150", "triviaqa", "reviews")

PYTHON_STANDS_FOR = {
    'task="reviews"': 'task="sst2", data="data/sst2.jsonl", model=MODEL, dim=256',
    "npeff-64-0": "npeff",
    "npeff-32-0": "npeff",
    'DataConfig(task="reviews", limit=200)': 'DataConfig(task="sst2", data="data/sst2.jsonl", limit=40)',
}
"""In Python blocks."""

PYTHON_NOT_RUN = {
    "reproduce(": "takes minutes at any scale; tests/paper runs recipes",
}


def in_words(command: list[str]) -> str:
    return " ".join(command)


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=lambda block: block.name)
def test_commands(block: Block, sandbox: Sandbox) -> None:
    sandbox.write_files_of(read_blocks(block.page))
    made: set[str] = set()
    for command in block.commands:
        if command[0] == "torchrun":
            command = without_torchrun(command)
        if command[0] == "npeff":
            check_npeff(command, sandbox, made)
        elif command[0] == "make":
            target = [word for word in command[1:] if "=" not in word]
            subprocess.run(["make", "-n", *target], cwd=ROOT, check=True, capture_output=True)
        elif command[0] == "pip":
            check_pip(command)
        else:
            raise AssertionError(f"{in_words(command)}: no test knows how to check this program")


def without_torchrun(command: list[str]) -> list[str]:
    """The command that torchrun starts, after torchrun's own parser has taken the rest."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(command[1:])
    assert options.training_script == "npeff.cli"
    assert options.module
    return ["npeff", *options.training_script_args]


def check_pip(command: list[str]) -> None:
    """Nothing is installed; what is asked for must exist."""
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    words = command[2:]
    for option, value in pairwise(words):
        assert option != "-c" or (ROOT / value).is_file()
    for word in words:
        if word == "&&":
            return
        if extra := re.search(r"^(?:\.|npeff)\[(\w+)\]", word):
            assert extra[1] in extras, word
        elif re.match(r"[a-z]", word) and not word.endswith(".txt"):
            assert re.split(r"==|\[", word)[0] in pinned, word


def check_npeff(command: list[str], sandbox: Sandbox, made: set[str]) -> None:
    _, name, *arguments = command
    if name.startswith("-"):
        assert main([name]) == 0
        return
    assert name in COMMANDS, in_words(command)
    path = ""
    for argument in arguments:  # what a command reads must be there before it is parsed
        if argument == "RUN" or re.fullmatch(r"runs/[\w-]+(/.*)?", argument):
            path = "/".join(argument.split("/")[:2])
            new = name == "collect" or (name in ("pull", "replay", "export") and argument == arguments[-1])
            if path not in made and not new:
                sandbox.provide_run(path)
            if new:
                made.add(path)
    parse(name, arguments)
    if any(re.match(pattern, in_words(command)) for pattern in NOT_RUN):
        return
    small = [str(sandbox.model) if word in MODELS else STANDS_FOR.get(word, word) for word in arguments]
    if name in ("collect", "reproduce") and "list" not in small:
        small += ["--model", str(sandbox.model)]
    if name == "collect" and "--data" not in small and small[small.index("--task") + 1] in TASKS_FROM_THE_HUB:
        small += ["--task", "sst2", "--data", "data/sst2.jsonl"]
    if name == "reproduce":  # what recipes share is made once for all pages
        small += ["--out", str(sandbox.run.parent / "reproduced")]
    if name == "pull" and not (sandbox.directory / small[0]).exists():
        assert main(["push", str(sandbox.run), small[0]]) == 0
    small = made_small(name, small)
    key = (name, *("RUN" if path in word else word for word in small)) if path and path not in made else None
    if key is None or key not in _DONE:
        assert main([name, *small]) == 0, in_words(command)
    _DONE.update([key] if key else [])


def made_small(name: str, arguments: list[str]) -> list[str]:
    """The arguments with the options of `SMALL`."""
    options = SMALL.get(name, "").split()
    replaced = {option for option in options if option.startswith("--")}
    kept, skipping = [], False
    for word in arguments:
        if word.startswith("--"):
            skipping = word in replaced
        if not skipping:
            kept.append(word)
    return kept + options


def test_nothing_is_left_out_without_need() -> None:
    """Every exception is about a command that is there."""
    printed = [in_words(command) for block in COMMAND_BLOCKS for command in block.commands]
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for command in printed), pattern


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python(page: Any, sandbox: Sandbox) -> None:
    """All blocks of a page, one after another in one namespace."""
    blocks = read_blocks(page)
    sandbox.write_files_of(blocks)
    code = "\n".join(block.text for block in blocks if block.language == "python")
    for name in set(re.findall(r'"(runs/[\w-]+)', code)) - set(
        re.findall(r'(?:collect_run|CollectConfig)\("([^"]+)', code)
    ):
        sandbox.provide_run(name)
    names = {"MODEL": str(sandbox.model), **names_of(page.name)}
    for block in blocks:
        if block.language != "python" or any(text in block.text for text in PYTHON_NOT_RUN):
            continue
        code = block.text
        for printed, small in PYTHON_STANDS_FOR.items():
            code = code.replace(printed, small)
        exec(compile("\n" * block.line + code, str(page), "exec"), names)


def names_of(page: str) -> dict[str, Any]:
    """What the blocks of a page take for granted, as the text around them says."""
    if page == "sketch.md":
        network = tiny.network("llama")
        modules = select_parameters(network).modules
        return {"network": network, "gradient": {m.name: torch.ones(m.shape) for m in modules}}
    if page == "decompose.md":
        return {"other": Run.open("runs/reviews").source("fisher")}
    return {}
