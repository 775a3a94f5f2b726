from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npeff.cli import main
from npeff.explore.themes import Themes
from npeff.share.config import PullConfig, PushConfig
from npeff.share.hub import INDEX
from npeff.share.run import pull, push
from npeff.store.run import Run
from npeff.utils.errors import UserError

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


@pytest.fixture(scope="session")
def shared(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, pushed to a folder without its rows."""
    folder = tmp_path_factory.mktemp("place") / "shared"
    push(PushConfig(str(made), str(folder)))
    return folder


@pytest.fixture
def copied(shared: Path, tmp_path: Path) -> Path:
    """A copy of what was shared, to be tampered with."""
    return Path(shutil.copytree(shared, tmp_path / "copied"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def edit_index(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((place / INDEX).read_text())
    change(values)
    (place / INDEX).write_text(json.dumps(values))


def refused(place: Path, target: Path, message: str, **options: str) -> None:
    """A pull must fail with this message and make nothing."""
    with pytest.raises(UserError, match=message):
        pull(PullConfig(str(place), str(target), **options))
    assert not target.exists()
