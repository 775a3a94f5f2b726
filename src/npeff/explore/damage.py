"""What a run holds besides what was collected: are its decompositions, perturbations and themes still whole?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from npeff.decompose.run import open_decomposition
from npeff.explore.themes import Themes
from npeff.perturb.report import Made, read_components, read_results
from npeff.store.layout import ANALYSIS, DECOMPOSITIONS, PERTURBATIONS
from npeff.store.run import Run
from npeff.utils.configs import read_record
from npeff.utils.errors import UserError
from npeff.utils.files import read_object


def damaged_results(run: Run) -> Iterator[str]:
    """A message for everything that is not as it was written. Each says which command makes it again."""
    for folder in _folders(run.path / DECOMPOSITIONS):
        yield from _decomposition(run, folder)
    for folder in _folders(run.path / PERTURBATIONS):
        yield from _perturbation(folder)


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("[!.]*") if path.is_dir())


def _decomposition(run: Run, folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield f"{folder} has no config.json: it was not finished, or is damaged. Run `npeff decompose` again."
        return
    try:
        open_decomposition(run, folder.name)
        Themes(run, folder.name).current()
        analysis = folder / ANALYSIS / "analysis.json"
        if analysis.is_file():
            read_object(analysis)
    except UserError as error:
        yield str(error)


def _perturbation(folder: Path) -> Iterator[str]:
    for name in ("config.json", "results.json"):
        if not (folder / name).is_file():
            yield f"{folder} has no {name}: it was not finished, or is damaged. Run `npeff perturb` again."
            return
    config = folder / "config.json"
    checks: list[Callable[[], object]] = [
        lambda: read_record(Made, config),
        lambda: read_results(folder),
        lambda: read_object(folder / "notes.json"),
        lambda: read_components(folder, read_record(Made, config).key),
    ]
    messages = []
    for check in checks:
        try:
            check()
        except UserError as error:
            messages.append(str(error))
    yield from dict.fromkeys(messages)  # a damaged config.json spoils all of them
