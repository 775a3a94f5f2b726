"""`npeff reproduce`: recipes run end to end with a tiny model, and tables of measured numbers beside the paper's."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from npeff import cli
from npeff.decompose.run import open_decomposition
from npeff.paper import costs, measures
from npeff.paper import reproduce as command
from npeff.paper.config import ReproduceConfig
from npeff.paper.recipe import Cell, Listing, Missing, Reproduction, Settings, load_recipe, parse_recipe
from npeff.paper.reproduce import reproduce
from npeff.store.layout import decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import read_record, replace
from npeff.utils.errors import UserError
from npeff.utils.files import read_json
from tests import tiny


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with labelled texts under the name of a task."""
    folder = tmp_path_factory.mktemp("data")
    random, words = np.random.default_rng(0), " ".join(tiny.TEXTS).split()
    with (folder / "sst2.csv").open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["text", "label"])
        for number in range(190):
            chosen = random.choice(words, random.integers(3, 9))
            writer.writerow([f"{number} {' '.join(chosen)}", ["negative", "positive"][number % 2]])
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all recipes of this module work, so that they share their collection."""
    return tmp_path_factory.mktemp("out")


def run_recipe(
    table: str, data: Path, out: Path, model: Path, tasks: tuple[str, ...] = ("sst2",), examples: int = 96
) -> Path:
    directory = reproduce(
        ReproduceConfig(
            table,
            scale=0.001,
            examples=(f"sst2={examples}",),
            tasks=tasks,
            data=str(data),
            out=str(out),
            model=str(model),
        )
    )
    assert directory is not None
    return directory


def test_component_counts(data: Path, out: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_recipe("component-count", data, out, model_directory)
    found = read_json(directory / "table.json")
    cells = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
    assert {row for row, _ in cells} == {"32", "256"}, "other counts are the same at this scale"
    assert {gap["what"] for gap in found["missing"]} == {f"sst2, components {n}" for n in (64, 512, 1024, 2048)}
    cell = cells["256", "SST2 Recon-In"]
    assert cell["paper"] == 0.43
    assert 0 < cell["measured"] < cells["256", "SST2 Recon-Out"]["measured"] < 1
    pair = found["settings"][cell["settings"]]
    assert (pair["paper"]["components"], pair["here"]["components"]) == (256, 6)
    assert (pair["paper"]["examples"], pair["here"]["examples"]) == (60_000, 96)
    text = (directory / "table.md").read_text(encoding="utf-8")
    assert "(0.43) |" in text
    assert "96 (60000) | 6 (256)" in text
    assert "CLINC150 Recon-In" not in text, "only sst2 was asked for"
    assert directory.name == "scale-0.001_sst2=96_sst2"
    assert text in capsys.readouterr().out
    rows = list(csv.DictReader((directory / "table.csv").open(encoding="utf-8")))
    assert len(rows) == 8
    assert rows[0]["paper_examples"] == "60000"
    assert (directory / "table.png").is_file()
    assert (directory / "table.svg").is_file()


def test_splits_and_what_is_done_is_not_done_again(data: Path, out: Path, model_directory: Path) -> None:
    directory = run_recipe("splits-sst2", data, out, model_directory)
    found = read_json(directory / "table.json")
    (run,) = (Run.open(path) for path in (out / "runs").iterdir())
    assert all(open_decomposition(run, name).notes.made_for == "reproduce" for name in decomposition_names(run.path))
    times = {path: path.stat().st_mtime_ns for path in run.path.rglob("*.safetensors")}
    run_recipe("splits-sst2", data, out, model_directory)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*.safetensors")} == times
    assert read_json(directory / "table.json") == found
    measured = [cell for cell in found["cells"] if cell["row"] != "mean"]
    assert [cell["row"] for cell in measured] == ["32 → 128", "32 → 256", "128 → 256"]
    assert [cell["paper"] for cell in measured] == [89.0, 85.6, 86.9]
    assert [pair["here"]["components"] for pair in found["settings"]] == ["4 → 5", "4 → 6", "5 → 6", "all"]


def test_texts_instead_of_numbers(data: Path, out: Path, model_directory: Path) -> None:
    directory = run_recipe("top-examples", data, out, model_directory)
    found = read_json(directory / "table.json")
    assert found["cells"] == []
    assert len(found["listings"]) == 4
    assert all(len(listing["lines"]) == 4 for listing in found["listings"])
    assert found["settings"][0]["here"]["examples"] == 96
    assert not (directory / "table.png").exists()


def test_perturbations_in_sample_and_held_out(
    data: Path, tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_recipe("perturbations")
    few = replace(whole, steps=tuple(replace(step, methods=("npeff", "clusters")) for step in whole.steps))
    monkeypatch.setattr(command, "load_recipe", lambda _: few)
    monkeypatch.setattr(measures, "FEWEST_PERTURBED", 2)
    directory = run_recipe("perturbations", data, tmp_path / "out", model_directory, examples=180)
    found = read_json(directory / "table.json")
    cells = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
    assert cells["NPEFF", "SST2 KL in-sample"]["paper"] == 16.5
    assert cells["NPEFF", "SST2 KL held-out"]["paper"] is None
    low, mean, high = (cells["NPEFF", f"SST2 {name} held-out"]["measured"] for name in ("low", "KL", "high"))
    assert low <= mean <= high
    for sample, holdout in (("in-sample", 0), ("held-out", 0.3)):
        assert cells["NPEFF", f"SST2 random groups {sample}"]["measured"] > 0
        settings = found["settings"][cells["NPEFF", f"SST2 KL {sample}"]["settings"]]
        assert settings["here"]["holdout"] == holdout
    (run,) = (Run.open(path) for path in (tmp_path / "out" / "runs").iterdir())
    kept = [open_decomposition(run, name).notes.held_out for name in decomposition_names(run.path)]
    assert {len(held_out) for held_out in kept} == {0, 54}
    assert all(held_out == max(kept, key=len) for held_out in kept if held_out), "every method has the same split"


def test_tests_of_lnp(data: Path, out: Path, model_directory: Path) -> None:
    found = read_json(run_recipe("tunings", data, out, model_directory) / "table.json")
    tested = {cell["row"] for cell in found["cells"] if cell["column"] == "SST2 LnP p"}
    assert tested == {"G-NPEFF", "GC", "SAE", "SVD-G", "SVD-A"}


def test_costs_are_measured_once(data: Path, out: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_recipe("collection-time", data, out, model_directory)
    found = read_json(directory / "table.json")
    assert [cell["row"] for cell in found["cells"]] == ["PEF", "Gradient", "Activation"]
    assert all(cell["measured"] > 0 for cell in found["cells"])
    monkeypatch.setattr(costs, "estimate", None)
    run_recipe("collection-time", data, out, model_directory)
    assert read_json(directory / "table.json") == found


def test_people_are_needed_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(ReproduceConfig("human-evaluation", out=str(tmp_path / "out"))) is None
    said = capsys.readouterr().out
    assert "Needs people" in said
    assert "(78)" in said
    assert not (tmp_path / "out").exists()


def test_all_recipes_one_after_another(
    data: Path, tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["top-examples-sst2", "splits-sst2", "human-evaluation", "top-examples-yat"]
    monkeypatch.setattr(command, "recipe_names", lambda: few)
    page = run_recipe("all", data, tmp_path / "out", model_directory)
    links = re.findall(r"\]\((.*)\)", page.read_text(encoding="utf-8"))
    assert [link.split("/")[0] for link in links] == few[:2], "without people, and without other tasks"
    assert all((page.parent / link).is_file() for link in links)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(ReproduceConfig()) is None
    whole = capsys.readouterr().out
    assert "tunings-gpt2  (tab:appendix_gpt2_tunings)" in whole
    assert "openai-community/gpt2-medium" in whole
    assert "needs people" in whole
    assert "What --scale does:" in whole


def test_mistakes_are_told(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no yat\.jsonl"):
        reproduce(ReproduceConfig("tunings", scale=0.01, data=str(data), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists(), "told before any work"
    with pytest.raises(UserError, match="is not a folder"):
        reproduce(ReproduceConfig("tunings", data=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="has none of these tasks; it has sst2"):
        reproduce(ReproduceConfig("icl", tasks=("yat",)))
    for options in ({"scale": 0}, {"scale": 2}, {"examples": ("sst2",)}, {"examples": ("imdb=3",)}):
        with pytest.raises(UserError):
            ReproduceConfig("tunings", **options)  # type: ignore[arg-type]


def test_the_command_line() -> None:
    arguments = ["tunings", "--scale", "0.05", "--examples", "sst2=4000", "yat=1000", "--data", "folder"]
    config = cli.parse("reproduce", arguments)
    assert config == ReproduceConfig("tunings", scale=0.05, examples=("sst2=4000", "yat=1000"), data="folder")
    assert cli.parse("reproduce", []).table == "list"
    with pytest.raises(UserError, match="--list is gone: `npeff reproduce list`"):
        cli.parse("reproduce", ["--list"])


RECIPE = parse_recipe(
    "x",
    {"label": "tab:x", "title": "X", "rows": ["a"], "columns": ["b", "c"], "numbers": {"a": [78, 0.25]}},
)


def reproduction(tasks: tuple[str, ...] = ()) -> Reproduction:
    here, paper = ({**dict.fromkeys(command.SETTINGS, side), "tau": 1, "joint_rate": 1} for side in ("here", "paper"))
    return Reproduction(
        "x",
        "tab:x",
        "X",
        "0",
        {"tasks": list(tasks)},
        cells=[Cell("a", "b", 78, 1234.5, 0), Cell("more", "b", None, 12.345, 1)],
        settings=[Settings(paper, here), Settings(paper, here | {"tau": 0.5, "joint_rate": 2})],
        missing=[Missing("that", "this")],
        listings=[Listing("Texts", ("one | two", "*three*\nfour"))],
    )


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (78, "78"), (78.0, "78.0"), (1234.5, "1,234"), (0.1234, "0.123"), (0, "0")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert command.number(value) == text


def test_measured_numbers_beside_the_paper_s() -> None:
    assert command.comparison(RECIPE, reproduction().cells).markdown().splitlines() == [
        "| | b | c |",
        "| --- | --- | --- |",
        "| a | 1,234 (78) | - (0.25) |",
        "| more | 12.3 | - |",
    ]
    assert "| c |" not in command.comparison(RECIPE, reproduction().cells, only_measured=True).markdown()


def test_files(tmp_path: Path) -> None:
    command.write(tmp_path, RECIPE, reproduction())
    assert read_record(Reproduction, tmp_path / "table.json") == reproduction()
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "- that: this" in text
    assert "0.5 (1)" in text, "a setting that differs is shown"
    assert "joint_rate" not in text.replace("\\", "")
    assert r"| one \| two |" in text
    assert r"| \*three\* four |" in text
    assert (tmp_path / "table.tex").read_text(encoding="utf-8").count(r"\begin{tabular}") == 3
    rows = list(csv.DictReader((tmp_path / "table.csv").open(encoding="utf-8")))
    assert [(row["row"], row["measured"], row["here_task"]) for row in rows] == [
        ("a", "1234.5", "here"),
        ("more", "12.345", "here"),
    ]
