"""`npeff decompose`: the components of a run."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from npeff.collect.identity import changes
from npeff.decompose.base import CONFIG, Decomposition, Notes, Replay, SavedDecomposition
from npeff.decompose.checkpoint import Checkpoint
from npeff.decompose.config import DecomposeConfig, FitConfig, suggest_components, suggest_holdout
from npeff.decompose.methods import create, kind_of, load
from npeff.store.layout import DECOMPOSITIONS, choose_decomposition, decomposition_folder
from npeff.store.rows import SubsetRows, hold_out
from npeff.store.run import Run
from npeff.utils import UserError, distributed, only_one, read_record, to_dict, write_record

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
    config = _choose_holdout(run, config)
    holdout = config.holdout or 0.0
    fit_config = config.with_components(config.components or _choose_components(run, config))
    name = config.decomposition or fit_config.name
    parent = run.path / DECOMPOSITIONS
    directory = parent / name
    first = distributed.rank() == 0
    if config.sae.top_k is None and (directory / CONFIG).is_file() and not config.overwrite:  # whatever it was then
        earlier = read_record(SavedDecomposition, directory / CONFIG).config.sae.top_k
        fit_config = replace(fit_config, sae=replace(fit_config.sae, top_k=earlier))
    with only_one(parent, active=first):
        decomposition = _finished(directory, run, fit_config, config)
        distributed.barrier()
        checkpoint = Checkpoint(parent / f".{name}.checkpoint", fit_key(run, fit_config, holdout))
        if decomposition is None:
            decomposition = fit(run, fit_config, holdout, checkpoint, quiet=False)
            if first:
                options = to_dict(config) | {"decomposition": name, "components": fit_config.components}
                options["sae"] = to_dict(fit_config.sae)
                decomposition.notes.replay = Replay("decompose", options)
                decomposition.notes.made = datetime.now(UTC).isoformat(timespec="microseconds")
                decomposition.notes.made_for = made_for
                decomposition.save(directory)
                _print_result(decomposition, directory)
        elif first:
            print(f"{directory} is already there, and is not made again.")
            if made_for is None:
                _want(directory, decomposition.notes)
        if decomposition.history.ending != "out of passes":  # else more passes may be asked for
            checkpoint.clear()
    return decomposition


def _choose_holdout(run: Run, config: DecomposeConfig) -> DecomposeConfig:
    """The options with a share to hold out, also if the user does not say."""
    if config.holdout is not None:
        return config
    examples = int(run.usable.sum())
    named = config.decomposition or (config.components and config.with_components(config.components).name)
    saved = run.path / DECOMPOSITIONS / str(named) / CONFIG
    if named and saved.is_file() and not config.overwrite:
        return replace(config, holdout=read_record(SavedDecomposition, saved).notes.holdout)
    if distributed.rank() == 0:
        share = suggest_holdout(examples)
        all_fitted = f"All {examples} examples are fitted, so no effect can be measured on held-out ones"
        some = f"{share:.0%} of {examples} examples are held out, to measure on them later; --holdout 0 fits all"
        print(f"{some if share else all_fitted}.")
    return replace(config, holdout=suggest_holdout(examples))


def common_holdout(run: Run, names: Iterable[str]) -> float:
    """The share to hold out of decompositions that are compared with each other, so that all have the same split.

    Args:
        run: The run.
        names: Names of the decompositions, of which some may exist.

    Returns:
        The share of those that exist, or else the default.

    Raises:
        UserError: Those that exist have different shares.
    """
    files = ((name, run.path / DECOMPOSITIONS / name / CONFIG) for name in names)
    shares = {name: read_record(SavedDecomposition, file).notes.holdout for name, file in files if file.is_file()}
    if len({*shares.values()}) > 1:
        found = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        raise UserError(
            f"These decompositions were fitted to different shares of the examples, so comparing them means little; "
            f"held out are: {found}. Make them again with `npeff decompose --holdout SHARE --overwrite`."
        )
    return next(iter(shares.values()), suggest_holdout(int(run.usable.sum())))


def _choose_components(run: Run, config: DecomposeConfig) -> int:
    """How many components to take if the user does not say."""
    source = run.source(kind_of(config.method))
    examples = round(int((source.ranks > 0).sum()) * (1 - (config.holdout or 0.0)))
    count = suggest_components(examples, config.method, source.dim)
    if distributed.rank() == 0:
        print(f"{count} components for {examples} examples: --components takes another number.")
    return count


def _print_result(decomposition: Decomposition, directory: Path) -> None:
    print(decomposition.history.verdict(decomposition.config.tolerance))
    held_in, held_out = decomposition.notes.held_in_loss, decomposition.notes.held_out_loss
    if held_in is not None and held_out is not None:
        print(f"Loss per example: {held_in:.4f} held in, {held_out:.4f} held out.")
    print(f"{decomposition.config.components} components in {directory}")


def _want(directory: Path, notes: Notes) -> None:
    """Note that a decomposition is wanted for its own sake from now on."""
    if notes.made_for is not None:
        notes.made_for = None
        saved = read_record(SavedDecomposition, directory / CONFIG)
        write_record(directory / CONFIG, replace(saved, notes=notes), sealed=True)


def fit(
    run: Run, config: FitConfig, holdout: float = 0.0, checkpoint: Checkpoint | None = None, quiet: bool = True
) -> Decomposition:
    """Fit the held-in examples of a run.

    Args:
        run: The run.
        config: Options of the fit.
        holdout: Share of examples to hold out.
        checkpoint: Where to keep checkpoints, and to continue from.
        quiet: Show no progress bar.

    Returns:
        The decomposition, with coefficients and residuals of all examples.
    """
    source = run.source(kind_of(config.method))
    decomposition = create(config, checkpoint, quiet)
    notes = decomposition.notes
    notes.run = run.fingerprint
    if not holdout:
        return decomposition.fit(source)
    held_in, held_out = hold_out(len(source.ranks), holdout)
    decomposition.fit(SubsetRows(source, held_in))
    decomposition.coefficients, decomposition.residuals = decomposition.explain(source)
    notes.holdout, notes.held_out = holdout, held_out.tolist()
    usable = source.ranks > 0
    notes.held_in_loss, notes.held_out_loss = (
        _mean(decomposition.residuals[examples[usable[examples]]]) for examples in (held_in, held_out)
    )
    return decomposition


def _mean(residuals: torch.Tensor) -> float | None:
    return float(residuals.double().mean()) if len(residuals) else None


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
    if not (directory / CONFIG).exists() or config.overwrite:
        return None
    old = load(directory, run.fingerprint)
    values = _identity(old.config, old.notes.holdout), _identity(fit_config, config.holdout or 0.0)
    other = [f"{name.rpartition('.')[2]} {before}, not {now}" for name, before, now in changes(*values)]
    if other:
        raise UserError(
            f"{directory} was made with other options ({'; '.join(other)}). Choose another --decomposition, or "
            f"--overwrite it."
        )
    same_length = all(getattr(old.config, name) == getattr(fit_config, name) for name in ("max_passes", "tolerance"))
    return old if same_length else None


def _identity(config: FitConfig, holdout: float) -> dict[str, object]:
    """The options that say which fit it is."""
    return {name: value for name, value in to_dict(config).items() if name not in _NOT_IDENTITY} | {"holdout": holdout}


def fit_key(run: Run, config: FitConfig, holdout: float) -> str:
    """Hash of what makes two fits the same, but for how long they run and where."""
    values = _identity(config, holdout)
    text = json.dumps([run.fingerprint, values.pop("holdout"), values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
