"""`npeff export`: the page of a run as static files that also open from disk.

    OUT/index.html, *.js, style.css  the page: every file of explore/site
    OUT/data/run.js                 the run and its decompositions
    OUT/data/examples/N.js          texts, labels and predictions of a block of examples
    OUT/data/D/components.js        overview table of decomposition number D
    OUT/data/D/component/J.js       one component
    OUT/data/pair/A-B.js            matched components of two decompositions, and which split into which
    OUT/data/D/examples/N.js        which components explain the examples of a block
    OUT/data/D/themes.js            themes and notes of its components
    OUT/site.json                   what the files were made of

Browsers do not let a page from disk fetch JSON, so each data file is a script with one call; the page loads those that
it needs.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from npeff.analyse import matrix
from npeff.analyse.ranking import columns
from npeff.analyse.records import Analysis
from npeff.analyse.relatives import Relations, brief
from npeff.analyse.run import read_analysis, read_examples
from npeff.analyse.tunings import Examples
from npeff.decompose.config import METHODS
from npeff.decompose.run import open_decomposition
from npeff.explore import evidence, pages
from npeff.explore.config import ExportConfig
from npeff.explore.themes import Themes
from npeff.store.layout import ANALYSIS, decomposition_folder, decomposition_names
from npeff.store.run import Run
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, sha256, whole_directory, whole_file, write_json
from npeff.utils.text import cut, rounded, short
from npeff.utils.types import Array
from npeff.utils.version import __version__

FORMAT = 2
MARKER = "site.json"
_SITE = resources.files("npeff") / "explore" / "site"
ASSETS = tuple(sorted(item.name for item in _SITE.iterdir()))
"""The files of the page itself: all that are in the folder."""
BLOCK = 256
"""Examples per data file."""


def export(config: ExportConfig) -> Path:
    """Write the page of `config.run` to `config.out`; returns the path of its index.html."""
    index = export_site(Run.open(config.run), Path(config.out))
    print(f"Open {index.absolute()} in a browser.")
    return index


def export_site(run: Run, out: Path) -> Path:
    """Write the page of `run` to `out`, unless what is there is up to date; returns the path of its index.html."""
    names = decomposition_names(run.path)
    if not names:
        raise UserError(f"{run.path} has no finished decomposition. `npeff decompose {run.path}` makes one.")
    analyses = {name: read_analysis(run, name) for name in names}
    names.sort(key=lambda name: METHODS.index(analyses[name].method))  # NPEFF is what people come for
    inputs = _inputs(run, names)
    if (out / MARKER).is_file() and read_json(out / MARKER).get("inputs") == inputs:
        _write_themes(out, run, names)
        print(f"The page in {out} is up to date.")
        return out / "index.html"
    _check_place(out)
    with whole_directory(out) as folder:
        for asset in ASSETS:
            (folder / asset).write_bytes((_SITE / asset).read_bytes())
        relations = _relations(run, [analyses[name] for name in names])
        _write_run(folder, run, [analyses[name] for name in names], relations)
        _write_examples(folder, run)
        for (a, b), relation in relations.pairs.items():
            _write(folder, f"pair/{a}-{b}", relation)
        for number, name in enumerate(names):
            _write_decomposition(folder, number, run, name, analyses[name], relations)
        _write_themes(folder, run, names)
        write_json(folder / MARKER, {"npeff": __version__, "inputs": inputs})
    return out / "index.html"


def _relations(run: Run, analyses: list[Analysis]) -> Relations:
    texts = run.table["text"].to_pylist()
    briefs = [[brief(row, texts) for row in analysis.component] for analysis in analyses]
    return Relations.of(run, [analysis.name for analysis in analyses], briefs)


def _inputs(run: Run, names: list[str]) -> dict[str, Any]:
    assets = {asset: hashlib.sha256((_SITE / asset).read_bytes()).hexdigest() for asset in ASSETS}
    analyses = {name: sha256(decomposition_folder(run.path, name) / ANALYSIS / "analysis.json") for name in names}
    examples = run.manifest["examples_sha256"]
    return {
        "format": FORMAT,
        "run": run.fingerprint,
        "examples": examples,
        "analyses": analyses,
        "perturbations": evidence.digests(run),
        "assets": assets,
    }


def _check_place(path: Path) -> None:
    """Refuse to replace anything but an earlier export."""
    if path.exists() and not (path.is_dir() and ((path / MARKER).is_file() or not any(path.iterdir()))):
        raise UserError(f"{path} holds something else than an exported page. Choose another directory.")


def _write(folder: Path, key: str, value: Any) -> None:
    """Write one data file."""
    path = folder / "data" / f"{key}.js"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_script(key, value), encoding="ascii")


def _script(key: str, value: Any) -> str:
    """The text of a data file: `npeffData("key", value)`."""
    # ASCII only, so that no character of a text can end the script or depend on how the file is decoded
    body = json.dumps(value, separators=(",", ":"), allow_nan=False, default=vars)
    return f"npeffData({json.dumps(key)},{body});\n"


def _write_themes(folder: Path, run: Run, names: list[str]) -> None:
    """Write what people say about the components now. All else stays when only this has changed."""
    for number, name in enumerate(names):
        themes = list(Themes(run, name).current().values())
        path, text = folder / "data" / str(number) / "themes.js", _script(f"{number}/themes", themes)
        if not path.is_file() or path.read_text(encoding="ascii") != text:
            with whole_file(path) as temporary:
                temporary.write_text(text, encoding="ascii")


def _write_run(folder: Path, run: Run, analyses: list[Analysis], relations: Relations) -> None:
    manifest, table = run.manifest, run.table
    config = manifest["config"]
    task = manifest["task"]
    facts = [
        ["model", config["model"]["model"]],
        ["task", task["name"]],
        ["prompt", task["prefix"] + task["prompt"]],
        ["answers", ", ".join(task["labels"]) or "every next token"],
        ["examples", len(table)],
        ["parameters", manifest["parameters"]],
        ["rows", int(table["rank"].to_numpy().sum())],
        ["npeff", manifest["npeff"]],
    ]
    known = table["label"].is_valid().to_numpy(zero_copy_only=False)
    if known.any() and task["labels"]:
        right = table["label"].to_numpy(zero_copy_only=False)[known] == table["prediction"].to_numpy()[known]
        facts.insert(5, ["accuracy", f"{right.mean():.1%}"])
    kept = ("name", "method", "components", "eligible", "left_out", "top", "unique", "tunings", "explained", "orders")
    decompositions = []
    for analysis, member in zip(analyses, relations.members, strict=True):
        where = decomposition_folder(run.path, analysis.name)
        diagnostics = read_json(where / "diagnostics.json") if (where / "diagnostics.json").is_file() else {}
        head = to_dict(dataclasses.replace(analysis, component=[]))
        decompositions.append(
            {
                **{key: value for key, value in head.items() if key in kept},
                "seed": member.seed,
                "losses": _losses(where / "history.csv"),
                "verdict": diagnostics.get("verdict"),
            }
        )
    pairs = relations.lines([analysis.tuned_predictions for analysis in analyses])
    about = {"facts": facts, "examples": len(table), "block": BLOCK, "decompositions": decompositions}
    _write(folder, "run", {**about, "pairs": pairs, "chains": relations.chains})


def _losses(path: Path) -> list[float]:
    """The loss of each pass, if a history was written."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as handle:
        return rounded([float(row["loss"]) for row in csv.DictReader(handle)])


