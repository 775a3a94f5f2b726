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

import csv
import hashlib
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

from npeff.analyse.ranking import columns
from npeff.analyse.records import Analysis
from npeff.analyse.relations import RelatedPair, Relations, brief
from npeff.analyse.run import read_analyses, read_examples
from npeff.decompose.run import open_decomposition
from npeff.explore import evidence, inside, pages
from npeff.explore.config import ExportConfig
from npeff.explore.themes import Themes
from npeff.store.examples import PLACE, accuracy, label_texts, shown_texts
from npeff.store.layout import ANALYSIS, EXPLANATIONS, PERTURBATIONS, choose_decomposition, decomposition_folder
from npeff.store.run import Run
from npeff.store.schema import Manifest
from npeff.tasks.config import FIELD
from npeff.utils import Record, UserError, __version__, cut, percent, read_object, rounded, sha256, short
from npeff.utils.files import whole_directory, write_json, write_text
from npeff.utils.progress import progress

FORMAT = 8
MARKER = "site.json"
_SITE = resources.files("npeff") / "explore" / "site"
ASSETS = tuple(sorted(item.name for item in _SITE.iterdir()))
"""The files of the page itself: all that are in the folder."""
BLOCK = 256
"""Examples per data file."""


class Summary(Record):
    """A decomposition, as the list of all of them shows it."""

    analysis: Analysis
    """Its analysis, without components and groups."""
    seed: int
    """Seed that it was made with."""
    losses: list[float]
    """Loss of each pass."""
    verdict: str | None
    """What its diagnostics say."""
    perturbed: int
    """Components that were perturbed."""


class Site(Record):
    """The run and its decompositions (data/run.js)."""

    facts: list[tuple[str, str | int]]
    """What the overview says about the run."""
    examples: int
    """Number of examples."""
    block: int
    """Examples per data file."""
    default: int
    """The decomposition that the page opens on."""
    decompositions: list[Summary]
    """All of them; D in the name of a file is the number here."""
    pairs: list[RelatedPair]
    """Pairs that were compared."""
    chains: list[list[int]]
    """Decompositions of one method with more and more components."""


def export(config: ExportConfig) -> Path:
    """Write the page of `config.run` to `config.out`; returns the path of its index.html."""
    index = export_site(Run.open(config.run), Path(config.out), config.decomposition)
    print(f"Open {index.absolute()} in a browser.")
    return index


def export_site(run: Run, out: Path, decomposition: str | None = None) -> Path:
    """Write the page of a run, unless what is there is up to date.

    Args:
        run: The run; decompositions that are not analysed yet are analysed first.
        out: Directory of the page; an earlier export in it is replaced.
        decomposition: The one that the page opens on; the run's default if not given.

    Returns:
        The path of its index.html.

    Raises:
        UserError: `out` holds something else.
    """
    default = choose_decomposition(run.path, decomposition)
    analyses = read_analyses(run)
    names = [analysis.name for analysis in analyses]
    made = _made(run, names, default)
    if (out / MARKER).is_file() and read_object(out / MARKER) == made:
        _write_themes(out, run, names)
        print(f"The page in {out} is up to date.")
        return out / "index.html"
    if out.exists() and not (out.is_dir() and ((out / MARKER).is_file() or not any(out.iterdir()))):
        raise UserError(f"{out} holds something else than an exported page. Choose another directory.")
    with whole_directory(out) as folder:
        for asset in ASSETS:
            (folder / asset).write_bytes((_SITE / asset).read_bytes())
        texts = shown_texts(run.table).to_pylist()
        relations = Relations(run, names, [[brief(row, texts) for row in analysis.component] for analysis in analyses])
        _write_examples(folder, run)
        for (a, b), relation in relations.pairs.items():
            _write(folder, f"pair/{a}-{b}", relation)
        summaries = [_write_decomposition(folder, number, run, each, relations) for number, each in enumerate(analyses)]
        pairs = relations.lines([analysis.tuned_predictions for analysis in analyses])
        at = names.index(default)
        _write(folder, "run", Site(list(facts(run).items()), len(texts), BLOCK, at, summaries, pairs, relations.chains))
        _write_themes(folder, run, names)
        write_json(folder / MARKER, made)
    return out / "index.html"


def _made(run: Run, names: list[str], default: str) -> dict[str, str | int | dict[str, str]]:
    """What the page is made of now (site.json); if that has changed, the page is made again."""
    files = [decomposition_folder(run.path, name) / ANALYSIS / "analysis.json" for name in names]
    files += [file for folder in (PERTURBATIONS, EXPLANATIONS) for file in (run.path / folder).rglob("[!.]*.json")]
    return {
        "npeff": __version__,
        "format": FORMAT,
        "run": run.fingerprint,
        "examples": run.manifest.examples_sha256,
        "default": default,
        "files": {file.relative_to(run.path).as_posix(): sha256(file) for file in sorted(files)},
        "assets": {asset: hashlib.sha256((_SITE / asset).read_bytes()).hexdigest() for asset in ASSETS},
    }


# --- data files ---------------------------------------------------------------------------------------------------


def _write(folder: Path, key: str, value: object) -> None:
    """Write one data file."""
    path = folder / "data" / f"{key}.js"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_script(key, value), encoding="ascii")


def _script(key: str, value: object) -> str:
    """The text of a data file: `npeffData("key", value)`, with records as objects."""
    # ASCII only, so that no character of a text can end the script or depend on how the file is decoded
    return f"npeffData({json.dumps(key)},{json.dumps(value, separators=(',', ':'), default=vars)});\n"


