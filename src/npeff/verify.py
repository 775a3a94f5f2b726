"""`npeff verify`: is a run still what was collected, and are its results as they were written?

What is not as it was collected is collected again; of results, people are told which command makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from npeff.collect.run import collect_shards, final_table
from npeff.collect.session import load_prompts, prepare_run, tokenize
from npeff.config import VerifyConfig
from npeff.decompose.run import open_decomposition
from npeff.explore.themes import Themes
from npeff.perturb.records import Made, read_records, read_results
from npeff.store.examples import inputs_hash, inputs_of
from npeff.store.layout import ANALYSIS, DECOMPOSITIONS, PERTURBATIONS
from npeff.store.rows import Shard
from npeff.store.run import Run
from npeff.tasks.data import Dataset
from npeff.utils.configs import read_record
from npeff.utils.errors import UserError
from npeff.utils.files import only_one, read_object
from npeff.utils.progress import progress


def verify(config: VerifyConfig) -> list[str]:
    """Check a run's files by their hashes, and collect damaged ones again.

    Args:
        config: Which run, and whether to repair it.

    Returns:
        Names of the files that were damaged.

    Raises:
        UserError: Files are damaged and were not to be repaired, or results are, which only their commands can make.
    """
    run = Run.open(config.run)
    table_is_whole = run.examples_are_whole()
    shards = progress(run.check_shards(), desc="Checking", unit="shard", total=len(run.shards))
    damaged = [(shard, what) for shard, what in shards if what is not None]
    names = ([] if table_is_whole else ["examples.parquet"]) + [shard.file for shard, _ in damaged]
    if not table_is_whole:
        print(f"{run.path / 'examples.parquet'} is missing or has changed")
    for shard, what in damaged:
        print(f"{run.path / shard.file} {what} (examples {shard.start} to {shard.stop - 1})")
    if names and config.repair:
        with only_one(Path(config.run)):
            _repair(run, [shard for shard, _ in damaged], table_is_whole)
        print(f"Collected again: {', '.join(names)}")
        run = Run.open(config.run)
    # without its table nothing can be said about what was made of a run
    results = list(damaged_results(run)) if table_is_whole or config.repair else []
    for message in results:
        print(message)
    if names and not config.repair:
        raise UserError(
            f"{len(names)} damaged files. Run `npeff verify {config.run}` without --no-repair to collect them again."
        )
    if results:
        raise UserError(f"{len(results)} results are damaged. See above for the commands that make them again.")
    if not names:
        print(f"{run.path}: all {len(run.shards)} shards, the example table and all results are as they were written.")
    return names


def _repair(run: Run, shards: list[Shard], table_is_whole: bool) -> None:
    prepared = prepare_run(run)
    if table_is_whole:
        inputs = inputs_of(run.table)
    else:
        inputs = load_prompts(prepared)[0].table
        if inputs_hash(inputs) != run.manifest.inputs_sha256:
            raise UserError(
                f"The example table of {run.path} is damaged, and the data it came from have changed. "
                f"Restore examples.parquet from a copy, or collect a new run."
            )
    prompts = tokenize(prepared, Dataset(inputs, run.manifest.task.prefix))
    collect_shards(run, prepared, prompts, shards)
    run.finish(final_table(run, prepared, inputs))


# --- results --------------------------------------------------------------------------------------------------------


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
    checks: tuple[Callable[[], object], ...] = (
        lambda: read_results(folder),  # and config.json
        lambda: read_object(folder / "notes.json"),
        lambda: read_records(folder, read_record(Made, config).key),
    )
    messages = []
    for check in checks:
        try:
            check()
        except UserError as error:
            messages.append(str(error))
    yield from dict.fromkeys(messages)  # a damaged config.json spoils all of them
