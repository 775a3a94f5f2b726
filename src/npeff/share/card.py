"""The card of a shared run: what it is, what was found, how to look at it. Written from the run alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from npeff.analyse.highlights import highlights
from npeff.analyse.records import KINDS, Analysis, Rate
from npeff.analyse.run import read_analysis
from npeff.decompose.config import METHODS
from npeff.explore.themes import Themes
from npeff.store.layout import decomposition_names
from npeff.store.run import Run
from npeff.utils.files import read_json
from npeff.utils.text import percent

SHOWN_COMPONENTS = 8
SHOWN_EXAMPLES = 4
_LONGEST = 140
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+!|~$-])")
PAPER = (
    "Michael Matena and Colin Raffel. *Uncovering Language Model Processing Strategies with Non-Negative Per-Example "
    "Fisher Factorization.* Transactions on Machine Learning Research, 2026. "
    "<https://openreview.net/forum?id=UjeDVujI8q>"
)


def make_card(run: Run, address: str | None, rows: bool) -> bytes:
    """The card as Markdown with the metadata that the Hub reads; `address` is where the run is pulled from."""
    analyses = list(_analyses(run))
    parts = [
        f"---\n{yaml.safe_dump(_metadata(run), sort_keys=False)}---",
        f"# Components of {as_text(_model(run))} on {as_text(run.manifest['task']['name'])}",
        "A run of npeff: per-example Fisher matrices of a language model "
        "on a task, decomposed into components. A component is a part of the model that a group of examples uses.",
        _table(["", ""], _facts(run, rows)),
        f"## Look at it\n\n```sh\nnpeff pull {address or 'FOLDER'} RUN\nnpeff explore RUN\n```",
    ]
    if analyses:
        parts.append("## Decompositions\n\n" + _table(_COLUMNS, [_row(found) for found in analyses]))
        parts.append(
            "Tuned: the top examples of a component all have one prediction, or one label; LnP: one label and not one "
            "prediction. In brackets what chance would give."
        )
        parts.append(_components(run, analyses[0]))
    parts += list(_perturbations(run))
    parts.append(
        f"## Sources\n\nThe method: {PAPER}\n\nThe texts belong to the data set and the components describe the model; "
        f"the licences of both apply. Components are hypotheses: look at more than their top examples."
    )
    return ("\n\n".join(parts) + "\n").encode()


def as_text(text: str, longest: int = _LONGEST) -> str:
    """A text from outside in one line of Markdown, where it is shown and never taken for markup."""
    line = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(line.split())
    line = line if len(line) <= longest else line[: longest - 1] + "…"
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    return _MARKUP.sub(r"\\\1", line).replace("://", ":&#47;/")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _model(run: Run) -> str:
    """A model's name; of one from disk only the last part, since paths say more about the user than about the model."""
    name = str(run.manifest["config"]["model"]["model"])
    return name if _HUB_ID.fullmatch(name) else Path(name).name


def _metadata(run: Run) -> dict[str, Any]:
    values: dict[str, Any] = {"library_name": "npeff", "tags": ["npeff", "interpretability", "fisher-information"]}
    name = str(run.manifest["config"]["model"]["model"])
    if _HUB_ID.fullmatch(name) and not Path(name).exists():
        values["base_model"] = name
    return values


def _facts(run: Run, rows: bool) -> list[list[str]]:
    manifest, table = run.manifest, run.table
    task, config = manifest["task"], manifest["config"]
    labels = task["labels"]
    answers = f"{', '.join(labels[:10])}{' …' if labels[10:] else ''}" if labels else "every next token"
    facts = [
        ["model", as_text(_model(run))],
        ["task", as_text(task["name"])],
        ["prompt", as_text(task["prefix"] + task["prompt"], 400)],
        ["answers", as_text(answers, 400)],
        ["examples", f"{len(table):,}"],
    ]
    known = table["label"].is_valid().to_numpy(zero_copy_only=False)
    if known.any() and labels:
        right = table["label"].to_numpy(zero_copy_only=False)[known] == table["prediction"].to_numpy()[known]
        facts.append(["accuracy", f"{right.mean():.1%}"])
    facts.append(["parameters", f"{manifest['parameters']:,}"])
    if isinstance(directions := config.get("directions"), dict):  # a run of other software may not say
        facts.append(["directions", as_text(str(directions.get("directions")))])
    if isinstance(sketch := config.get("sketch"), dict):
        facts.append(["sketch", as_text(f"{sketch.get('sketch')}, {sketch.get('dim')} numbers")])
    return [
        *facts,
        ["collected rows", "here" if rows else "not here; `npeff verify RUN` collects them again"],
        ["npeff", as_text(str(manifest.get("npeff")))],
    ]


def _analyses(run: Run) -> Iterator[Analysis]:
    """Analyses of all decompositions, NPEFF first; what is not analysed yet is."""
    analyses = [read_analysis(run, name) for name in decomposition_names(run.path)]
    yield from sorted(analyses, key=lambda analysis: METHODS.index(analysis.method))


_COLUMNS = ["name", "method", "components", "explained", "prediction-tuned", "label-tuned", "LnP-tuned"]


def _row(analysis: Analysis) -> list[str]:
    return [
        as_text(analysis.name),
        analysis.method,
        str(analysis.components),
        "" if analysis.explained is None else f"{analysis.explained:.1%}",
        *(_rate(analysis.tunings[kind]) for kind in KINDS),
    ]


def _rate(rate: Rate | None) -> str:
    if rate is None or rate.share is None:
        return "not known"
    return f"{rate.share:.1%} ({percent(rate.expected)})"


def _components(run: Run, analysis: Analysis) -> str:
    """The components to look at first, with labels that people or judges gave and a few top examples."""
    labels = Themes(run, analysis.name).current()
    texts, predictions = run.table["text"], run.table["prediction_text"]
    # what somebody has found a name for comes first
    labelled = [component for component in analysis.component if component.number in labels]
    others = [component for component in highlights(analysis.component) if component.number not in labels]
    lines = [f"## Some components of {as_text(analysis.name)}"]
    for component in (labelled + others)[:SHOWN_COMPONENTS]:
        number, first = component.number, component.orderings[0]
        label = labels[number].theme if number in labels else ""
        heading = f"### {number}" + (f": {as_text(label)}" if label else "")
        if label and labels[number].source != "person":
            heading += " (automatic label)"
        lines += ["", heading, ""]
        lines += [
            f"- {as_text(texts[example].as_py())} → {as_text(predictions[example].as_py(), 40)}"
            for example in first.top[:SHOWN_EXAMPLES]
        ]
    return "\n".join(lines)


def _perturbations(run: Run) -> Iterator[str]:
    """What perturbing the model along components did, if that was measured."""
    rows = []
    for file in sorted((run.path / "perturbations").glob("*/results.json")):
        found = read_json(file).get("summary", {})
        if found.get("kl_ratio") is not None:
            norm = found.get("norm_ratio")
            rows.append(
                [
                    as_text(file.parent.name),
                    str(found.get("components", "")),
                    f"{found['kl_ratio']:.3g}",
                    "" if norm is None else f"{norm:.2f}",
                ]
            )
    if rows:
        table = _table(["perturbation", "components", "KL ratio", "norm ratio"], rows)
        yield (
            f"## Are they causal?\n\n{table}\n\nThe model's parameters were changed along components. KL ratio: how "
            f"much more the answers of a component's top examples changed than those of random examples (geometric "
            f"mean over components)."
        )
