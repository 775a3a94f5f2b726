"""`npeff collect`: per-example Fishers of a task's examples, into a run directory."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch
import tyro
from tqdm import tqdm

import npeff
from npeff.collect.batch import Collector, Wanted
from npeff.collect.directions import DirectionsConfig, parse_directions
from npeff.collect.identity import PLACES, differences, identity_of
from npeff.collect.sketch.base import SketchConfig, make_sketch
from npeff.models.answers import AnswerSet, encode_all, resolve_answers
from npeff.models.load import LoadedModel, ModelConfig, Selection, confirm_trust, load_model, select_parameters
from npeff.store.rows import ArrayRows
from npeff.store.run import Run, Shard, inputs_hash, read_tensors
from npeff.tasks.data import FIELD, DataConfig, Dataset, load_dataset
from npeff.tasks.task import Task, load_task
from npeff.utils import distributed
from npeff.utils.configs import from_dict, replace, to_dict
from npeff.utils.errors import UserError
from npeff.utils.locks import only_one

if TYPE_CHECKING:
    from npeff.collect.estimate import Estimate

TEXTS_AT_ONCE = 1024


@dataclass(frozen=True)
class CollectConfig:
    """Collect per-example Fishers of a model on a task into a run directory. Run it again to continue."""

    run: tyro.conf.Positional[str]
    """Directory of the run; made if it is not there, continued if it is."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    directions: DirectionsConfig = field(default_factory=DirectionsConfig)
    sketch: SketchConfig = field(default_factory=SketchConfig)
    fisher: bool = True
    """Keep the rows of the per-example Fishers (NPEFF)."""
    gradient: bool = True
    """Keep the gradient of the predicted answer (G-NPEFF, gradient clustering, SVD of gradients)."""
    activation: bool = True
    """Keep the last token's residual activation (sparse autoencoder, SVD of activations)."""
    storage: Literal["float16", "float32"] = "float16"
    """Precision of stored rows; they are scaled to unit norm, so half precision loses nothing that matters."""
    shard_examples: int = 256
    """Examples per shard: what a broken run can lose at most."""
    batch_tokens: int = 1024
    """Tokens per batch, padding included; more need more memory."""
    padding: Literal["right", "left"] = "right"
    """Side on which shorter prompts of a batch are padded; results do not depend on it."""
    share_prompt: bool = True
    """Suffix answers only: run the prompt once for all suffixes, as a token tree."""
    dry_run: bool = False
    """Only measure a few batches and print the time, disk and memory that the run would take."""

    def __post_init__(self) -> None:
        if self.shard_examples < 1 or self.batch_tokens < 1:
            raise UserError("--shard-examples and --batch-tokens must be at least 1.")
        if not (self.fisher or self.gradient or self.activation):
            raise UserError("Nothing to collect: switch on at least one of --fisher, --gradient, --activation.")

    @property
    def collected(self) -> list[str]:
        """Names of the kinds of rows that are kept."""
        return [name for name in ("fisher", "gradient", "activation") if getattr(self, name)]


@dataclass(frozen=True)
class Prepared:
    """Everything that a collection needs before its first batch."""

    config: CollectConfig
    task: Task
    answers: AnswerSet
    model: LoadedModel
    selection: Selection
    collector: Collector


def collect_or_estimate(config: CollectConfig) -> Run | Estimate:
    """The command: what `collect` or, with `dry_run`, `npeff.collect.estimate.estimate_collection` does."""
    from npeff.collect.estimate import estimate_collection  # which needs this module

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


def prepare(config: CollectConfig, task: Task | None = None) -> Prepared:
    """Load the model and set up capture for a task."""
    task = task or load_task(config.data.task)
    model = load_model(config.model)
    selection = select_parameters(model.network, config.model.include, config.model.exclude)
    answers = resolve_answers(task, model.tokenizer)
    sketch = make_sketch(config.sketch, selection.modules, model.device)
    wanted = Wanted(config.fisher, config.gradient, config.activation)
    collector = Collector(
        model, answers, selection, sketch, config.directions, wanted, config.padding, config.share_prompt
    )
    return Prepared(config, task, answers, model, selection, collector)


def load_prompts(prepared: Prepared) -> tuple[Dataset, list[list[int]]]:
    """The examples that the config asks for, and the token ids of their prompts.

    A prompt that does not fit the model is a bad example: an error, or left out with --on-bad-example drop.
    """
    dataset = load_dataset(prepared.task, prepared.config.data)
    prompts, misfits = _tokens(prepared, dataset)
    if not misfits:
        return dataset, prompts
    if prepared.config.data.on_bad_example == "error":
        raise UserError(f"{_misfit(prepared, dataset, prompts, misfits[0])} (--on-bad-example drop leaves it out.)")
    if len(misfits) == len(prompts):
        raise UserError(f"No prompt fits the model. {_misfit(prepared, dataset, prompts, 0)}")
    bad = set(misfits)
    kept = [row for row in range(len(prompts)) if row not in bad]
    rows = ", ".join(str(dataset.table["source_row"][row].as_py()) for row in misfits[:5])
    note = (
        f"{len(misfits)} examples with more than {_room(prepared)} tokens (row {rows}{', ...' if misfits[5:] else ''})"
    )
    fitting = Dataset(dataset.table.take(kept), dataset.prefix, (*dataset.dropped, note))
    return fitting, [prompts[row] for row in kept]


