"""`npeff study score`: what filled forms say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npeff.explore.themes import LONGEST, Themes
from npeff.store.layout import decomposition_folder
from npeff.store.run import Run
from npeff.study.answers import Sheet, read_sheets
from npeff.study.config import ScoreConfig
from npeff.study.count import count
from npeff.study.kit import Key, read_key, read_kit
from npeff.study.report import write_scores
from npeff.utils.errors import UserError
from npeff.utils.files import read_object
from npeff.utils.text import shorten

RESULTS = "results"


def score(config: ScoreConfig) -> Path:
    """Score filled forms.

    Args:
        config: Options of the command.

    Returns:
        Directory of the results.
    """
    kit = read_kit(config.kit)
    key = read_key(config.kit, kit)
    sheets = read_sheets(config.forms, kit)
    directory = Path(config.kit) / RESULTS
    print(f"{write_scores(directory, count(sheets, key))}\nin {directory}")
    if config.save_themes is not None:
        print(f"{save_themes(config.save_themes, key, sheets)} new themes in {config.save_themes}")
    return directory


def save_themes(path: str, key: Key, sheets: Sequence[Sheet]) -> int:
    """Give the themes that annotators named to the components of a run.

    Args:
        path: Run directory.
        key: Key of the kit.
        sheets: The answers of each annotator.

    Returns:
        How many themes are new.

    Raises:
        UserError: The kit was made of another run, or of a decomposition that was replaced since.
    """
    run = Run.open(path)
    if run.fingerprint != key.run:
        raise UserError(f"The kit was made of another run than {path}.")
    saved = 0
    for name, tensors in key.decompositions.items():
        if read_object(decomposition_folder(run.path, name) / "config.json").get("sha256") != tensors:
            raise UserError(f"Decomposition {name!r} of {path} was replaced since the kit was made: other components.")
        journal = Themes(run, name)
        for entry in key.groups:
            if entry.decomposition != name or entry.component is None:
                continue
            known = {(old.theme, old.who, old.source) for old in journal.history(entry.component)}
            for sheet in sheets:
                answer = sheet.answers.get(entry.number)
                theme = shorten(answer.words, LONGEST["theme"]) if answer is not None else ""
                if answer is None or not theme or (theme, sheet.who, sheet.source) in known:
                    continue
                note = f"{answer.theme}, in a blind study of groups of {len(entry.examples)}"
                journal.add(entry.component, theme, note, sheet.who, sheet.source)
                saved += 1
    return saved
