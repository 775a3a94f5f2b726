"""`npeff replay`: run again what made a directory, from the config that it keeps."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from npeff.cli import COMMANDS
from npeff.collect.run import CollectConfig
from npeff.models.load import confirm_trust
from npeff.utils.configs import from_dict, replace
from npeff.utils.errors import UserError
from npeff.utils.files import read_object

REPLAYED = ("collect", "decompose", "perturb")
"""Commands that write only below the run. What a directory from elsewhere names besides is not run."""


@dataclass(frozen=True)
class ReplayConfig:
    """Run again what made a run, a decomposition or a perturbation, with the very config that it was made with."""

    made: tyro.conf.Positional[str]
    """Run directory, or a directory in its decompositions or perturbations."""
    to: str | None = None
    """Run directory to do it in; without it the same one, where what is there is continued or kept."""


def replay(config: ReplayConfig) -> Any:
    """Call the command again."""
    path = Path(config.made)
    if (path / "manifest.json").is_file():
        file, home = path / "manifest.json", path
        recorded = read_object(file)
    elif (path / "config.json").is_file():
        file, home = path / "config.json", path.parent.parent  # RUN/decompositions/NAME, RUN/perturbations/NAME
        recorded = read_object(file)
        notes = recorded.get("notes")
        if isinstance(notes, dict):  # a decomposition's own config is that of its estimator
            recorded = notes.get("replay", recorded)
    else:
        raise UserError(f"{path} has neither manifest.json nor config.json, so there is nothing to replay.")
    command = recorded.get("command") if isinstance(recorded, dict) else None
    if command not in REPLAYED:
        raise UserError(f"{file} does not name one of {', '.join(REPLAYED)}.")
    module, kind, function, _ = COMMANDS[command]
    loaded = importlib.import_module(module)
    again = from_dict(getattr(loaded, kind), recorded.get("config", {}))
    if isinstance(again, CollectConfig):
        confirm_trust(again.model, file)
    again = replace(again, run=config.to or str(home))
    return getattr(loaded, function)(again)
