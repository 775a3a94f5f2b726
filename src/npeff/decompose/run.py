"""`npeff decompose`: the components of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from npeff.decompose.base import Decomposition
from npeff.decompose.checkpoint import Checkpoint
from npeff.decompose.config import DecomposeConfig, FitConfig, SolverConfig
from npeff.decompose.methods import create, kind_of, load
from npeff.store.layout import DECOMPOSITIONS, choose_decomposition, decomposition_folder
from npeff.store.rows import SubsetRows, hold_out
from npeff.store.run import Run
from npeff.utils import distributed
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import only_one

# Options that change how long a fit runs or where, not which fit it is: a checkpoint is continued when they differ.
_NOT_IDENTITY = ("max_passes", "tolerance", "device")


def decompose(config: DecomposeConfig, made_for: str | None = None) -> Decomposition:
    """Fit what `config` asks for and save it under the run; what is there already is only loaded.

    Args:
        config: What to fit.
        made_for: The command that needs it on its way, if it is not wanted for its own sake: such a decomposition does
            not become the run's default.

    Returns:
        The decomposition.
    """
    distributed.start()
    run = Run.open(config.run)
    fit_config = FitConfig(**{item.name: getattr(config, item.name) for item in dataclasses.fields(FitConfig)})
    name = config.decomposition or f"{config.method}-{config.components}-{config.seed}"
    parent = run.path / DECOMPOSITIONS
    directory = parent / name
    first = distributed.rank() == 0
    with only_one(parent, active=first):
        done = _finished(directory, run, fit_config, config)
        distributed.barrier()
        checkpoint = Checkpoint(
            run.path / DECOMPOSITIONS / f".{name}.checkpoint", fit_key(run, fit_config, config.holdout)
        )
        if done is not None:
            if done.history.ending != "out of passes":  # else a kill has come between the last two steps
                checkpoint.clear()
            if first:
                print(f"{directory} is already there.")
                if made_for is None and "made_for" in done.notes:  # from now on it is wanted for its own sake
                    del done.notes["made_for"]
                    done.save(directory)
            return done
        decomposition = fit(run, fit_config, config.holdout, checkpoint, quiet=False)
        if first:
            decomposition.notes |= {
                "replay": {"command": "decompose", "config": to_dict(config) | {"decomposition": name}},
                "made": datetime.now(UTC).isoformat(timespec="microseconds"),
                **({"made_for": made_for} if made_for else {}),
            }
            decomposition.save(directory)
        if decomposition.history.ending != "out of passes":  # else more passes may be asked for
            checkpoint.clear()
    if first:
        print(decomposition.history.verdict(config.tolerance))
        if config.holdout:
            notes = decomposition.notes
            print(f"Loss per example: {notes['held_in_loss']:.4f} held in, {notes['held_out_loss']:.4f} held out.")
        print(f"{config.components} components in {directory}")
    return decomposition


def default_components(usable: int) -> int:
    """How many components to take if nobody says: at least eight examples for each, a power of two, at most 128.

    Args:
        usable: Number of examples that can be decomposed.

    Returns:
        Number of components, at least 2.
    """
    return min(128, 2 ** max(1, (usable // 8).bit_length() - 1))


def fit(
    run: Run, config: FitConfig, holdout: float = 0.0, checkpoint: Checkpoint | None = None, quiet: bool = True
) -> Decomposition:
    """Fit the held-in examples of a run; coefficients and residuals are of all examples."""
    source = run.source(kind_of(config.method))
    decomposition = create(config, checkpoint, quiet)
    decomposition.notes["run"] = run.fingerprint
    if not holdout:
        return decomposition.fit(source)
    held_in, held_out = hold_out(len(source.ranks), holdout, config.seed)
    decomposition.fit(SubsetRows(source, held_in))
    decomposition.coefficients, decomposition.residuals = decomposition.explain(source)
    usable = source.ranks > 0
    for name, examples in (("held_in_loss", held_in), ("held_out_loss", held_out)):
        of_these = decomposition.residuals[examples[usable[examples]]]
        decomposition.notes[name] = float(of_these.double().mean()) if len(of_these) else None
    decomposition.notes |= {"holdout": holdout, "held_out": held_out.tolist()}
    return decomposition


def open_decomposition(run: Run, name: str | None = None) -> Decomposition:
    """A decomposition of all examples of a run.

    Args:
        run: The run.
        name: Name of the decomposition; without it, the run's default (`npeff.store.layout.choose_decomposition`).

    Returns:
        The decomposition.

    Raises:
        UserError: There is none, it is damaged, or it is of another run.
    """
    name = choose_decomposition(run.path, name)
    decomposition = load(decomposition_folder(run.path, name), run.fingerprint)
    if len(decomposition.coefficients) != len(run.table):
        raise UserError(
            f"Decomposition {name!r} has coefficients of {len(decomposition.coefficients)} examples, the run has "
            f"{len(run.table)}. Decompose the run again."
        )
    return decomposition


def _finished(directory: Path, run: Run, fit_config: FitConfig, config: DecomposeConfig) -> Decomposition | None:
    """What an earlier call with the same options has saved; None if there is something left to do.

    With more passes or another tolerance a fit goes on; other options under the same name are an error.
    """
    if not (directory / "config.json").exists() or config.overwrite:
        return None
    old = load(directory, run.fingerprint)
    if fit_key(run, old.config, old.notes.get("holdout", 0.0)) != fit_key(run, fit_config, config.holdout):
        raise UserError(f"{directory} was made with other options: choose another --decomposition, or --overwrite it.")
    same_length = all(getattr(old.config, name) == getattr(fit_config, name) for name in ("max_passes", "tolerance"))
    return old if same_length else None


def fit_key(run: Run, config: SolverConfig, holdout: float) -> str:
    """Hash of what makes two fits the same, but for how long they run and where."""
    values = {name: value for name, value in to_dict(config).items() if name not in _NOT_IDENTITY}
    text = json.dumps([run.fingerprint, holdout, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
