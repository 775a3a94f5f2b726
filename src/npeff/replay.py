"""`npeff replay`: run again what made a directory, from the config that it keeps."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from npeff.cli import COMMANDS
from npeff.configs import from_dict, replace
from npeff.errors import UserError
from npeff.files import read_json


@dataclass(frozen=True)
class ReplayConfig:
    """Run again what made a run or a decomposition, with the very config that it was made with."""

    made: tyro.conf.Positional[str]
    """Run directory, or a directory of a decomposition in it."""
    to: str | None = None
    """Directory for the new run; without it the same one is continued."""


def replay(config: ReplayConfig) -> Any:
    """Call the command again."""
    path = Path(config.made)
    files = [path / name for name in ("manifest.json", "config.json") if (path / name).is_file()]
    if not files:
        raise UserError(f"{path} has neither manifest.json nor config.json, so there is nothing to replay.")
    recorded = read_json(files[0])
    command = recorded.get("command") if isinstance(recorded, dict) else None
    if command not in COMMANDS:
        raise UserError(f"{files[0]} does not name a command of this npeff.")
    module, kind, function, _ = COMMANDS[command]
    loaded = importlib.import_module(module)
    again = from_dict(getattr(loaded, kind), recorded.get("config", {}))
    home = path if command == "collect" else path.parent.parent  # a decomposition lies in RUN/decompositions
    again = replace(again, run=config.to or str(home))
    return getattr(loaded, function)(again)