def _write_examples(folder: Path, run: Run) -> None:
    table, labels = run.table, run.manifest["task"]["labels"]
    fields = [name for name in table.column_names if name.startswith("field:")]
    for number, start in enumerate(range(0, len(table), BLOCK)):
        part = table.slice(start, BLOCK)
        _write(
            folder,
            f"examples/{number}",
            {
                "text": part["text"].to_pylist(),
                "label": [None if label is None else labels[label] for label in part["label"].to_pylist()]
                if labels
                else part["answer"].to_pylist(),
                "prediction": part["prediction_text"].to_pylist(),
                "probability": rounded(part["probability"].fill_null(0).to_pylist()),
                "aside": part["set_aside"].to_pylist(),
                "fields": {name.removeprefix("field:"): part[name].to_pylist() for name in fields},
            },
        )


def _write_decomposition(
    folder: Path, number: int, run: Run, name: str, analysis: Analysis, relations: Relations
) -> None:
    decomposition, examples = open_decomposition(run, name), read_examples(run)
    texts = run.table["text"].to_pylist()
    places = matrix.embed(decomposition.coefficients)
    perturbations = evidence.read_perturbations(run, name, decomposition)
    table = {**pages.table_of_components(analysis, texts), **pages.map_of(places)}
    table |= evidence.overview(perturbations, analysis.components)
    _write(folder, f"{number}/components", {**table, "stability": relations.stability(number)})
    shown = _Shown(run, texts, examples)
    orders: dict[str, Iterator[Array]] = {order: columns(decomposition.scores(order)) for order in decomposition.orders}
    for row in tqdm(analysis.component, desc=f"Page of {name}", unit="component"):
        scores = {order: next(column) for order, column in orders.items()}
        page, wanted = pages.component_page(row, scores, decomposition, examples, analysis.top)
        page["relations"] = relations.of_component(number, row.number)
        page["perturbations"] = evidence.of_component(perturbations, row.number)
        _write(folder, f"{number}/component/{row.number}", {**page, "shown": shown.rows(wanted)})
    for block, start in enumerate(range(0, len(texts), BLOCK)):
        coefficients = decomposition.coefficients[start : start + BLOCK]
        residuals = decomposition.residuals[start : start + BLOCK]
        residuals = torch.nan_to_num(residuals.float())
        shares = decomposition.shares(coefficients)
        _write(folder, f"{number}/examples/{block}", pages.example_rows(coefficients, residuals, shares))


class _Shown:
    """What a component's page says about its examples."""

    def __init__(self, run: Run, texts: list[str], examples: Examples) -> None:
        self._texts, self._examples = texts, examples
        self._answers = run.table["answer"]
        self._probability = run.table["probability"].to_numpy()

    def rows(self, wanted: set[int]) -> dict[int, list[Any]]:
        """Example → text, label, prediction, probability."""
        labels, predictions = self._examples.labels, self._examples.predictions
        return {
            i: [
                cut(self._texts[i], pages.LONGEST),
                labels.names[labels.codes[i]] if labels.codes[i] >= 0 else self._answers[i].as_py(),
                predictions.names[predictions.codes[i]],
                short(float(self._probability[i])),
            ]
            for i in sorted(wanted)
        }
