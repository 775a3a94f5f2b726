"""Numbers that cannot go wrong without anybody noticing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npeff.cli import COMMANDS
from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.decompose.config import FitConfig
from npeff.decompose.methods import create
from npeff.decompose.run import open_decomposition
from npeff.models.config import ModelConfig
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, write_json
from tests import tiny
from tests.faults.fuzzing import run_command

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scaled_model(folder: Path, factor: float, certainty: float = 1.0) -> Path:
    """A model that computes the same function, with gradients of its residual weights 1 / `factor` times as long.

    What is written to the residual stream is scaled, and every norm takes the scale away again. `certainty` multiplies
    the logits.
    """
    network: Any = tiny.network("llama")
    network.config.rms_norm_eps = 1e-38
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if any(part in name for part in ("embed_tokens", "o_proj", "down_proj")):
                parameter.mul_(factor)
        network.lm_head.weight.mul_(certainty)
    network.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def collect_scaled(tmp_path: Path, reviews: Path, power: int, certainty: float = 1.0) -> Run:
    model = scaled_model(tmp_path / f"model {power} {certainty}", 2.0**power, certainty)
    return collect(
        CollectConfig(
            run=str(tmp_path / f"run {power} {certainty}"),
            data=DataConfig(task="sst2", data=str(reviews / "sst2.jsonl"), limit=12),
            model=ModelConfig(str(model), include=("*.o_proj.weight", "*.down_proj.weight"), device="cpu"),
            sketch=SketchConfig(dim=128),
        )
    )


def test_very_long_and_very_short_gradients_are_stored_in_half_precision(tmp_path: Path, reviews: Path) -> None:
    """Lengths from 2⁻⁴⁰ to 2⁴⁰ times the usual one, as far as float32 carries the backward pass: the same rows."""
    usual = collect_scaled(tmp_path, reviews, 0)
    norms = torch.tensor(usual.table["pef_norm"].to_pylist(), dtype=torch.float64)
    for power in (-40, -20, 20, 40):
        other = collect_scaled(tmp_path, reviews, power)
        assert other.table["set_aside"].null_count == 12
        for kind in ("fisher", "gradient"):
            torch.testing.assert_close(
                other.source(kind).read(0, 12), usual.source(kind).read(0, 12), rtol=0, atol=2e-3
            )
        found = torch.tensor(other.table["pef_norm"].to_pylist(), dtype=torch.float64)
        torch.testing.assert_close(found * 2.0 ** (2 * power), norms, rtol=1e-3, atol=0)


def test_predictions_without_doubt_have_rows_like_others(tmp_path: Path, reviews: Path) -> None:
    """With p near 1 the Fisher is tiny, and products of its rows leave float32 long before the rows do."""
    usual = collect_scaled(tmp_path, reviews, 0).source("fisher").read(0, 12)
    smallest = 1.0
    for certainty in (8.0, 32.0, 64.0, 128.0):
        run = collect_scaled(tmp_path, reviews, 0, certainty)
        rows = run.source("fisher").read(0, 12)
        for row, expected, norm in zip(rows, usual, run.table["pef_norm"].to_pylist(), strict=True):
            if norm > 0:
                torch.testing.assert_close(row, expected, rtol=0, atol=2e-3)
                smallest = min(smallest, norm)
            else:
                assert not row.any(), "a Fisher that is zero to float32 has rows that are zero"
    assert smallest < 1e-36


def test_gradients_beyond_float32_are_set_aside_by_name(
    tmp_path: Path, reviews: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = collect_scaled(tmp_path, reviews, -66)
    aside = run.table["set_aside"].to_pylist()
    assert aside.count("a value was not finite") >= 1
    assert "Set aside, because a value was not finite: example" in capsys.readouterr().out
    assert run.source("fisher").read(0, 12).isfinite().all()


def test_the_number_of_threads_changes_nothing_but_rounding(
    tmp_path: Path, reviews: Path, model_directory: Path
) -> None:
    runs, losses = [], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        config = CollectConfig(
            run=str(tmp_path / f"run{threads}"),
            data=DataConfig(task="sst2", data=str(reviews / "sst2.jsonl")),
            model=ModelConfig(str(model_directory), device="cpu"),
            sketch=SketchConfig(dim=256),
            storage="float32",
        )
        runs.append(collect(config))
        fitted = create(FitConfig(components=5, tolerance=1e-7, device="cpu")).fit(runs[0].source("fisher"))
        losses.append(float(fitted.residuals.double().mean()))
    for kind in ("fisher", "gradient", "activation"):
        torch.testing.assert_close(
            runs[0].source(kind).read(0, 48), runs[1].source(kind).read(0, 48), rtol=0, atol=1e-5
        )
    assert abs(losses[0] - losses[1]) < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(collected: Path, tmp_path: Path, value: float) -> None:
    from npeff.store.rows import ArrayRows

    rows = Run.open(collected).source("fisher").read(0, 48).clone()
    rows[7, 3] = value
    for method in ("npeff", "clusters", "sae", "svd-gradients"):
        with pytest.raises(UserError, match="Example 7 has entries that are not finite"):
            create(FitConfig(method=method, components=3, device="cpu")).fit(ArrayRows(rows))  # type: ignore[arg-type]


# --- what older versions have written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [True, False])
def test_a_run_of_format_1_reads(tmp_path: Path, sealed: bool) -> None:
    """Kept in the repository, so that later versions are tested with it; the first ones wrote no seals."""
    path = tmp_path / "run"
    shutil.copytree(DATA / "run-format-1", path)
    if not sealed:
        for file in path.rglob("*.json"):
            write_json(file, read_object(file))
            assert "seal" not in json.loads(file.read_text())
    run = Run.open(path)
    assert run.manifest.format == 1
    assert run.table["text"].to_pylist()[:2] == ["text 0", "text 1"]
    assert run.source("fisher").read(0, 12).shape == (11, 16)
    decomposition = open_decomposition(run, "npeff")
    assert decomposition.components.shape == (2, 16)
    coefficients, residuals = decomposition.explain(run.source("fisher"))
    torch.testing.assert_close(coefficients, decomposition.coefficients, atol=1e-3, rtol=1e-3)
    assert abs(float(residuals.mean()) - float(decomposition.residuals.mean())) < 1e-4
    # later versions start fits in another way: a new one is at least as good as that of then
    again = create(decomposition.config).fit(run.source("fisher"))
    assert float(again.residuals.mean()) < float(decomposition.residuals.mean()) + 1e-4
    assert run_command(["verify", str(path), "--no-repair"])[0] == 0


@pytest.mark.parametrize(
    ("version", "word"), [(2, "newer npeff"), (10**6, "newer npeff"), (0, "damaged"), ("1", "damaged")]
)
def test_other_formats_say_why_not(tmp_path: Path, version: object, word: str) -> None:
    path = tmp_path / "run"
    shutil.copytree(DATA / "run-format-1", path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": version}))
    with pytest.raises(UserError, match=word):
        Run.open(path)


def test_every_seed_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    options = set()

    def find(kind: Any) -> None:
        for field in dataclasses.fields(kind):
            hint = typing.get_type_hints(kind)[field.name]
            if dataclasses.is_dataclass(hint):
                find(hint)
            elif field.name.endswith(("seed", "seeds")):
                options.add("--" + field.name.replace("_", "-"))

    for command in COMMANDS.values():
        kind = command.load_config()
        if dataclasses.is_dataclass(kind):
            find(kind)
    assert len(options) >= 5
    for option in options:
        assert f"`{option}`" in text, option
