"""Where things lie in a run directory, and which decomposition of it is meant."""

from pathlib import Path

from npeff.utils import UserError, read_object

MANIFEST = "manifest.json"
EXAMPLES = "examples.parquet"
SHARDS = "shards"
DECOMPOSITIONS = "decompositions"
ANALYSIS = "analysis"
"""Folder of a decomposition with its analysis."""
PERTURBATIONS = "perturbations"
EXPLANATIONS = "explanations"
DIFFS = "diffs"
COMPARISONS = "comparisons"
STABILITY = "stability"
SPECTRA = "spectra"
SWEEPS = "sweeps"
ICL = "icl"
RELATIONS = "relations"
RUNNING_TEXT = "running-text"
"""Rows of text that every run of a model and a sketch has in common; safe to delete."""
THEMES = "annotations"
"""What people call components, under the name that this folder has had from the beginning."""
_TABLES = (COMPARISONS, STABILITY, SPECTRA, SWEEPS, ICL)
RESULTS = (DECOMPOSITIONS, THEMES, PERTURBATIONS, EXPLANATIONS, DIFFS, *_TABLES)
"""Folders with results that cannot be made again from the rest; relations can."""


def check_name(name: str | None, option: str) -> None:
    """Refuse a name that cannot be a directory of its own.

    Args:
        name: What the user gave; None is no name and always right.
        option: The option that it was given with.

    Raises:
        UserError: The name is empty, has a path in it, or begins with a dot.
    """
    if name is not None and (not name or Path(name).name != name or name.startswith(".") or "\0" in name):
        raise UserError(f"{option} {name!r} cannot be the name of a directory.")


def decomposition_names(run: Path) -> list[str]:
    """Names of the finished decompositions of the run directory `run`, sorted."""
    return sorted(path.parent.name for path in (run / DECOMPOSITIONS).glob("[!.]*/config.json"))


def decomposition_folder(run: Path, name: str) -> Path:
    """Where a finished decomposition is.

    Args:
        run: Run directory.
        name: The decomposition's name.

    Returns:
        Its directory.

    Raises:
        UserError: There is none of this name; the message has the names that there are.
    """
    names = decomposition_names(run)
    if name not in names:
        known = f"it has {', '.join(names)}" if names else f"make one with `npeff decompose {run}`"
        raise UserError(f"{run} has no finished decomposition {name!r}: {known}.")
    return run / DECOMPOSITIONS / name


def choose_decomposition(run: Path, name: str | None = None) -> str:
    """The decomposition that is meant: the named one, or the run's default.

    The default is the newest that `npeff decompose` has made. Those that other commands make on their way (`compare`,
    `stability`) are only taken if there is no other, those of NPEFF first: these commands do not change what is
    looked at.

    Args:
        run: Run directory.
        name: What the user named, if anything.

    Returns:
        The name of a finished decomposition.

    Raises:
        UserError: There is none, or none of this name.
    """
    if name is not None:
        return decomposition_folder(run, name).name
    names = decomposition_names(run)
    if not names:
        raise UserError(f"{run} has no finished decomposition. `npeff decompose {run}` makes one.")
    return max(names, key=lambda each: _rank(run, each)) if len(names) > 1 else names[0]


def _rank(run: Path, name: str) -> tuple[bool, str, bool, str, str]:
    """What the default is the largest in: made for its own sake and when, else by NPEFF and when; name."""
    config = read_object(run / DECOMPOSITIONS / name / "config.json")
    notes = config.get("notes")
    notes = notes if isinstance(notes, dict) else {}
    wanted, made = notes.get("made_for") is None, str(notes.get("made", ""))
    return wanted, made if wanted else "", config.get("method") == "npeff", made, name
