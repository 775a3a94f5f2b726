"""Scores of themes and names by a judge, against judges whose scores are known beforehand."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npeff.cli import main
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose, open_decomposition
from npeff.explain.records import read_judged
from npeff.explore.inside import Insides
from npeff.explore.themes import Themes
from npeff.share.run import shared_files
from npeff.store.run import Run
from npeff.study.config import DetectConfig
from npeff.study.detect import USERS, Question, detect
from npeff.utils.errors import UserError
from tests.study.server import Told, say, serving
from tests.synthetic import make_run

NAME = "npeff-4-0"
THEME = "the true theme"


@pytest.fixture(scope="module")
def told_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four components; every text has a word of its example's number."""
    texts = [f"text x{i} of some length" for i in range(200)]
    run = make_run(tmp_path_factory.mktemp("detect") / "run", texts, [None] * len(texts), task_labels=())
    decompose(DecomposeConfig(run=str(run.path), components=4, holdout=0.5, device="cpu"))
    return run


@pytest.fixture
def run(told_run: Run, tmp_path: Path) -> Run:
    return Run.open(shutil.copytree(told_run.path, tmp_path / "run"))


def judge_by(told: Told, rule: Callable[[str], str]) -> None:
    """Let the server answer by what it is asked."""

    def act(handler: BaseHTTPRequestHandler) -> None:
        say(rule(told.requests[-1]["body"]["messages"][0]["content"]))(handler)

    told.actions.append(act)


def config(run: Run, told: Told, **options: Any) -> DetectConfig:
    return DetectConfig(str(run.path), endpoint=told.url, model="org/a model", **options)


def knows(run: Run, component: int) -> Callable[[str], str]:
    """A judge that knows the users if it is told the true theme, and else says none, or the first."""
    scores = open_decomposition(run, NAME).scores()[:, component].numpy()
    users = {i for i in range(len(scores)) if scores[i] > 0}

    def rule(question: str) -> str:
        shown = [int(number) in users for number in re.findall(r"text x(\d+)", question)]
        detecting = "does not have it" not in question
        if THEME not in question:
            return "none" if detecting else "1"
        return ", ".join(str(n) for n, user in enumerate(shown, 1) if user == detecting)

    return rule


def test_a_theme_that_tells_is_told_from_others(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    themes = Themes(run, NAME)
    themes.add(0, THEME)
    themes.add(1, "something else")
    with serving() as told:
        judge_by(told, knows(run, 0))
        (judged,) = detect(config(run, told, component=(0,), questions=3)) or []
        asked = len(told.requests)
        detect(config(run, told, component=(0,), questions=3))
        assert len(told.requests) == asked  # replies are kept
    by = {each.by: each for each in judged.told}
    assert (by["theme"].detection, by["theme"].intruder) == (1.0, 1.0)
    assert by["other"].detection == 0.5
    assert by["other"].description == "something else"
    assert asked == 3 * 2 * len(by)
    held_out = set(open_decomposition(run, NAME).notes.held_out)
    shown = [re.findall(r"text x(\d+)", each["body"]["messages"][0]["content"]) for each in told.requests]
    assert {int(number) for texts in shown for number in texts} <= held_out
    assert {len(texts) for texts in shown} == {2 * USERS, USERS + 1}
    assert read_judged(run, NAME) == {0: judged}
    assert Insides(run, NAME, open_decomposition(run, NAME)).of(0).judged == judged  # type: ignore[union-attr]
    assert "| theme" in capsys.readouterr().out
    shared = shared_files(run, rows=False)
    assert f"explanations/{NAME}/judged/00000.json" in shared
    assert not any("org-a-model/" in name for name in shared)  # replies name the endpoint


def test_replies_are_scored_as_they_are() -> None:
    sheet = ["a", "b", "c", "d", "e"], [True, False, True, True, True]
    intruder = Question("theme", "x", *sheet)
    assert [intruder.score(reply) for reply in ("2", "**2.**", "3", "2, 3", "none", "6", "It is 2")] == [
        *(1.0, 1.0, 0.0, None, None, None, None),
    ]
    detection = Question("theme", "x", ["a", "b", "c", "d"], [True, False, True, False])
    replies = ("1, 3", "1 and 3", "none", "1,2,3,4", "<think>2</think>\n1", "2, 4", "all of them")
    assert [detection.score(reply) for reply in replies] == [1.0, 1.0, 0.5, 0.5, 0.75, 0.0, None]


def test_a_judge_at_random_is_at_chance(run: Run) -> None:
    generator = np.random.default_rng(0)
    themes = Themes(run, NAME)
    for j in range(4):
        themes.add(j, f"theme {j}")
    with serving() as told:
        judge_by(told, lambda question: str(generator.integers(1, 1 + len(re.findall("text x", question)))))
        judged = detect(config(run, told, questions=6)) or []
    every = [each for found in judged for each in found.told]
    assert abs(np.mean([each.detection for each in every]) - 0.5) < 0.1
    assert abs(np.mean([each.intruder for each in every]) - 1 / (USERS + 1)) < 0.15


def test_what_cannot_be_asked(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "detect", str(run.path), "--endpoint", "http://h", "--model", "m", "--component", "9"]) == 2
    assert "9" in capsys.readouterr().err
    decompose(DecomposeConfig(run=str(run.path), decomposition="all", components=4, holdout=0.0, device="cpu"))
    options = {"endpoint": "http://127.0.0.1:9", "model": "m"}
    with pytest.raises(UserError, match="--holdout"):
        detect(DetectConfig(str(run.path), decomposition="all", **options))
    Themes(run, NAME).add(0, THEME)
    assert detect(DetectConfig(str(run.path), decomposition=NAME, dry_run=True, **options)) is None
    assert "requests" in capsys.readouterr().out
