"""`npeff study`: make, judge and score in one command."""

from __future__ import annotations

from pathlib import Path

from npeff.study.config import JudgeConfig, MakeConfig, ScoreConfig
from npeff.study.judge import judge
from npeff.study.make import make
from npeff.study.score import score


def study(config: MakeConfig | JudgeConfig | ScoreConfig) -> Path | None:
    """Call what the config is for."""
    if isinstance(config, MakeConfig):
        return make(config)
    return judge(config) if isinstance(config, JudgeConfig) else score(config)
