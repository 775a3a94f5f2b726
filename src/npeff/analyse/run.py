"""`npeff analyse`: tunings, energies, correlations and top examples of a run's decompositions."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npeff.analyse import answers, matching, report, tunings
from npeff.analyse.config import AnalyseConfig
from npeff.analyse.groups import groups
from npeff.analyse.records import Analysis, AnalysisInputs, AnalysisOptions, ComponentAnalysis, Ordering
from npeff.analyse.recurrence import RECURRING, recurrence, usual_refits
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.store.examples import encode, whole_texts
from npeff.store.layout import ANALYSIS, decomposition_folder, decomposition_names
from npeff.store.run import Run
from npeff.utils import Array, UserError, __version__, from_dict, read_object, replace, rounded

FORMAT = 4
"""Layout and rules of an analysis; one of others is made again. Since 2 LnP counts as in the paper, 3 has groups.
4 has answers."""
CORRELATED = 8
"""Most correlated components that are listed for each component."""


def analyse(config: AnalyseConfig) -> list[Analysis]:
    """Analyse one or all decompositions of a run.

    Args:
        config: The run, the decomposition if only one is wanted, and what makes a component tuned.

    Returns:
        An analysis of each.

    Raises:
        UserError: The run has no finished decomposition.
    """
    run = Run.open(config.run)
    names = [config.decomposition] if config.decomposition else decomposition_names(run.path)
    if not names:
        raise UserError(f"{run.path} has no finished decomposition. `npeff decompose {run.path}` makes one.")
    return [analyse_one(run, name, _options(run, name, config)) for name in names]


def _options(run: Run, name: str, config: AnalyseConfig) -> AnalysisOptions:
    """What the user asks for; of recurrence, what is cheap."""
    refits = config.refits
    if refits is None:
        refits = usual_refits(run, decomposition_folder(run.path, name))
    elif refits and read_object(decomposition_folder(run.path, name) / "config.json")["method"] not in RECURRING:
        refits = 0
    return AnalysisOptions(config.top, config.unique, refits)


def read_analysis(run: Run, name: str) -> Analysis:
    """The analysis of a decomposition, as the user made it or else with the default options; made if need be.

    Args:
        run: The run.
        name: Name of the decomposition.

    Returns:
        The analysis.
    """
    return analyse_one(run, name, quiet=True)


def analyse_one(run: Run, name: str, options: AnalysisOptions | None = None, quiet: bool = False) -> Analysis:
    """Analyse a decomposition, unless that is done with the same options.

    Args:
        run: The run.
        name: Name of the decomposition.
        options: What makes a component tuned; if not given, as the last time, or else the defaults.
        quiet: Do not mention an analysis that is up to date.

    Returns:
        The analysis.
    """
    folder = decomposition_folder(run.path, name)
    saved = _read(folder)
    inputs = AnalysisInputs(
        run=run.fingerprint,
        # the table's own hash: verifying a run may repair predictions that the fingerprint does not cover
        examples=run.manifest.examples_sha256,
        tensors=read_object(folder / "config.json").get("sha256"),
        options=options or (saved.inputs.options if saved else AnalysisOptions()),
    )
    if saved is not None and _answers(saved.inputs, inputs):
        if not quiet:
            print(f"{name}: the analysis in {folder / ANALYSIS} is up to date.")
        return saved
    decomposition = open_decomposition(run, name)
    analysis = _with_answers(run, decomposition, summarise(name, decomposition, read_examples(run), inputs))
    if inputs.options.refits:
        found, chance = recurrence(run, decomposition, inputs.options.refits)
        component = [replace(each, recurrence=share) for each, share in zip(analysis.component, found, strict=True)]
        analysis = replace(analysis, component=component, recurrence_by_chance=chance)
    report.write(folder / ANALYSIS, analysis, run.table)
    print(report.in_words(analysis))
    print(f"  in {folder / ANALYSIS}")
    return analysis


def _answers(saved: AnalysisInputs, wanted: AnalysisInputs) -> bool:
    """Whether an analysis is what is wanted; recurrence that is not asked for is no reason to make it again."""
    refits = max(saved.options.refits, wanted.options.refits)
    return replace(wanted, options=replace(wanted.options, refits=refits)) == saved


def _read(folder: Path) -> Analysis | None:
    """The analysis of the decomposition in `folder`, if it is whole and in the layout of this version."""
    if not all((folder / ANALYSIS / name).is_file() for name in report.FILES):
        return None
    values = read_object(folder / ANALYSIS / report.JSON)  # a damaged one is the user's to know about
    try:
        return from_dict(Analysis, values) if values.get("format") == FORMAT else None
    except UserError:  # of another version
        return None


def read_examples(run: Run) -> tunings.Examples:
    """What tunings need of a run's example table.

    Args:
        run: The run, of m examples.

    Returns:
        Predictions, labels and texts of all of them.
    """
    table, names = run.table, run.manifest.task.labels
    labels = table["label"].fill_null(tunings.UNKNOWN).to_numpy().astype(np.int64)
    if names:  # the task's own order of classes
        codes, texts = table["prediction"].to_numpy().astype(np.int64), names
    else:
        codes, texts = encode(table["prediction_text"])
    if "position" in table.column_names:  # the token that comes next
        labels, names = encode(table["answer"])
    return tunings.Examples(
        predictions=tunings.Classes(codes, texts),
        labels=tunings.Classes(labels, names),
        texts=encode(whole_texts(table))[0],
        usable=run.usable,
    )


def summarise(name: str, decomposition: Decomposition, examples: tunings.Examples, inputs: AnalysisInputs) -> Analysis:
    """Everything about one decomposition. Its coefficients [m, C] are held once, and a copy if they have signs.

    Args:
        name: Name of the decomposition.
        decomposition: The decomposition of m examples into C components.
        examples: What is known about the m examples.
        inputs: What the analysis is made of, with its options.

    Returns:
        The analysis.
    """
    options = inputs.options
    components, rates = tunings.tunings_of(decomposition, examples, options.top, options.unique)
    eligible = sum(tunings.tuned(orderings)["prediction"] is not None for orderings in components)
    residuals = decomposition.residuals[torch.from_numpy(examples.usable)].double()
    return Analysis(
        format=FORMAT,
        npeff=__version__,
        inputs=inputs,
        name=name,
        method=decomposition.config.method,
        orders=list(decomposition.orders),
        examples=int(examples.usable.sum()),
        components=len(components),
        eligible=eligible,
        left_out=len(components) - eligible,
        top=options.top,
        unique=options.unique,
        tunings=rates,
        labels=_class_shares(examples.labels, examples.usable),
        predictions=_class_shares(examples.predictions, examples.usable),
        explained=float(1 - residuals.mean()) if len(residuals) else None,
        component=_components(components, decomposition, int(examples.usable.sum())),
        groups=groups(decomposition),
        recurrence_by_chance=None,
    )


def _with_answers(run: Run, decomposition: Decomposition, analysis: Analysis) -> Analysis:
    """An analysis with what components argue for: of several orderings, the last is by absolute values."""
    tops = [np.array(each.orderings[-1].top, dtype=np.int64) for each in analysis.component]
    pairs = list(zip(analysis.component, answers.signatures(run, decomposition, tops), strict=True))
    known = [replace(each, argues_for=a.argues_for, agreement=a.coherence) if a else each for each, a in pairs]
    chance = answers.coherence_by_chance(run, decomposition, analysis.top) if any(a for _, a in pairs) else None
    return replace(analysis, component=known, agreement_by_chance=chance)


def _components(components: list[list[Ordering]], decomposition: Decomposition, usable: int) -> list[ComponentAnalysis]:
    """The entry of each component; `usable` is the number of usable examples."""
    energy, used = decomposition.energy, decomposition.used
    related, correlations = matching.strongest_correlations(decomposition.coefficients, CORRELATED)

    def with_shares(ordering: Ordering, number: int) -> Ordering:
        shares = decomposition.shares(decomposition.coefficients[ordering.top], number)
        return ordering if shares is None else replace(ordering, shares=rounded(shares.tolist(), 6))

    return [
        ComponentAnalysis(
            number=number,
            **dict[str, Any]((f"{kind}_tuned", flag) for kind, flag in tunings.tuned(orderings).items()),
            prediction_purity=tunings.overall(max, (ordering.prediction_purity for ordering in orderings)),
            label_purity=tunings.overall(max, (ordering.label_purity for ordering in orderings)),
            used=int(used[number]),
            density=int(used[number]) / max(usable, 1),
            energy=float(energy[number]),
            correlated=related[number].tolist(),
            correlation=rounded(correlations[number].tolist(), 6),
            orderings=[with_shares(ordering, number) for ordering in orderings],
        )
        for number, orderings in enumerate(components)
    ]


def _class_shares(classes: tunings.Classes, usable: Array, most: int = 200) -> dict[str, float] | None:
    """Share of each class among usable examples, largest first, at most `most` of them; None if none is known."""
    codes = Counter(sorted(classes.codes[usable].tolist()))  # equally frequent ones in the order of the classes
    del codes[tunings.UNKNOWN]
    return {classes.names[code]: count / codes.total() for code, count in codes.most_common(most)} or None
