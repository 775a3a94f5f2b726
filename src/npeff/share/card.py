"""The card of a shared run: what it is, what was found, how to look at it. Written from the run alone.

What all cards say is in card.md. Texts of the run are literal in it: none can be markup, a link or a mention.
"""

from pathlib import Path
from string import Template

from npeff.analyse.ranking import highlights
from npeff.analyse.records import KINDS, TITLES, Analysis, Rate
from npeff.analyse.run import read_analyses
from npeff.explore.export import facts
from npeff.explore.themes import Themes
from npeff.perturb.records import Results
from npeff.perturb.statistics import Interval
from npeff.share.hub import HUB_ID
from npeff.store.examples import shown_texts
from npeff.store.layout import PERTURBATIONS
from npeff.store.run import Run
from npeff.utils import percent, read_record, shorten
from npeff.utils.report import Column, Table, as_literal, as_markdown

SHOWN_COMPONENTS = 8
SHOWN_EXAMPLES = 4
_LONGEST = 140
_LISTED = 10
"""Answers of the task that are named."""
_NOT_SHARED = "not shared; `npeff verify RUN` collects them again"


def make_card(run: Run, address: str | None, rows: bool) -> str:
    """Write the card; decompositions without an analysis are analysed.

    Args:
        run: The run.
        address: What `npeff pull` gets it from, if that is the same for everybody.
        rows: Whether the collected rows are shared.

    Returns:
        The card as Markdown, behind the metadata that the Hub reads.
    """
    model = _model(run)
    analyses = read_analyses(run)
    return Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8")).substitute(
        base_model=f"\nbase_model: {model}" if HUB_ID.fullmatch(model) and not Path(model).exists() else "",
        model=_inline(model),
        task=_inline(run.manifest.task.name),
        facts=_facts(run, rows).markdown(),
        address=address or "FOLDER",
        decompositions=_decompositions(analyses).markdown(),
        components=_components(run, analyses[0]) if analyses else "There are none yet.",
        perturbations=_perturbations(run),
    )


def _inline(text: str) -> str:
    """A text of the run, on one line and literal."""
    return as_literal(shorten(text, _LONGEST))


def _model(run: Run) -> str:
    """A model's name; of one from disk only the last part, since paths say more about the user than about the model."""
    names = run.manifest.model.split(" with ")  # an adapter
    return " with ".join(name if HUB_ID.fullmatch(name) else Path(name).name for name in names)


def _facts(run: Run, rows: bool) -> Table:
    """What was asked of which model. Runs of other software may not say everything."""
    labels, directions, sketch = run.manifest.task.labels, *map(run.manifest.config.get, ("directions", "sketch"))
    known = facts(run) | {"model": _model(run), "rows": "shared" if rows else _NOT_SHARED}
    if len(labels) > _LISTED:
        known["answers"] = f"{', '.join(labels[:_LISTED])} …"
    if isinstance(directions, dict):
        known["directions"] = str(directions.get("directions"))
    if isinstance(sketch, dict):
        known["sketch"] = f"{sketch.get('sketch')}, {sketch.get('dim')} entries"
    shown = ((name, f"{fact:,}" if isinstance(fact, int) else shorten(fact, 400)) for name, fact in known.items())
    return Table("", [Column(""), Column("")], [*shown])


def _decompositions(analyses: list[Analysis]) -> Table:
    """How well the components of each decomposition are tuned."""
    columns = [Column("name"), Column("method"), Column("components"), Column("explained", ".1%")]
    rows = [
        [each.name, each.method, each.components, each.explained, *(_rate(each.tunings[kind]) for kind in KINDS)]
        for each in analyses
    ]
    return Table("", [*columns, *(Column(TITLES[kind]) for kind in KINDS)], [*rows])


def _rate(rate: Rate | None) -> str:
    if rate is None or rate.share is None:
        return "not known"
    return f"{rate.share:.1%} ({percent(rate.expected)})"


def _components(run: Run, analysis: Analysis) -> str:
    """Some components with their themes and a few top examples; those that have a theme first."""
    themes = Themes(run, analysis.name).current()
    texts, predictions = shown_texts(run.table), run.table["prediction_text"]
    named = [component for component in analysis.component if component.number in themes]
    others = [component for component in highlights(analysis.component) if component.number not in themes]
    blocks: list[str | Table] = [f"The decomposition is {_inline(analysis.name)}."]
    for component in (named + others)[:SHOWN_COMPONENTS]:
        said = themes.get(component.number)
        theme = f": {_inline(said.theme)}" if said and said.theme else ""
        automatic = " (automatic theme)" if said and theme and said.source != "person" else ""
        top = component.orderings[0].top[:SHOWN_EXAMPLES]
        rows = [[shorten(texts[n].as_py(), _LONGEST), shorten(predictions[n].as_py(), 40)] for n in top]
        table = Table("", [Column("top example"), Column("prediction")], [*rows])
        blocks += [f"### {component.number}{theme}{automatic}", table]
    return as_markdown(blocks)


def _perturbations(run: Run) -> str:
    """What perturbing the model along components did, where that was measured; held-out results first."""
    formats = {"perturbation": "", "measured on": "", "components": "", "above chance": "", "KL ratio": ".3g"}
    formats |= {"95% interval": "", "random groups": ".3g", "95% of them": "", "elsewhere": ".2%", "norm ratio": ".2f"}
    columns = [Column(name, style) for name, style in formats.items()]
    files = sorted((run.path / PERTURBATIONS).glob("*/results.json"))
    found = [(file.parent.name, read_record(Results, file).summary) for file in files]
    rows = [
        [
            *(name, "held-out" if each.protocol == "heldout" else "in-sample", each.components, each.above_null),
            *(each.kl_ratio, _between(each.interval)),
            *((each.null.ratio, _between(each.null.single)) if each.null else (None, None)),
            *(each.elsewhere, each.norm_ratio),
        ]
        for name, each in sorted(found, key=lambda pair: pair[1].protocol)
    ]
    return Table("", columns, [*rows]).markdown() if rows else "This was not measured."


def _between(interval: Interval | None) -> str | None:
    return None if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}"
