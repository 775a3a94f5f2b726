"""`npeff verify`: is a run still what was collected, and are its results as they were written?

What is not as it was collected is collected again; of results, people are told which command makes them again.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from npeff.collect.run import collect_shards, final_table
from npeff.collect.session import load_prompts, prepare_run, tokenize
from npeff.config import VerifyConfig
from npeff.decompose.run import open_decomposition
from npeff.explain.records import read_case_studies, read_explanations, read_judged, read_names
from npeff.explore.themes import Themes
from npeff.perturb.records import Made, read_records, read_results
from npeff.store.examples import inputs_hash, inputs_of
from npeff.store.layout import ANALYSIS, DECOMPOSITIONS, EXAMPLES, PERTURBATIONS
from npeff.store.rows import Shard
from npeff.store.run import Run
from npeff.tasks.data import Dataset
from npeff.utils import UserError, only_one, read_object, read_record
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
    shards = progress(run.shards, desc="Checking", unit="shard")
    damaged = {shard: what for shard in shards if (what := run.problem(shard))}
    names = ([] if table_is_whole else [EXAMPLES]) + [shard.file for shard in damaged]
    if not table_is_whole:
        print(f"{run.path / EXAMPLES} is missing or has changed")
    for shard, what in damaged.items():
        print(f"{run.path / shard.file} {what} (examples {shard.start} to {shard.stop - 1})")
    if names and config.repair:
        with only_one(Path(config.run)):
            _repair(run, list(damaged), table_is_whole)
        print(f"Collected again: {', '.join(names)}")
        run = Run.open(config.run)
    # without its table nothing can be said about what was made of a run
    results = damaged_results(run) if table_is_whole or config.repair else []
    for message in results:
        print(message)
    if names and not config.repair:
        raise UserError(f"{len(names)} damaged files. `npeff verify {config.run}` without --no-repair repairs them.")
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
    prompts = tokenize(prepared, Dataset(inputs, *run.manifest.task.before))
    collect_shards(run, prepared, prompts, shards)
    run.finish(final_table(run, prepared, inputs))


# --- results --------------------------------------------------------------------------------------------------------


def damaged_results(run: Run) -> list[str]:
    """What is not as it was written.

    Args:
        run: The run.

    Returns:
        Messages; each says which command makes it again.
    """
    checks = [partial(_check_decomposition, run, folder) for folder in _folders(run.path / DECOMPOSITIONS)]
    for folder in _folders(run.path / PERTURBATIONS):
        checks += [partial(_check_perturbation, folder, read) for read in _PERTURBATION]
    messages = []
    for check in checks:
        try:
            check()
        except UserError as error:
            messages.append(str(error))
    return list(dict.fromkeys(messages))  # a damaged config.json spoils several checks


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("[!.]*") if path.is_dir())


def _check_finished(folder: Path, command: str, *names: str) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: it was not finished, or is damaged. Run `{command}` again.")


def _check_decomposition(run: Run, folder: Path) -> None:
    _check_finished(folder, "npeff decompose", "config.json")
    open_decomposition(run, folder.name)
    Themes(run, folder.name).current()
    for read in (read_names, read_explanations, read_case_studies, read_judged):
        read(run, folder.name)
    analysis = folder / ANALYSIS / "analysis.json"
    if analysis.is_file():
        read_object(analysis)


_PERTURBATION: tuple[Callable[[Path], object], ...] = (
    read_results,  # and config.json
    lambda folder: read_object(folder / "notes.json"),
    lambda folder: read_records(folder, read_record(Made, folder / "config.json").key),
)


def _check_perturbation(folder: Path, read: Callable[[Path], object]) -> None:
    _check_finished(folder, "npeff perturb", "config.json", "results.json")
    read(folder)
