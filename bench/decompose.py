"""Speed, loss, memory and recovery of decompositions, on Fishers of SmolLM2-135M and on planted and synthetic rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch

from bench import entry
from npeff.collect.config import CollectConfig
from npeff.collect.run import collect
from npeff.decompose.blocks import Blocks, Rotation, ShortRows, start_components
from npeff.decompose.config import FitConfig, PaperConfig
from npeff.decompose.npeff import Als, Npeff, thinned_start
from npeff.decompose.solver import Paper, start
from npeff.store.rows import ArrayRows, RowSource, Shard
from npeff.store.run import Run
from npeff.store.schema import Manifest
from npeff.tasks.config import DataConfig

EXAMPLES = 1024
COMPONENTS = 64
SEEDS = (0, 1, 2)
PAPER_EXAMPLES = 60_000
"""Examples for which the paper chose its learning rates."""
PAUSE = 800
"""Steps of `paper` between two runs of `als`."""
STORE_BYTES = 10e9


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    yield entry("decompose.recovery", recovery(), ">= 0.95")
    with tempfile.TemporaryDirectory() as folder:
        ratio, loss = coarse_ratio(factor_rows(), components=256)
        yield entry("decompose.coarse_ratio", ratio, "<= 0.25", holds=loss <= 1.001)
        yield entry("decompose.peak_gb", peak_gb(Path(folder)), "<= 3")
        config = CollectConfig(run=str(Path(folder) / "run"), data=data_config(data), gradient=False, activation=False)
        collecting, run = timed(lambda: collect(config))
        source = in_memory(run.source("fisher"))
        yield entry("decompose.pass_ratio", pass_ratio(source), "<= 1.3")
        yield from against_paper(source)
        yield entry("decompose.fit_ratio", fit_ratio(source, collecting), "<= 0.05")


def data_config(data: Path | None) -> DataConfig:
    if data is None:
        return DataConfig("reviews", limit=EXAMPLES)
    return DataConfig("sst2", data=str(data / "sst2.jsonl"), limit=EXAMPLES)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def in_memory(source: RowSource) -> ArrayRows:
    """All rows, so that neither solver waits for the disk."""
    return ArrayRows(source.read(0, len(source.ranks)), source.ranks)


def against_paper(source: ArrayRows) -> Iterator[dict[str, Any]]:
    """`als` against `paper` on the same rows, by time to the same loss: the one that the paper's recipe ends with.

    Once with rows in their full length and once with both on rotated rows; medians over the seeds.
    """
    for name, rotated in (("decompose.time_ratio", False), ("decompose.time_ratio_rotated", True)):
        ratios, losses, whole = [], [], []
        for seed in SEEDS:
            paper, runs = race(source, seed, rotated)
            target = paper[-1][1]
            ratios.append(np.mean([seconds_to(target, run) for run in runs]) / seconds_to(target, paper))
            losses.append(runs[0][-1][1] / target)
            whole.append(np.mean([run[-1][0] for run in runs]) / paper[-1][0])
        yield entry(name, float(np.median(ratios)), "<= 0.05")
        if not rotated:
            yield entry("decompose.loss_ratio", float(np.median(losses)), "<= 1.0005", holds=bool(max(whole) <= 0.05))


Passes = list[tuple[float, float]]
"""Seconds since the rows were there and loss, after each pass of a solver; what a rotation takes is among them."""


def race(source: ArrayRows, seed: int, rotated: bool) -> tuple[Passes, list[Passes]]:
    """Passes of `paper`, and those of `als` as often as it runs while `paper` pauses: both meet a machine as busy."""
    scale = PAPER_EXAMPLES / len(source.ranks)
    config = _config(seed, paper=PaperConfig(frozen_rate=1e-5 * scale, joint_rate=3e-4 * scale))
    torch.set_flush_denormal(True)

    def blocks_of() -> Blocks:
        rows = Rotation(source, config.chunk, torch.device("cpu")).source if rotated else source
        return Blocks(rows, config.chunk, torch.device("cpu"), keep_bytes=float("inf"))

    def run_als() -> Passes:
        def make() -> Als:
            blocks = blocks_of()
            return Als(blocks, thinned_start(blocks, config, keep=True), config, keep=True)

        before, solver = timed(make)
        end = before + timed(lambda: solver.run(quiet=True))[0]
        steps = solver.state.history.steps
        return [(end - (steps[-1].seconds - step.seconds), step.loss) for step in steps]

    class Pausing(Paper):
        def step(self) -> float:
            if len(passes) % PAUSE == 0:
                runs.append(run_als())
            seconds, loss = timed(super().step)
            passes.append(((passes[-1][0] if passes else before) + seconds, loss / self.blocks.nonzero))
            return loss

    def make_paper() -> Pausing:
        blocks = blocks_of()
        return Pausing(blocks, *start(blocks, COMPONENTS, seed), config)

    passes: Passes = []
    runs: list[Passes] = []
    before, paper = timed(make_paper)
    paper.run(quiet=True)
    return passes, runs


def seconds_to(target: float, passes: Passes) -> float:
    """When a solver first reached a loss; infinite if it never did."""
    return next((seconds for seconds, loss in passes if loss <= target), float("inf"))


def _config(seed: int, **values: Any) -> FitConfig:
    return FitConfig(components=COMPONENTS, seed=seed, **values)


def recovery() -> float:
    """Share of planted components that are found, worst of five seeds."""
    return min(_recovered(seed) for seed in range(5))


def _recovered(seed: int, factors: int = 48, each: int = 3, noise: float = 0.02, m: int = 1000, p: int = 512) -> float:
    generator = torch.Generator().manual_seed(seed)
    U = torch.nn.functional.normalize(torch.randn(factors, p, generator=generator), dim=1)
    which = torch.stack([torch.randperm(factors, generator=generator)[:each] for _ in range(m)])
    rows = (0.2 + torch.rand(m, each, generator=generator)).sqrt()[..., None] * U[which]
    rows = rows + noise * rows.norm(dim=2, keepdim=True) * torch.randn(rows.shape, generator=generator) / p**0.5
    fitted = Npeff(FitConfig(components=factors, seed=seed)).fit(ArrayRows(rows.reshape(-1, p), [each] * m))
    return float(((U @ fitted.components.T).abs().amax(dim=1) > 0.9).float().mean())


def pass_ratio(source: ArrayRows, repeats: int = 12) -> float:
    """A pass over rows in memory, in their full length, ÷ its two products with them; the best of several of each."""
    torch.set_flush_denormal(True)
    blocks = Blocks(source, len(source.rows), torch.device("cpu"), keep_bytes=float("inf"))
    rows = blocks.all_rows()
    solver = Als(blocks, start_components(source, COMPONENTS, "kmeans++", 0), _config(0), keep=True)
    solver.start_round(sweeps=3)
    product, combined = torch.empty(COMPONENTS, len(rows)), torch.empty_like(solver.H)

    def products() -> None:
        torch.mm(solver.H, rows.T, out=product)
        torch.mm(product, rows, out=combined)

    passes, alone = [], []
    for _ in range(repeats):
        passes.append(timed(solver.iterate)[0])
        alone.append(timed(products)[0])
    return min(passes[2:]) / min(alone[2:])


def factor_rows(examples: int = 4096, each: int = 2, factors: int = 384) -> ArrayRows:
    """Synthetic rows: each is a factor under as much noise; many examples share a factor, few all of theirs."""
    generator = torch.Generator().manual_seed(0)
    U = torch.nn.functional.normalize(torch.randn(factors, DIM, generator=generator), dim=1)
    which = (factors * torch.rand(examples, each, generator=generator).square()).long()
    rows = U[which].mul_((0.2 + torch.rand(examples, each, 1, generator=generator)).sqrt())
    rows = rows.add_(torch.randn(rows.shape, generator=generator), alpha=0.7 / DIM**0.5)
    return ArrayRows(rows.view(-1, DIM), [each] * examples)


def coarse_ratio(source: RowSource, components: int) -> tuple[float, float]:
    """Time of a fit that begins with short rows ÷ one that does not, and their losses; from the start to the end.

    Processor time: the two take minutes, in which a shared machine may be more or less busy.
    """
    config = FitConfig(components=components)

    def fit() -> tuple[float, float]:
        begin = time.process_time()
        fitted = Npeff(config).fit(source)
        return time.process_time() - begin, fitted.history.loss

    seconds, loss = fit()
    with mock.patch.object(ShortRows, "pays", return_value=False):
        plain_seconds, plain_loss = fit()
    return seconds / plain_seconds, loss / plain_loss


def fit_ratio(source: ArrayRows, collecting: float) -> float:
    """Coefficients of new examples ÷ collecting as many."""
    fitted = Npeff(_config(0, max_passes=10)).fit(source)
    return min(timed(lambda: fitted.transform(source))[0] for _ in range(3)) / collecting


# A 10 GB run whose shards are one file under many names: the reader cannot tell, the disk is spared.
SHARD_EXAMPLES, DIM = 1024, 16_384

WORKER = """
import json, resource, sys
from npeff.decompose import FitConfig, Npeff
from npeff.store.schema import Manifest
from npeff.store.run import Run
fitted = Npeff(FitConfig(components=256, max_passes=2, tolerance=0)).fit(Run.open(sys.argv[1]).source("fisher"))
print(json.dumps([fitted.history.loss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def peak_gb(folder: Path) -> float:
    """Peak memory of a process that decomposes 10 GB of half-precision rows into 256 components."""
    run = synthetic_run(folder / "large", int(STORE_BYTES / (2 * DIM)))
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(run.path)], capture_output=True, text=True, check=True, env=os.environ
    )
    return float(json.loads(done.stdout)[1]) / 1e9


def synthetic_run(path: Path, examples: int) -> Run:
    """A finished run of random rows, one per example."""
    examples -= examples % SHARD_EXAMPLES
    inputs = pa.table({"source_row": pa.array(range(examples)), "text": pa.array([""] * examples)})
    manifest = Manifest({"collected": ["fisher"]}, SHARD_EXAMPLES)
    run = Run.create(path, manifest, inputs)
    first: Shard | None = None
    for shard in run.shards:
        if first is None:
            first = shard
            rows = torch.randn(SHARD_EXAMPLES, DIM, generator=torch.Generator().manual_seed(0))
            run.write_shard(shard, {"rows": torch.nn.functional.normalize(rows, dim=1).half()})
            continue
        os.link(path / first.file, path / shard.file)
        (path / shard.record).write_text((path / first.record).read_text(encoding="utf-8"), encoding="utf-8")
    table = inputs.append_column("rank", pa.array(np.ones(examples, dtype=np.int64)))
    run.finish(table.append_column("set_aside", pa.nulls(examples, pa.string())))
    return Run.open(path)
