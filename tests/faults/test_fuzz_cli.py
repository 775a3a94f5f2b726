"""Odd command lines, in this process: exit code 0 or 2, no traceback, no hang."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from npeff.cli import COMMANDS
from tests.faults import cases
from tests.faults.fuzzing import run_command, seeded
from tests.synthetic import add_decomposition, make_run

# demo, reproduce and judge would load a real model or ask a server, explore would serve; they are tried where they
# fail before that
LEFT_OUT = ("demo", "explore", "study")
VALUES = (
    *("", " ", "-1", "0", "1", "2", "3", "nan", "inf", "-inf", "1e999", "1e-999", "9" * 30, "9" * 5000, "0x10", "1_0"),
    *("\uff11\uff12", "½", "abc", "a" * 5000, "..", "../..", ".", "x/y", "--", "-", "é😀", "\n", "true", "None", "[]"),
    *(
        "npeff",
        "als",
        "paper",
        "cpu",
        "cuda:99",
        "quantum",
        "spectral:0",
        "spectral:1e9",
        "exact",
        "projection:9999999",
    ),
)


def options(kind: Any) -> list[str]:
    """Names of all options of a config."""
    hints = typing.get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            found += options(hints[field.name])
        else:
            found.append("--" + field.name.replace("_", "-"))
    return found


def command_line(random: Random, known: dict[str, list[str]], run: Path, model: Path, data: Path) -> list[str]:
    command = random.choice(list(known))
    arguments = [command]
    if random.random() < 0.9:
        arguments.append(random.choice((str(run), str(run), str(run / "decompositions" / "npeff"), "absent", "")))
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        name = random.choice(known[command])
        arguments += [name, *random.choices(VALUES, k=random.choice((0, 1, 1, 1, 2)))]
    if random.random() < 0.1:
        arguments.insert(random.randrange(1, len(arguments) + 1), random.choice(VALUES))
    # never a real model, and never long
    if command in ("collect", "check", "params"):
        arguments = [part for part in arguments if part not in (str(run),)]
        arguments += ["--data", str(data)] if command == "collect" else []
        arguments += ["--model", str(model), "--limit", "2"] if command == "collect" else []
        arguments[1:1] = [random.choice((str(model), "./absent", ""))] if command != "collect" else ["new"]
    if command in ("decompose", "sweep", "compare", "stability"):
        arguments += ["--max-passes", "2"] if "--max-passes" in known[command] else []
    if command == "reproduce":
        arguments += ["--list"]
    return arguments


def test_odd_command_lines(
    tmp_path: Path, model_directory: Path, review_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = seeded()
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(24)])
    add_decomposition(run, components=3, name="npeff")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    known = {}
    for name, command in COMMANDS.items():
        if name not in LEFT_OUT:
            known[name] = options(command.load_config())
    codes = {0: 0, 2: 0}
    for _ in range(cases(150, 2000)):
        code, _said = run_command(command_line(random, known, run.path, model_directory, review_file))
        codes[code] += 1
    print(codes)
    assert codes[0]
    assert codes[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--examples", "1"],
        ["demo", "--components", "-1"],
        ["explore", "absent"],
        ["explore", "absent", "--port", "99999"],
        ["replay", ""],
        ["themes", "a" * 5000],
        ["collect", "a" * 5000, "--model", "./absent"],
        ["decompose", "absent", "--tolerance", "nan"],
        ["decompose", "absent", "--seed", "9" * 30],
        ["decompose", "absent", "--memory-gb", "nan"],
        ["perturb", "absent", "--curve", "nan"],
        ["pull", "absent", "new"],
        ["reproduce", "--scale", "nan"],
        ["reproduce", "sst2", "--examples", "sst2=" + "9" * 5000],
        ["--nonsense"],
        ["\ud800"],
    ],
)
def test_command_lines_that_are_refused(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(arguments)[0] == 2
