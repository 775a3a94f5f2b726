"""`npeff evalkit score`: what filled forms say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npeff.explore.themes import LONGEST, Annotations
from npeff.store.layout import decomposition_folder
from npeff.store.run import Run
from npeff.study import report
from npeff.study.answers import Sheet, read_sheets
from npeff.study.config import ScoreConfig
from npeff.study.count import count
from npeff.study.kit import Key, read_key, read_kit
from npeff.utils.errors import UserError
from npeff.utils.files import read_json
from npeff.utils.version import __version__

RESULTS = "results"


def score(config: ScoreConfig) -> Path:
    """Score the forms and return the directory of the results."""
    kit = read_kit(config.kit)
    key = read_key(config.kit, kit)
    sheets = read_sheets(config.forms, kit)
    found: dict[str, Any] = {"npeff": __version__, **count(sheets, key)}
    directory = Path(config.kit) / RESULTS
    report.write(directory, found)
    print(f"{report.markdown(found)}\nin {directory}")
    if config.save_labels is not None:
        saved = save_labels(config.save_labels, key, sheets)
        print(f"{saved} new labels in {config.save_labels}")
    return directory


def save_labels(path: str, key: Key, sheets: Sequence[Sheet]) -> int:
    """Give the themes that annotators named to the components of a run; returns how many labels are new."""
    run = Run.open(path)
    if run.fingerprint != key.run:
        raise UserError(f"The kit was made of another run than {path}.")
    saved = 0
    for name, tensors in key.decompositions.items():
        if read_json(decomposition_folder(run.path, name) / "config.json").get("sha256") != tensors:
            raise UserError(f"Decomposition {name!r} of {path} was made anew since the kit; its components are others.")
        journal = Annotations(run, name)
        for entry in key.groups:
            if entry.decomposition != name or entry.component is None:
                continue
            known = {(old.label, old.who, old.source) for old in journal.history(entry.component)}
            for sheet in sheets:
                answer = sheet.answers.get(entry.number)
                if answer is None or not answer.words:
                    continue
                label = _short(answer.words, LONGEST["label"])
                if (label, sheet.who, sheet.source) not in known:
                    note = f"{answer.theme}, in a blind study of groups of {len(entry.examples)}"
                    journal.add(entry.component, label, note, sheet.who, sheet.source)
                    saved += 1
    return saved


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
