"""`npeff casestudy`: a component's examples with their carrying words removed and swapped, before and after."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from npeff.analyse.probe import explain_texts
from npeff.collect.session import Prepared, answer_texts, prepare_run
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.explain.config import CaseStudyConfig
from npeff.explain.names import Lexicon
from npeff.explain.records import Case, CaseStudy, explanations_folder, key_of
from npeff.explain.run import examples_of, name_all, weigh_words, words_of_example
from npeff.explain.words import LeaveOut, Words
from npeff.perturb.lift import check_component
from npeff.store.layout import choose_decomposition
from npeff.store.run import Run
from npeff.utils import write_record
from npeff.utils.report import Column, Emphasis, Table, Value, write_report

Variant = tuple[int, bool, str, str]
"""Example, whether it was held out, what was done to it, and its text then."""


def casestudy(config: CaseStudyConfig) -> CaseStudy:
    """Study a component; files are in RUN/explanations/NAME/casestudies.

    Args:
        config: Which component, and how many examples and words.

    Returns:
        Every variant with its coefficient and answer.
    """
    run = Run.open(config.run)
    name = choose_decomposition(run.path, config.decomposition)
    decomposition, j = open_decomposition(run, name), config.component
    check_component(decomposition, j)
    words = name_all(run, name, decomposition).names[j].words
    prepared = prepare_run(run, config.device)
    chosen = examples_of(run, decomposition, j, config.examples)
    examples = [words_of_example(run, prepared, i) for i, _ in chosen]
    effects = weigh_words(LeaveOut(run, decomposition, prepared), examples, j)
    strangers = _strangers(run, decomposition.notes.held_out, set(words))
    generator = np.random.default_rng([config.seed, j])
    variants: list[Variant] = []
    fields = []
    for (i, held_out), example, found in zip(chosen, examples, effects, strict=True):
        carrying = np.argsort(-np.array(found.effects), kind="stable")[: config.words].tolist()
        own = list(_variants(i, held_out, example, carrying, generator.permutation(strangers).tolist()))
        variants += own
        fields += [example.fields] * len(own)
    cases = _measure(run, decomposition, prepared, variants, fields if prepared.task.fields else [], j)
    study = CaseStudy(j, key_of(run, name), cases)
    path = explanations_folder(run, name) / "casestudies" / f"{j:05d}"
    print(write_report(path, [f"# Component {j} of {name}", ", ".join(words), table := as_table(study)], csv=table))
    write_record(path.with_name(f"{path.name}.json"), study, sealed=True)
    print(f"in {path}.md, .csv and .tex")
    return study


def _strangers(run: Run, held_out: list[int], own: set[str]) -> list[str]:
    """Words of middling frequency that have nothing to do with the component, to put in the place of others."""
    lexicon = Lexicon(run.table["text"].to_pylist(), np.setdiff1d(np.flatnonzero(run.usable), held_out))
    counts = np.asarray(lexicon.has.sum(0))[0]
    plain = [n for n, word in enumerate(lexicon.words) if word.isalpha() and len(word) > 3 and word not in own]
    middle = sorted(plain, key=lambda n: -counts[n])[len(plain) // 4 : 3 * len(plain) // 4] or plain
    return [lexicon.words[n] for n in middle] or ["thing"]


def _variants(i: int, held_out: bool, example: Words, carrying: list[int], strangers: list[str]) -> Iterator[Variant]:
    """The example as it is, then without and with another word in place of each carrying word."""
    yield i, held_out, "as it is", example.text
    for place, (word, other) in enumerate(zip(carrying, strangers, strict=False)):
        start, stop = example.places[word]
        yield i, held_out, f"without “{example.words[word]}”", example.without((word, word + 1))
        swapped = example.text[:start] + other + example.text[stop:]
        yield i, held_out, f"“{example.words[word]}” → “{other}”", swapped
        if place == 0 and len(example.words) > 1:  # does the loss of any word do?
            rest = next((k for k in range(len(example.words)) if k not in carrying), carrying[-1])
            yield i, held_out, f"without “{example.words[rest]}” (another word)", example.without((rest, rest + 1))


def _measure(
    run: Run,
    decomposition: Decomposition,
    prepared: Prepared,
    variants: Sequence[Variant],
    fields: Sequence[Mapping[str, str]],
    component: int,
) -> list[Case]:
    texts = [text for _, _, _, text in variants]
    explained = explain_texts(run, decomposition, texts, prepared, fields)
    answers = answer_texts(prepared, explained.collected["prediction"].tolist())
    values = (explained.coefficients[:, component].tolist(), answers, explained.collected["probability"].tolist())
    return [Case(*variant, *found) for variant, *found in zip(variants, *values, strict=True)]


def as_table(study: CaseStudy) -> Table:
    """A case study as a table.

    Args:
        study: The case study.

    Returns:
        A line for each variant; examples as they are stand out.
    """
    columns = [Column("example"), Column("held_out", title="held out"), Column("variant"), Column("text")]
    columns += [Column("coefficient", ".3f"), Column("answer"), Column("probability", ".1%")]
    table = Table(f"Component {study.component}: examples before and after their carrying words changed", columns)
    for case in study.cases:
        values: list[Value] = list(vars(case).values())
        table.rows.append([Emphasis(value) for value in values] if case.variant == "as it is" else values)
    return table