def tokenize(prepared: Prepared, dataset: Dataset) -> list[list[int]]:
    """Token ids of every prompt; one that does not fit the model is an error that names the example."""
    prompts, misfits = _tokens(prepared, dataset)
    if misfits:
        raise UserError(_misfit(prepared, dataset, prompts, misfits[0]))
    return prompts


def _tokens(prepared: Prepared, dataset: Dataset) -> tuple[list[list[int]], list[int]]:
    """Token ids of every prompt, and the numbers of those that do not fit the model."""
    prompts: list[list[int]] = []
    same: dict[int, int] = {}  # one object for a token, however often it occurs: a quarter of the memory
    for start in range(0, len(dataset.table), TEXTS_AT_ONCE):
        part = Dataset(dataset.table.slice(start, TEXTS_AT_ONCE), dataset.prefix)
        for ids in encode_all(prepared.model.tokenizer, part.prompts(prepared.task)):
            prompts.append([same.setdefault(token, token) for token in ids])
    room = _room(prepared)
    return prompts, [row for row, ids in enumerate(prompts) if not 0 < len(ids) <= room]


def _room(prepared: Prepared) -> int:
    return prepared.model.context - prepared.answers.longest


def _misfit(prepared: Prepared, dataset: Dataset, prompts: list[list[int]], row: int) -> str:
    source = dataset.table["source_row"][row].as_py()
    return (
        f"The prompt of example {row} (row {source} of the data) has {len(prompts[row])} tokens, but the model takes "
        f"1 to {_room(prepared)}. Shorten or remove it, or choose a model with a longer context."
    )


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
        "npeff": npeff.__version__,
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


def collect_prompts(
    prepared: Prepared,
    prompts: Sequence[Sequence[int]],
    examples: list[int],
    bar: Any = None,
    storage: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Collect prompts in batches; as `Collector.collect`, but rows are flat, [sum of ranks, p], in order.

    Rows and gradients are of type `storage`, from the moment that their batch is done: a shard of them waits in memory.
    """
    parts: list[dict[str, torch.Tensor]] = []
    order: list[int] = []
    for batch in prepared.collector.batches(prompts, prepared.config.batch_tokens):
        found = prepared.collector.collect([prompts[i] for i in batch], [examples[i] for i in batch])
        found |= {name: found[name].to(storage) for name in ("rows", "gradient") if name in found}
        if "rows" in found:
            used = torch.arange(found["rows"].shape[1]) < found["rank"][:, None]
            found["row_lists"] = [rows[mask] for rows, mask in zip(found.pop("rows"), used, strict=True)]  # type: ignore[assignment]
        parts.append(found)
        order += batch
        if bar is not None:
            bar.update(len(batch))
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.tensor(order)] = torch.arange(len(order))
    result = {name: torch.cat([part[name] for part in parts])[back] for name in parts[0] if name != "row_lists"}
    if "row_lists" in parts[0]:
        rows = [row for part in parts for row in part["row_lists"]]
        result["rows"] = torch.cat([rows[i] for i in back.tolist()])
    return result


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
    aside = table["set_aside"].is_valid().to_numpy(zero_copy_only=False)
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


def prepare_run(run: Run, device: str | None = None) -> Prepared:
    """Set up a run's own model, sketch and task again, and check that they are still the same."""
    config: CollectConfig = from_dict(CollectConfig, run.manifest["config"])
    if device is not None:
        config = replace(config, model=replace(config.model, device=device))
    confirm_trust(config.model, run.path / "manifest.json")
    prepared = prepare(config)
    recorded = run.manifest["identity"]
    now = identity_of(config, prepared.task, prepared.model, run.manifest["task"].get("prefix", ""))
    if now["model_sha256"] != recorded.get("model_sha256"):
        raise UserError(f"Model {config.model.model!r} is no longer the one that {run.path} was collected with.")
    if now["task"] != recorded.get("task"):
        raise UserError(f"Task {config.data.task!r} is no longer the one that {run.path} was collected with.")
    changed = differences(recorded, now, but=(*PLACES, "data"))  # the data are read from the run itself
    if changed:
        raise UserError(
            f"The config in {run.path / 'manifest.json'} was changed: {'; '.join(changed[:5])}. Change it back."
        )
    return prepared


def collect_texts(
    run: Run,
    texts: Sequence[str],
    prepared: Prepared | None = None,
    fields: Sequence[Mapping[str, str]] = (),
    numbers: Sequence[int] | None = None,
) -> tuple[ArrayRows, dict[str, torch.Tensor]]:
    """Fisher rows of new texts under a run's model, task and sketch, and all else that `Collector.collect` gives.

    `fields` holds for each text the other columns that the task's prompt names, if it names any; `numbers` are the
    example numbers that seed random directions, 0, 1, ... if not given.
    """
    prepared = prepared or prepare_run(run)
    wanted = prepared.task.fields
    if wanted and [set(given) for given in fields] != [set(wanted)] * len(texts):
        raise UserError(f"The prompt of task {prepared.task.name!r} also needs {', '.join(wanted)} of every text.")
    columns = {FIELD + name: [given[name] for given in fields] for name in wanted}
    table = pa.table({"source_row": range(len(texts)), "text": list(texts), **columns})
    prompts = tokenize(prepared, Dataset(table, run.manifest["task"]["prefix"]))
    found = collect_prompts(prepared, prompts, list(range(len(texts)) if numbers is None else numbers))
    if "rows" not in found:  # a run without Fishers; the other kinds are in `found`
        return ArrayRows(torch.empty(0, prepared.config.sketch.dim), np.zeros(len(texts), np.int64)), found
    return ArrayRows(found["rows"], found["rank"].numpy()), found
