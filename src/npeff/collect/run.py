"""`npeff collect`: per-example Fishers of a task's examples, into a run directory."""

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from npeff.collect.asked import ask
from npeff.collect.config import CollectConfig
from npeff.collect.estimate import Estimate, estimate_collection
from npeff.collect.identity import PLACES, differences, identity_of
from npeff.collect.session import WRITTEN_TEXTS, Prepared, answer_texts, collect_prompts, prepare_with_prompts, tokenize
from npeff.collect.summary import summary
from npeff.store.examples import inputs_hash, inputs_of
from npeff.store.rows import Shard
from npeff.store.run import Run
from npeff.store.schema import AskedTask, Manifest
from npeff.tasks.data import Dataset
from npeff.utils import UserError, __version__, distributed, from_dict, only_one, replace, to_dict
from npeff.utils.progress import progress
from npeff.utils.types import Array


def collect_or_estimate(config: CollectConfig) -> Run | Estimate:
    """The command: what `collect` or, with `dry_run`, `npeff.collect.estimate.estimate_collection` does."""
    return estimate_collection(config) if config.dry_run else collect(config)


def collect(config: CollectConfig) -> Run:
    """Collect what `config` asks for into `config.run`, or continue there.

    Args:
        config: What to collect, and where to.

    Returns:
        The finished run.

    Raises:
        UserError: The config asks for a dry run, which collects nothing.
    """
    if config.dry_run:
        raise UserError("A dry run collects nothing: call npeff.collect.estimate.estimate_collection instead.")
    distributed.start()
    config, path = with_former_sketch(config), Path(config.run)
    prepared, dataset, prompts = prepare_with_prompts(config)
    prepared.collector.answer_model.check_tree(max(prompts, key=len))
    with only_one(path, active=distributed.rank() == 0):
        if distributed.rank() == 0:
            run = _start_or_continue(path, prepared, dataset)
        distributed.barrier()
        run = Run.open_unfinished(path)
        if not run.manifest.complete:
            if prepared.task.answers == "generated":  # what was written when the run began counts
                dataset = replace(dataset, table=inputs_of(run.table))
                prompts = tokenize(prepared, dataset)
            asked = ask(prepared, dataset, prompts)
            if distributed.rank() == 0:
                print(*asked.lines, *asked.warnings, prepared.selection.describe(), sep="\n", flush=True)
            left = [shard for shard in run.shards if not run.is_written(shard)]
            distributed.barrier()  # all must see the same list, so none may write before
            collect_shards(run, prepared, prompts, left)
            distributed.barrier()
            if distributed.rank() == 0:
                run.finish(final_table(run, prepared, dataset.table))
            distributed.barrier()
    run = Run.open(path)
    if distributed.rank() == 0:
        left_out = (f"left out: {'; '.join(dataset.dropped)}",) if dataset.dropped else ()
        print(summary(run, (*left_out, *dataset.notes)))
    return run


def with_former_sketch(config: CollectConfig) -> CollectConfig:
    """The config, with the sketch that used to be the default if its run was begun with that.

    Args:
        config: What to collect, and where to.

    Returns:
        The config with which the run there can be continued by the command that began it.
    """
    former = replace(config.sketch, sketch="kron")
    if config.sketch.sketch != "blocks" or not (Path(config.run) / "manifest.json").is_file():
        return config
    begun = from_dict(CollectConfig, Run.open_unfinished(Path(config.run)).manifest.config)
    return replace(config, sketch=former) if begun.sketch == former else config


def _start_or_continue(path: Path, prepared: Prepared, dataset: Dataset) -> Run:
    identity = identity_of(prepared.config, prepared.task, prepared.model, dataset.before)
    if not (path / "manifest.json").is_file():
        return Run.create(path, _manifest(prepared, dataset, identity), dataset.table)
    run = Run.open_unfinished(path)
    changed = differences(run.manifest.identity, identity, but=PLACES)
    if not changed and run.manifest.inputs_sha256 != inputs_hash(dataset.table):
        changed = "the data themselves have changed"
    if changed:
        hint = "Use the same one to continue it, or another directory."
        raise UserError(f"{path} was collected with another config: {changed}. {hint}")
    if run.manifest.examples != len(dataset.table):
        raise UserError(f"{path / 'manifest.json'} is damaged: its number of examples is not that of the data.")
    run.clean_up()
    if run.manifest.complete:
        print(f"{path} is already complete.")
    return run


