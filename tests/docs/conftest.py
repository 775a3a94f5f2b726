from __future__ import annotations

import csv
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from npeff.cli import main
from tests import tiny
from tests.docs.blocks import ROOT, Block

EXAMPLES = 180
COMPONENTS = 20


@dataclass(frozen=True)
class Sandbox:
    """A directory with everything that the documents take for granted, at a small scale."""

    directory: Path
    model: Path
    """A tiny random model: it stands for every model that the documents name."""
    run: Path
    """A run of it: it stands for every run that the documents have not made yet."""

    def provide_run(self, name: str) -> None:
        """A fresh copy of the run, under the name that a document gives it."""
        path = self.directory / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.run, path)

    def write_files_of(self, blocks: list[Block]) -> None:
        """Files whose content a page shows."""
        for block in blocks:
            if block.file:
                # the tiny tokenizer has no single tokens for these labels
                text = block.text.replace('["Yes", "No"]', '["Positive", "Negative"]')
                (self.directory / block.file).write_text(text + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """A run with enough examples and components for the defaults of every command."""
    folder = tmp_path_factory.mktemp("documented")
    write_data(folder)
    options = ["--task", "sst2", "--data", str(folder / "data" / "sst2.jsonl"), "--model", str(model_directory)]
    assert main(["collect", str(folder / "run"), *options, "--dim", "256"]) == 0
    assert main(["decompose", str(folder / "run"), "--components", str(COMPONENTS), "--decomposition", "npeff"]) == 0
    assert main(["analyse", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def sandbox(tmp_path: Path, tiny_run: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The current directory."""
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Sandbox(tmp_path, model_directory, tiny_run)


def write_data(folder: Path) -> None:
    """Files that the documents name: texts with labels, under the columns that they say."""
    words = " ".join(tiny.TEXTS).split()
    texts = [f"{number} " + " ".join(words[(number * 7 + k * 3) % len(words)] for k in range(4 + number % 5))
             for number in range(EXAMPLES)]  # fmt: skip
    (folder / "data").mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    with (folder / "examples" / "reviews.csv").open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["body", "label"])
        writer.writerows([text, ("negative", "positive")[number % 2]] for number, text in enumerate(texts))
    _write_lines(folder / "data" / "sst2.jsonl", texts, ("negative", "positive"))
    # the tiny tokenizer has no single tokens for the labels of the task that is there
    task = (folder / "examples" / "support.yaml").read_text(encoding="utf-8")
    task = task.replace('["question", "complaint"]', '["Positive", "Negative"]')
    (folder / "examples" / "support.yaml").write_text(task, encoding="utf-8")
    _write_lines(folder / "examples" / "tickets.jsonl", texts, ("positive", "negative"))


def _write_lines(path: Path, texts: list[str], labels: tuple[str, str]) -> None:
    lines = [json.dumps({"text": text, "label": labels[number % 2]}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
