"""The notebook runs from top to bottom, with a tiny model in place of the embedded one."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.blocks import ROOT
from tests.docs.conftest import Sandbox

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


def test_the_notebook_runs_and_draws(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NPEFF_NOTEBOOK_MODEL", str(sandbox.model))
    monkeypatch.setenv("NPEFF_NOTEBOOK_DATA", str(sandbox.directory / "data" / "sst2.jsonl"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(sandbox.directory)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert "times as much as random ones" in json.dumps(outputs)


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]
