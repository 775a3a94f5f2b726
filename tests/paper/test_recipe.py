"""Recipes: all load, all steps are known, and the paper's numbers are those that its tables print."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from npeff.collect.config import SketchConfig
from npeff.decompose.config import METHODS
from npeff.paper.measures import MEASURES
from npeff.paper.recipe import Setup, Step, load_recipe, parse_recipe, recipe_names
from npeff.tasks.task import load_task
from npeff.utils.errors import UserError

FIGURES = (
    "main_comp_top_examples",
    "eigenvalue_decay",
    "yat_humeval_prompt",
    "triviaqa_humeval_prompt",
    "llm_eval_prompts",
    "sst2_appendix_top_examples",
    "yat_appendix_top_examples",
    "clinc_appendix_top_examples",
    "triviaqa_appendix_top_examples",
)


def printed_tables() -> dict[str, list[list[str]]]:
    """Label → rows → cells, from the bodies of the paper's tables as they stand in its source."""
    text = (Path(__file__).parent / "paper_tables.txt").read_text(encoding="utf-8")
    tables = {}
    for part in text.split("== ")[1:]:
        label, _, body = part.partition("\n")
        rows = [row for row in re.split(r"\\\\(?:\[1mm\])?\n", body.strip() + "\n") if row.strip()]
        tables[label.strip()] = [[cell.strip() for cell in row.split("&")] for row in rows]
    return tables


def numbers(cells: list[str]) -> list[float]:
    """All numbers in some cells, in order; emphasis, thousands and percent signs do not matter."""
    text = " ".join(cells).replace(r"\textsc{e}", "e")
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return [float(found) for found in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def test_every_recipe_is_well_formed() -> None:
    names = recipe_names()
    assert len(set(names)) == len(names)
    for name in names:
        recipe = load_recipe(name)
        assert recipe.title
        assert bool(recipe.people) != bool(recipe.steps), name
        for setup in recipe.setups.values():
            assert load_task(setup.task).name == setup.task
            SketchConfig(setup.sketch, setup.dim)
        for step in recipe.steps:
            inspect.signature(MEASURES[step.do]).bind(None, step, **step.options)
            assert set(step.methods) <= set(METHODS)
        assert {step.setup for step in recipe.steps} == set(recipe.setups), name
        used = [value for row in recipe.numbers.values() for value in row]
        assert all(value is None or isinstance(value, int | float) for value in used), name


def test_every_table_and_figure_has_a_recipe() -> None:
    labels = {load_recipe(name).label for name in recipe_names()}
    assert set(printed_tables()) <= labels
    assert {f"fig:{name}" for name in FIGURES} <= labels


@pytest.mark.parametrize("label", sorted(printed_tables()))
def test_numbers_are_those_of_the_paper(label: str) -> None:
    recipe = load_recipe(label)
    seen = set()
    for cells in printed_tables()[label]:
        if re.search("_20_|_1040_", label):  # case studies: coefficient and text, or a text alone, which has zero
            row, values = cells[-1], numbers(cells[:-1]) or [0.0]
        elif "full_breakdown" in label:
            row, values = f"{cells[0]} → {cells[1]}", numbers(cells[2:])
        else:
            row, values = cells[0].replace("SVG", "SVD"), numbers(cells[1:])
            row = "0" if row == "none" else row
        own = [value for value in recipe.numbers[row] if value is not None]
        if label == "tab:icl_results":  # the model's own accuracies are in the text
            own = own[:6]
        assert own == values, row
        seen.add(row)
    assert seen | {"mean"} >= set(recipe.rows)


def test_settings_are_those_of_the_paper() -> None:
    setups = load_recipe("tunings").setups
    shared = {"model": "HuggingFaceTB/SmolLM2-360M", "sketch": "sparse", "frozen_rate": 1e-5, "joint_rate": 3e-4}
    assert setups == {
        "sst2": Setup(task="sst2", examples=60_000, directions="exact", dim=16_192, components=512, **shared),
        "yat": Setup(task="yat", examples=100_000, directions="exact", dim=16_192, components=2048, **shared),
        "clinc150": Setup(
            task="clinc150", examples=23_700, directions="projection:8", rank=4, dim=16_192, components=512, **shared
        ),
        "triviaqa": Setup(
            task="triviaqa", examples=133_838, directions="projection:16", rank=4, dim=8192, components=2048, **shared
        ),
    }
    assert load_recipe("tunings-gpt2").setups["yat"].frozen_rate == 1e-6


def test_mistakes_in_a_recipe_are_told() -> None:
    good = {"label": "x", "title": "x", "rows": ["a"], "columns": ["b"], "numbers": {"a": [1.0]}}
    assert parse_recipe("x", good).paper("a", "b") == 1.0
    assert parse_recipe("x", good).paper("a", "c") is None
    for change, message in (
        ({"numbers": {"a": [1.0, 2.0]}}, "do not fit"),
        ({"numbers": {"c": [1.0]}}, "do not fit"),
        ({"colour": "red"}, "Unknown option colour"),
        ({"steps": [{"do": "tunings", "setup": "sst2"}]}, "not there"),
        ({"setups": {"sst2": {"task": "sst2", "size": 3}}}, "Unknown option size"),
        ({"steps": [{"do": "tunings", "setup": "sst2", "sizes": [3]}]}, "Unknown option sizes"),
    ):
        with pytest.raises(UserError, match=message):
            parse_recipe("x", good | change)
    with pytest.raises(UserError, match="There is no recipe 'nope'"):
        load_recipe("nope")


def test_names_and_labels_find_the_same_recipe() -> None:
    assert load_recipe("main_tunings") == load_recipe("tab:main_tunings") == load_recipe("tunings")
    assert load_recipe("eigenvalue_decay").name == "eigenvalue-decay"


def test_variations() -> None:
    setup = load_recipe("tunings").setups["sst2"]
    step = Step("tunings", "sst2", vary={"dim": [128, 1024], "seed": [1, 2]})
    found = step.variations(setup)
    assert [values for values, _ in found] == [{"dim": d, "seed": s} for d in (128, 1024) for s in (1, 2)]
    assert [(setup.dim, setup.seed) for _, setup in found] == [(128, 1), (128, 2), (1024, 1), (1024, 2)]
