"""`npeff collect`: per-example Fishers of a task's examples, into a run directory."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from npeff.collect.config import CollectConfig, parse_directions
from npeff.collect.estimate import Estimate, estimate_collection
from npeff.collect.identity import PLACES, differences, identity_of
from npeff.collect.session import Prepared, collect_prompts, load_prompts, prepare
from npeff.store.examples import inputs_hash
from npeff.store.run import Run, Shard, read_tensors
from npeff.tasks.data import Dataset
from npeff.utils import distributed
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import only_one
from npeff.utils.version import __version__


def collect_or_estimate(config: CollectConfig) -> Run | Estimate:
    """The command: what `collect` or, with `dry_run`, `npeff.collect.estimate.estimate_collection` does."""
    return estimate_collection(config) if config.dry_run else collect(config)


def collect(config: CollectConfig) -> Run:
    """Collect what `config` asks for into `config.run`, or continue there; returns the finished run."""
    if config.dry_run:
        raise UserError("A dry run collects nothing: call npeff.collect.estimate.estimate_collection instead.")
    distributed.start()
    path = Path(config.run)
    prepared = prepare(config)
    dataset, prompts = load_prompts(prepared)
    prepared.collector.answer_model.check_tree(max(prompts, key=len))
    with only_one(path, active=distributed.rank() == 0):
        if distributed.rank() == 0:
            run = _start_or_continue(path, prepared, dataset)
        distributed.barrier()
        run = Run.open_unfinished(path)
        if not run.manifest["complete"]:
            collect_shards(run, prepared, prompts, [shard for shard in run.shards if not run.is_written(shard)])
            distributed.barrier()
            if distributed.rank() == 0:
                run.finish(final_table(run, prepared, dataset.table))
            distributed.barrier()
    run = Run.open(path)
    if distributed.rank() == 0:
        _say_summary(run, dataset)
    return run


def _start_or_continue(path: Path, prepared: Prepared, dataset: Dataset) -> Run:
    identity = identity_of(prepared.config, prepared.task, prepared.model, dataset.prefix)
    if not (path / "manifest.json").is_file():
        return Run.create(path, _manifest(prepared, dataset, identity), dataset.table)
    run = Run.open_unfinished(path)
    changed = differences(run.manifest["identity"], identity, but=PLACES)
    if not changed and run.manifest["inputs_sha256"] != inputs_hash(dataset.table):
        changed = ["the data themselves have changed"]
    if changed:
        raise UserError(
            f"{path} was collected with another config: {'; '.join(changed[:5])}. "
            f"Use the same one to continue it, or another directory."
        )
    if run.manifest["examples"] != len(dataset.table):
        raise UserError(f"{path / 'manifest.json'} is damaged: its number of examples is not that of the data.")
    run.clean_up()
    if run.manifest["complete"]:
        print(f"{path} is already complete.")
    return run


def _manifest(prepared: Prepared, dataset: Dataset, identity: dict[str, Any]) -> dict[str, Any]:
    import transformers

    return {
        "npeff": __version__,
        "command": "collect",
        "config": to_dict(prepared.config),
        "identity": identity,
        "shard_examples": prepared.config.shard_examples,
        "task": identity["task"],
        "parameters": prepared.selection.size,
        "dropped": list(dataset.dropped),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
    }


def collect_shards(run: Run, prepared: Prepared, prompts: list[list[int]], shards: Sequence[Shard]) -> None:
    """Collect this rank's part of `shards`. A shard's numbers do not depend on who collects it."""
    mine = shards[distributed.rank() :: distributed.world_size()]
    total = sum(shard.stop - shard.start for shard in mine)
    where = f" (rank 0 of {distributed.world_size()})" if distributed.world_size() > 1 else ""
    with tqdm(total=total, unit="ex", desc=f"Collecting{where}", disable=distributed.rank() > 0) as bar:
        try:
            for shard in mine:
                run.write_shard(shard, _collect_shard(prepared, prompts, shard, bar))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"Out of memory with batches of {prepared.config.batch_tokens} tokens. Run the same command with a "
                f"smaller --batch-tokens; finished shards are kept."
            ) from error


def _collect_shard(prepared: Prepared, prompts: list[list[int]], shard: Shard, bar: Any) -> dict[str, torch.Tensor]:
    """All tensors of one shard, in the order of its examples."""
    config = prepared.config
    examples = range(shard.start, shard.stop)
    storage = getattr(torch, config.storage)
    found = collect_prompts(prepared, [prompts[i] for i in examples], list(examples), bar, storage)
    aside = [shard.start + i for i in found["set_aside"].nonzero().flatten().tolist()]
    if aside:
        tqdm.write(f"Set aside, because a value was not finite: example {', '.join(map(str, aside))}.")
    return found


def final_table(run: Run, prepared: Prepared, table: pa.Table) -> pa.Table:
    """The table of inputs with what was found about each example."""
    names = ["prediction", "probability", "set_aside"]
    names += ["rank", "pef_norm", "kept"] if prepared.config.fisher else []
    shards = [read_tensors(run.whole_shard(shard), names) for shard in run.shards]
    columns = {name: torch.cat([shard[name] for shard in shards]).numpy() for name in names}
    aside = columns.pop("set_aside").astype(bool)
    if not prepared.config.fisher:
        columns["rank"] = (~aside).astype(np.int32)
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    reason = ["a value was not finite" if flag else None for flag in aside]
    return table.append_column("set_aside", pa.array(reason, pa.string())).append_column(
        "prediction_text", pa.array(_answer_texts(prepared, columns["prediction"]), pa.string())
    )


def _answer_texts(prepared: Prepared, predictions: np.ndarray) -> list[str]:
    if prepared.answers.names:
        return [prepared.answers.names[index] for index in predictions]
    return [prepared.model.tokenizer.decode([int(token)]) for token in predictions]


def _say_summary(run: Run, dataset: Dataset) -> None:
    table = run.table
    labels, predictions = table["label"].to_numpy(zero_copy_only=False), table["prediction"].to_numpy()
    aside = ~run.usable
    known = table["label"].is_valid().to_numpy(zero_copy_only=False) & ~aside
    lines = [f"{len(table)} examples, {int(table['rank'].to_numpy().sum())} rows in {run.path}"]
    if dataset.dropped:
        lines.append(f"left out: {'; '.join(dataset.dropped)}")
    if known.any() and run.manifest["task"]["labels"]:
        lines.append(f"accuracy {np.mean(labels[known] == predictions[known]):.1%} on {known.sum()} labelled examples")
    if "kept" in table.column_names and not aside.all():
        kept = np.mean(table["kept"].to_numpy()[~aside])
        kind, _ = parse_directions(run.manifest["config"]["directions"]["directions"])
        random = " (random directions: right on average, for one example above or below)"
        note = random if kind in ("projection", "sampling") else ""
        lines.append(f"directions keep {kept:.1%} of the Fisher's trace at the outputs{note}")
    if aside.any():
        lines.append(f"{aside.sum()} examples set aside: {', '.join(map(str, np.flatnonzero(aside)[:8]))}")
    print("\n".join(lines))
