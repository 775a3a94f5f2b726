"""`npeff spectra`: how fast the eigenvalues of per-example Fishers fall, and how many directions keep how much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from npeff.analyse.config import SpectraConfig
from npeff.store.layout import SPECTRA
from npeff.store.rows import RowSource
from npeff.store.run import Run
from npeff.utils.errors import UserError
from npeff.utils.files import write_csv, write_json
from npeff.utils.report import draw_figure, plain_axes
from npeff.utils.tables import write_tables
from npeff.utils.types import Array
from npeff.utils.version import __version__

_EXAMPLES = 256


def spectra(config: SpectraConfig) -> Path:
    """Write the table and the figure; returns their directory."""
    run = Run.open(config.run)
    source = run.source("fisher")
    total = int((source.ranks > 0).sum())
    if not total:
        raise UserError(f"{run.path} has no example with a Fisher.")
    bar = tqdm(eigenvalues(source), total=total, desc="Spectra", unit="ex")
    found = summarise(np.stack([_padded(values, int(source.ranks.max())) for values in bar]))
    directory = run.path / SPECTRA
    _write(directory, {"npeff": __version__, "run": run.fingerprint, "examples": total, **found})
    enough = next((k for k, share in enumerate(found["kept_norm"], 1) if share >= 0.99), len(found["kept_norm"]))
    print(f"{total} Fishers: {enough} of {len(found['kept_norm'])} directions keep 99% of the norm on average.")
    print(f"in {directory}")
    return directory


def eigenvalues(source: RowSource) -> Iterator[Array]:
    """Eigenvalues of GᵀG of every example that has rows, largest first, divided by their sum; [rank] each."""
    ranks = source.ranks
    for start in range(0, len(ranks), _EXAMPLES):
        counts = ranks[start : start + _EXAMPLES]
        rows = source.read(start, start + len(counts)).double()
        for part in torch.split(rows, counts[counts > 0].tolist()):
            values = torch.linalg.eigvalsh(part @ part.T).flip(0).clamp(min=0)
            yield (values / values.sum().clamp(min=1e-300)).numpy()


def _padded(values: Array, length: int) -> Array:
    return np.pad(values, (0, length - len(values)))


def summarise(values: Array) -> dict[str, Any]:
    """Means over examples of `values` [n, k], eigenvalues that add up to 1, for 1 to k directions kept.

    `kept_trace` is the share of the trace in the leading directions, `kept_norm` that of the Frobenius norm.
    """
    squares = np.cumsum(values**2, axis=1)
    norms = np.sqrt(squares / np.maximum(squares[:, -1:], 1e-300))
    return {
        "decay": values.mean(axis=0).tolist(),
        "kept_trace": np.cumsum(values, axis=1).mean(axis=0).tolist(),
        "kept_norm": norms.mean(axis=0).tolist(),
    }


def _write(directory: Path, found: dict[str, Any]) -> None:
    columns = (found["decay"], found["kept_trace"], found["kept_norm"])
    rows = [[k, *values] for k, values in enumerate(zip(*columns, strict=True), 1)]
    write_csv(directory / "spectra.csv", [["directions", "eigenvalue", "kept_trace", "kept_norm"], *rows])
    write_tables(directory / "spectra", markdown(found))
    draw_figure(directory / "spectra", _draw, found)
    write_json(directory / "spectra.json", found)


def markdown(found: dict[str, Any]) -> str:
    """The table: shares in percent, means over examples."""
    lines = [
        f"Eigenvalues of {found['examples']} per-example Fishers, largest first; means in %",
        "",
        "| directions | eigenvalue, of the trace | trace kept | Frobenius norm kept |",
        "|---|---|---|---|",
    ]
    for k, values in enumerate(zip(found["decay"], found["kept_trace"], found["kept_norm"], strict=True), 1):
        eigenvalue, trace, norm = (100 * value for value in values)
        lines.append(f"| {k} | {eigenvalue:.3g} | {trace:.1f} | {norm:.1f} |")
    return "\n".join(lines) + "\n"


def _draw(axes: Any, found: dict[str, Any]) -> None:
    places = range(1, len(found["decay"]) + 1)
    axes.semilogy(places, np.maximum(found["decay"], 1e-12), marker="o", markersize=3, color="#4c78a8")
    axes.set(xlabel="eigenvalue", ylabel="mean share of the trace", title=f"{found['examples']} per-example Fishers")
    plain_axes(axes)