def _write_themes(folder: Path, run: Run, names: list[str]) -> None:
    """Write what people say about the components now. All else stays when only this has changed."""
    for number, name in enumerate(names):
        themes = list(Themes(run, name).current().values())
        path, text = folder / "data" / str(number) / "themes.js", _script(f"{number}/themes", themes)
        if not path.is_file() or path.read_text(encoding="ascii") != text:
            write_text(path, text)


def facts(run: Run) -> dict[str, str | int]:
    """What there is to say about a run in a few words.

    Args:
        run: The run.

    Returns:
        Name of a fact → the fact; an accuracy only where there are labels.
    """
    manifest, task, right = run.manifest, run.manifest.task, accuracy(run.table, run.manifest.task.labels)
    return {
        "model": manifest.model,
        "task": task.name,
        "prompt": task.chat.rendered if task.chat else task.prefix + task.prompt,
        "answers": ", ".join(task.labels) or "every next token",
        "examples": len(run.table),
        **({} if right is None else {"accuracy": f"{right:.1%}"}),
        "parameters": manifest.parameters,
        **_left_out(manifest),
        "rows": int(run.table["rank"].to_numpy().sum()),
        "npeff": manifest.npeff,
    }


def _left_out(manifest: Manifest) -> dict[str, str]:
    """What share of the model's parameters was left out on purpose."""
    if not manifest.excluded_parameters:
        return {}
    share = percent(manifest.excluded_parameters / manifest.model_parameters, 3)
    return {"left out": f"{share} of the model's parameters, by --include or --exclude"}


def _losses(path: Path) -> list[float]:
    """The loss of each pass, if a history was written."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return rounded([float(row["loss"]) for row in csv.DictReader(lines)])


def _write_examples(folder: Path, run: Run) -> None:
    """Write the examples, a block after the other; `fields` are other columns that the prompt names."""
    for number, start in enumerate(range(0, len(run.table), BLOCK)):
        part = run.table.slice(start, BLOCK)
        fields = [name for name in part.column_names if name.startswith(FIELD)]
        places = [name for name in PLACE if name in part.column_names]
        written = [name for name in part.column_names if name == "written"]
        block = {
            "text": part["text"].to_pylist(),
            "label": label_texts(part, run.manifest.task.labels),
            "prediction": part["prediction_text"].to_pylist(),
            "probability": rounded(part["probability"].fill_null(0).to_pylist()),
            "aside": part["set_aside"].to_pylist(),  # why, if it was
            "fields": {name.removeprefix(FIELD): part[name].to_pylist() for name in fields}
            | {name: [f"{value:.3g}" for value in part[name].to_pylist()] for name in places}
            | {name: ["\n".join(map(str.strip, own)) for own in part[name].to_pylist()] for name in written},
        }
        _write(folder, f"examples/{number}", block)


def _write_decomposition(folder: Path, number: int, run: Run, analysis: Analysis, relations: Relations) -> Summary:
    """Write the files of decomposition `number`."""
    name, rows = analysis.name, analysis.component
    decomposition, examples = open_decomposition(run, name), read_examples(run)
    texts = shown_texts(run.table).to_pylist()
    perturbations = evidence.read_perturbations(run, name, decomposition)
    insides = inside.Insides(run, name, decomposition)
    about = (relations.stability(number), perturbations, insides.columns)
    table = pages.component_table(analysis, texts, decomposition, *about)
    _write(folder, f"{number}/components", table)
    shown = _shown(run)
    scores = zip(*(columns(decomposition.scores(order)) for order in decomposition.orders), strict=True)
    for j, of_j in enumerate(progress(scores, desc=f"Page of {name}", unit="component", total=len(rows))):
        rankings = pages.rank_examples(j, of_j, decomposition, examples, analysis.top)
        wanted = {i for ranking in rankings for part in ranking.lists for i in part.examples}
        page = pages.ComponentPage(
            component=rows[j],
            histogram=pages.histogram(decomposition.coefficients[:, j].numpy()[examples.usable]),
            orderings=rankings,
            relations=relations.of_component(number, j),
            perturbations=evidence.of_component(perturbations, j),
            shown={i: shown[i] for i in sorted(wanted)},
            inside=insides.of(j),
        )
        _write(folder, f"{number}/component/{j}", page)
    for block, start in enumerate(range(0, len(texts), BLOCK)):
        _write(folder, f"{number}/examples/{block}", pages.example_parts(decomposition, slice(start, start + BLOCK)))
    where = decomposition_folder(run.path, name)
    diagnostics = read_object(where / "diagnostics.json") if (where / "diagnostics.json").is_file() else {}
    return Summary(
        analysis=replace(analysis, component=[], groups=[]),
        seed=relations.members[number].seed,
        losses=_losses(where / "history.csv"),
        verdict=diagnostics.get("verdict"),
        perturbed=len({j for _, records in perturbations for j in records}),
    )


def _shown(run: Run) -> list[pages.Shown]:
    """What a component's page says about each example."""
    labels, predictions = label_texts(run.table, run.manifest.task.labels), run.table["prediction_text"].to_pylist()
    probabilities = map(short, run.table["probability"].to_pylist())
    texts = (cut(text, pages.LONGEST) for text in shown_texts(run.table, 300).to_pylist())
    return list(zip(texts, labels, predictions, probabilities, strict=True))
