"""Spectra against dense eigenvalues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npeff.analyse import spectra as module
from npeff.analyse.config import SpectraConfig
from npeff.analyse.spectra import Spectra, eigenvalues, mean_shares, spectra
from npeff.store.rows import ArrayRows
from npeff.utils.configs import read_record
from tests.synthetic import make_run


def test_eigenvalues_equal_those_of_the_dense_fishers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EXAMPLES", 2)
    ranks = [2, 0, 3, 1, 0]
    G = torch.randn(6, 7)
    found = list(eigenvalues(ArrayRows(G, ranks)))
    start = 0
    for rank, values in zip([2, 3, 1], found, strict=True):
        F = G[start : start + rank].T @ G[start : start + rank]
        plain = np.linalg.eigvalsh(F.double().numpy())[::-1][:rank]
        assert values == pytest.approx(plain / plain.sum(), abs=1e-6)
        start += rank


def test_shares_kept_by_hand() -> None:
    decay, kept_trace, kept_norm = mean_shares(np.array([[0.75, 0.25], [1.0, 0.0]]))
    assert decay == pytest.approx([0.875, 0.125])
    assert kept_trace == pytest.approx([0.875, 1])
    assert kept_norm == pytest.approx([(0.75 / np.sqrt(0.625) + 1) / 2, 1])


def test_the_command(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(30)], aside=[2])
    found, directory = spectra(SpectraConfig(str(run.path))), run.path / "spectra"
    assert read_record(Spectra, directory / "spectra.json") == found
    assert found.examples == 29
    assert found.kept_norm == pytest.approx([1.0])  # rank one
    assert {file.name for file in directory.iterdir()} == {
        f"spectra.{kind}" for kind in ("json", "csv", "md", "tex", "png", "svg")
    }
    assert "| 1 | 100.000% | 100.0% | 100.0% |" in (directory / "spectra.md").read_text()