def _manifest(prepared: Prepared, dataset: Dataset, identity: dict[str, Any]) -> Manifest:
    packages = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return Manifest(
        npeff=__version__,
        command="collect",
        config=to_dict(prepared.config),
        identity=identity,
        shard_examples=prepared.config.shard_examples,
        task=from_dict(AskedTask, identity["task"]),
        parameters=prepared.selection.size,
        model_parameters=prepared.selection.whole,
        excluded_parameters=prepared.selection.excluded,
        dropped=list(dataset.dropped),
        versions={"python": platform.python_version(), **packages},
    )


def collect_shards(run: Run, prepared: Prepared, prompts: list[list[int]], shards: Sequence[Shard]) -> None:
    """Collect this rank's part of `shards`. What is in a shard does not depend on who collects it.

    Args:
        run: The run that they belong to.
        prepared: Model, task and sketch.
        prompts: Token ids of all examples of the run.
        shards: What to collect.

    Raises:
        UserError: A batch does not fit into memory.
    """
    together = prepared.config.model.tensor_parallel or 1  # processes that share a model, and its examples
    mine = shards[distributed.rank() // together :: distributed.world_size() // together]
    total = sum(shard.stop - shard.start for shard in mine)
    where = f" (rank 0 of {distributed.world_size()})" if distributed.world_size() > 1 else ""
    storage = getattr(torch, prepared.config.storage)
    with progress(total=total, unit="ex", desc=f"Collecting{where}", active=distributed.rank() == 0) as bar:
        try:
            for shard in mine:
                examples = list(range(shard.start, shard.stop))
                tensors = collect_prompts(prepared, prompts[shard.start : shard.stop], examples, bar, storage)
                aside = ", ".join(str(shard.start + i) for i in tensors["set_aside"].nonzero().flatten().tolist())
                if aside:
                    tqdm.write(f"Set aside, because a value was not finite: example {aside}.")
                if distributed.rank() % together == 0:
                    run.write_shard(shard, tensors)
        except torch.OutOfMemoryError as error:
            hint = "Run the same command with a smaller --batch-tokens; finished shards are kept."
            raise UserError(f"Out of memory with batches of {prepared.config.batch_tokens} tokens. {hint}") from error


def final_table(run: Run, prepared: Prepared, table: pa.Table) -> pa.Table:
    """The example table of a finished run.

    Args:
        run: The run, with all shards written.
        prepared: What it was collected with.
        table: The inputs, one line per example.

    Returns:
        The inputs with prediction, probability, rank, norm, and whether and why an example was set aside.
    """
    names = ["prediction", "probability", "set_aside"]
    names += ["rank", "pef_norm", "kept"] if prepared.config.fisher else []
    columns = {name: run.tensor(name).numpy() for name in names}
    aside = columns.pop("set_aside").astype(bool)
    if not prepared.config.fisher:
        columns["rank"] = (~aside).astype(np.int32)
    reason = pa.array(["a value was not finite" if flag else None for flag in aside], pa.string())
    texts = pa.array(_said(prepared, table, columns["prediction"]), pa.string())
    for name, values in {**columns, "set_aside": reason, "prediction_text": texts}.items():
        table = table.append_column(name, pa.array(values))
    return table


def _said(prepared: Prepared, table: pa.Table, predictions: Array) -> list[str]:
    """Predicted answers as texts; of generated answers, those of each example."""
    if prepared.task.answers != "generated":
        return answer_texts(prepared, predictions)
    return [own[number] for own, number in zip(table[WRITTEN_TEXTS].to_pylist(), predictions, strict=True)]
