from __future__ import annotations

import json
from pathlib import Path

import pytest

from npeff.cli import main
from npeff.explore.themes import Themes
from npeff.store.run import Run

HOSTILE = "<script>alert(1)</script> | [link](http://x) `code` **bold** \u202eRTL \x1b[31m &amp; @someone #1"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, model_directory: Path, review_file: Path) -> Path:
    """A run with two decompositions, one of them labelled; one of its texts is hostile."""
    folder = tmp_path_factory.mktemp("shared")
    data = folder / "reviews.jsonl"
    lines = review_file.read_text(encoding="utf-8").splitlines()
    lines[0] = json.dumps({"text": HOSTILE, "label": "negative"})
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = folder / "run"
    options = ["--task", "sst2", "--data", str(data), "--model", str(model_directory), "--dim", "256"]
    assert main(["collect", str(run), *options, "--storage", "float32", "--shard-examples", "16"]) == 0
    for method in ("npeff", "clusters"):
        assert main(["decompose", str(run), "--components", "3", "--method", method, "--decomposition", method]) == 0
    Themes(Run.open(run), "npeff").add(1, f"jokes {HOSTILE}", who="me")
    return run
