"""`npeff spectra`: how fast the eigenvalues of per-example Fishers fall, and how many directions keep how much."""

from collections.abc import Iterator

import numpy as np
import torch
from tqdm import tqdm

from npeff.analyse.config import SpectraConfig
from npeff.store.layout import SPECTRA
from npeff.store.rows import RowSource
from npeff.store.run import Run
from npeff.utils import Array, Record, UserError, __version__
from npeff.utils.report import Axes, Column, Table, write_result

_EXAMPLES = 256


class Spectra(Record):
    """Mean eigenvalues of a run's per-example Fishers (spectra.json); k is the largest rank."""

    npeff: str
    """Version that wrote it."""
    run: str
    """Fingerprint of the run."""
    examples: int
    """Examples that have a Fisher."""
    decay: list[float]
    """Each eigenvalue as a share of the trace, largest first, mean over examples, [k]."""
    kept_trace: list[float]
    """Share of the trace in the first 1 to k directions, mean over examples, [k]."""
    kept_norm: list[float]
    """Share of the Frobenius norm in the first 1 to k directions, mean over examples, [k]."""


def spectra(config: SpectraConfig) -> Spectra:
    """Measure the eigenvalues of a run's Fishers, and write a table and a figure.

    Args:
        config: The run.

    Returns:
        What spectra.json holds.

    Raises:
        UserError: No example has a Fisher.
    """
    run = Run.open(config.run)
    source = run.source("fisher")
    total = int((source.ranks > 0).sum())
    if not total:
        raise UserError(f"{run.path} has no example with a Fisher.")
    values = np.zeros((total, int(source.ranks.max())))
    bar = tqdm(eigenvalues(source), total=total, desc="Spectra", unit="ex", disable=None)
    for row, of_one in zip(values, bar, strict=True):
        row[: len(of_one)] = of_one
    result = Spectra(__version__, run.fingerprint, total, *mean_shares(values))
    directory = run.path / SPECTRA
    write_result(directory / "spectra", result, [table(result)], _draw)
    enough = next((k for k, share in enumerate(result.kept_norm, 1) if share >= 0.99), len(result.kept_norm))
    print(f"{total} Fishers: {enough} of {len(result.kept_norm)} directions keep 99% of the norm on average.")
    print(f"in {directory}")
    return result


def eigenvalues(source: RowSource) -> Iterator[Array]:
    """Eigenvalues of GᵀG of every example that has rows.

    Args:
        source: Rows G of the examples.

    Yields:
        Eigenvalues of one example, largest first, divided by their sum, [rank].
    """
    ranks = source.ranks
    for start in range(0, len(ranks), _EXAMPLES):
        counts = ranks[start : start + _EXAMPLES]
        rows = source.read(start, start + len(counts)).double()
        for part in torch.split(rows, counts[counts > 0].tolist()):
            values = torch.linalg.eigvalsh(part @ part.T).flip(0).clamp(min=0)
            yield (values / values.sum().clamp(min=1e-300)).numpy()


def mean_shares(values: Array) -> tuple[list[float], list[float], list[float]]:
    """Means over examples of eigenvalues, of the trace and of the norm that the leading directions keep.

    Args:
        values: Eigenvalues of each example, largest first, that add up to 1, [n, k].

    Returns:
        Mean eigenvalues, and the shares of trace and Frobenius norm in the first 1 to k directions, [k] each.
    """
    squares = np.cumsum(values**2, axis=1)
    norms = np.sqrt(squares / np.maximum(squares[:, -1:], 1e-300))
    decay, kept_trace, kept_norm = (part.mean(axis=0).tolist() for part in (values, np.cumsum(values, axis=1), norms))
    return decay, kept_trace, kept_norm


def table(result: Spectra) -> Table:
    """The means as a table.

    Args:
        result: What was measured.

    Returns:
        A line per number of directions.
    """
    columns = [Column("directions"), Column("eigenvalue", ".3%", "eigenvalue, of the trace")]
    columns += [Column("kept_trace", ".1%", "trace kept"), Column("kept_norm", ".1%", "Frobenius norm kept")]
    shares = zip(result.decay, result.kept_trace, result.kept_norm, strict=True)
    caption = f"Eigenvalues of {result.examples} per-example Fishers, largest first; means over examples"
    return Table(caption, columns, [[k, *values] for k, values in enumerate(shares, 1)])


def _draw(axes: Axes, result: Spectra) -> None:
    places = range(1, len(result.decay) + 1)
    axes.semilogy(places, np.maximum(result.decay, 1e-12), marker="o", markersize=3, color="#4c78a8")
    axes.set(xlabel="eigenvalue", ylabel="mean share of the trace", title=f"{result.examples} per-example Fishers")
