"""The card says what the run says, and nothing in it is taken for markup."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from npeff.perturb.records import Null, Results, Summary
from npeff.share.card import make_card
from npeff.share.config import PushConfig
from npeff.share.run import push
from npeff.utils.configs import write_record
from tests.share.conftest import HOSTILE
from tests.synthetic import add_decomposition, make_run


def test_the_card_says_what_was_found_and_takes_no_text_for_markup(made, shared):
    card = (shared / "README.md").read_text(encoding="utf-8")
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "npeff"
    html = MarkdownIt("gfm-like", {"linkify": False}).render(body)
    assert "<script" not in html
    assert 'href="http://x"' not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; | [link](http://x) `code` **bold**" in html  # the label, as it was
    assert "\x1b" not in card
    assert HOSTILE.split()[0] not in body
    assert "<td>40</td>" in html
    assert {"npeff", "clusters"} <= {line.split("|")[1].strip() for line in body.splitlines() if line.startswith("| ")}
    assert str(made.parent) not in card


def test_the_card_has_effects_beside_chance_and_marks_in_sample_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["a text", "another"])
    null = Null(4, 0.9, (0.7, 1.2), (0.4, 2.0))
    summaries = {
        "a": Summary(5, 42.0, 2.0, None, 1.0),  # of an earlier version
        "b": Summary(8, 8.125, 1.5, None, 1.0, "heldout", (6.25, 10.5), null, 7, 0.0123),
    }
    for name, summary in summaries.items():
        write_record(run.path / "perturbations" / name / "results.json", Results(summary), sealed=True)
    lines = make_card(run, None, rows=False).splitlines()
    at = next(number for number, line in enumerate(lines) if "KL ratio |" in line)
    head, _, held_out, in_sample = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[at : at + 4]
    )
    assert dict(zip(head, held_out, strict=True)) == {
        "perturbation": "b",
        "measured on": "held-out",
        "components": "8",
        "above chance": "7",
        "KL ratio": "8.12",
        "95% interval": "6.25 to 10.5",
        "random groups": "0.9",
        "95% of them": "0.4 to 2",
        "elsewhere": "1.23%",
        "norm ratio": "1.50",
    }
    assert in_sample[:5] == ["a", "in-sample", "5", in_sample[5], "42"]


def test_a_card_says_only_what_the_run_says(tmp_path):
    """Other software may write runs without all of our settings."""
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(20)])
    add_decomposition(run, components=2)
    push(PushConfig(str(run.path), str(tmp_path / "out")))
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| examples | 20 |" in card
    assert "sketch" not in card


@pytest.mark.parametrize(
    ("model", "named", "shown"),
    [("owner/name-1.5B", "owner/name-1.5B", "owner/name-1.5B"), ("/home/me/secret/model", None, "model")],
)
def test_models_of_the_hub_are_named_and_paths_are_not_told(
    tmp_path: Path, model: str, named: str | None, shown: str
) -> None:
    run = make_run(tmp_path / "run", ["a text", "another"])
    run.manifest.config["model"] = {"model": model}
    card = make_card(run, "hf://me/mine", rows=False)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front).get("base_model") == named
    assert f"| model | {shown} |" in body
    assert "secret" not in card
    assert "There are none yet." in body
    assert "This was not measured." in body
    assert "npeff pull hf://me/mine RUN" in body
