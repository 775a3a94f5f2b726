"""`npeff evalkit`: make, judge and score in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from npeff.study.judge import JudgeConfig, judge
from npeff.study.make import MakeConfig, make
from npeff.study.score import ScoreConfig, score

EvalkitConfig = (
    Annotated[MakeConfig, tyro.conf.subcommand("make")]
    | Annotated[JudgeConfig, tyro.conf.subcommand("judge")]
    | Annotated[ScoreConfig, tyro.conf.subcommand("score")]
)


def evalkit(config: MakeConfig | JudgeConfig | ScoreConfig) -> Path | None:
    """Call what the config is for."""
    if isinstance(config, MakeConfig):
        return make(config)
    return judge(config) if isinstance(config, JudgeConfig) else score(config)
