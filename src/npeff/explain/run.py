"""`npeff explain`: what is inside components."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from npeff.analyse.answers import Answers, can_read, signature, signatures
from npeff.analyse.ranking import columns, top_examples
from npeff.analyse.run import read_examples
from npeff.collect.session import Prepared, prepare_run, read_prompts
from npeff.decompose.base import Decomposition, Order
from npeff.decompose.config import LIFTABLE_METHODS
from npeff.decompose.run import open_decomposition
from npeff.explain import records
from npeff.explain.config import ExplainConfig
from npeff.explain.names import Lexicon, give_name
from npeff.explain.parts import Anatomy, Parts, attention_from_end, check_parts, describe, mean_trace, trace
from npeff.explain.records import Explanation, HeadView, Names, Pair, Trace, WeighedText, WordEffects
from npeff.explain.words import LeaveOut, Span, Words, phrases, read_words
from npeff.models.select import blocks
from npeff.perturb.evaluate import Divergence
from npeff.perturb.lift import Lifter, Parameters, RowSums, component_sums, group_sum, truncate
from npeff.store.layout import choose_decomposition
from npeff.store.run import Run
from npeff.tasks.config import FIELD
from npeff.utils import Array, UserError, duration, only_one, remove_partials, replace, rounded, write_record
from npeff.utils.progress import progress

TOP = 16
"""Examples that a component's answers are read from."""
TELLS = 0.2
"""How much more of a coefficient a pair of words must carry than both of them one at a time."""
NULLS = 4
"""Random groups of examples that heads and neurons are compared with."""
VIEWED = 3
"""Leading heads whose attention is shown."""


def explain(config: ExplainConfig) -> list[Explanation]:
    """Explain components; files are in RUN/explanations/NAME.

    Args:
        config: Which components, and what of them.

    Returns:
        What is known of the components that were asked for.

    Raises:
        UserError: There is no such component.
    """
    run = Run.open(config.run)
    name = choose_decomposition(run.path, config.decomposition)
    decomposition = open_decomposition(run, name)
    count, folder, key = (
        len(decomposition.components),
        records.explanations_folder(run, name),
        records.key_of(run, name),
    )
    chosen = sorted(set(config.component)) or list(range(count))
    if not 0 <= chosen[0] <= chosen[-1] < count:
        raise UserError(f"{name} has components 0 to {count - 1}, not {', '.join(map(str, config.component))}.")
    liftable = decomposition.config.method in LIFTABLE_METHODS
    with only_one(folder):
        remove_partials(folder, below=True)
        names = name_all(run, name, decomposition)
        known = records.read_explanations(run, name)
        missing = [j for j in chosen if not _is_complete(known.get(j), config, liftable)]
        if missing and (config.words or config.parts):
            session = _Session(run, decomposition, config)
            started = time.monotonic()
            bar = progress(session.explain(missing), desc="Explaining", unit="component", total=len(missing))
            for done, (j, found) in enumerate(bar):
                old = known.get(j, Explanation(j, key))
                answers = names.answers[j] or session.answers(j)
                known[j] = replace(old, answers=answers, **found)
                write_record(folder / "components" / f"{j:05d}.json", known[j], sealed=True)
                if done == 0 and len(missing) > 1:
                    rest = (time.monotonic() - started) * (len(missing) - 1)
                    bar.write(f"{len(missing) - 1} more components: about {duration(rest)} or less.")
    print(f"Names of {count} and explanations of {len(known)} components in {folder}")
    return [known.get(j, Explanation(j, key, names.answers[j])) for j in chosen]


def _is_complete(old: Explanation | None, config: ExplainConfig, liftable: bool) -> bool:
    """Whether an explanation has all that is asked for."""
    if old is None:
        return False
    words = not config.words or len([each for each in old.words or [] if not each.held_out]) >= config.examples
    return (words or old.words == []) and (not config.parts or not liftable or old.parts is not None)


def name_all(run: Run, name: str, decomposition: Decomposition) -> Names:
    """Names and answers of all components, without the model; read where they were written before.

    Args:
        run: The run.
        name: Name of the decomposition.
        decomposition: The decomposition.

    Returns:
        Names and answers.
    """
    old = records.read_names(run, name)
    if old is not None:
        return old
    examples, held_out = read_examples(run), np.array(decomposition.notes.held_out, dtype=np.int64)
    lexicon = Lexicon(run.table["text"].to_pylist(), np.setdiff1d(np.flatnonzero(run.usable), held_out))
    order: Order = "absolute" if "absolute" in decomposition.orders else "positive"
    names, tops = [], []
    scores = progress(
        columns(decomposition.scores(order)), desc="Naming", unit="component", total=decomposition.config.components
    )
    for j, own in enumerate(scores):
        names.append(give_name(j, own, lexicon, examples, held_out))
        tops.append(top_examples(own, run.usable, TOP))
    found = Names(records.key_of(run, name), names, signatures(run, decomposition, tops))
    write_record(records.explanations_folder(run, name) / records.NAMES, found, sealed=True)
    return found


class _Session:
    """The model at work."""

    def __init__(self, run: Run, decomposition: Decomposition, config: ExplainConfig) -> None:
        self.run, self.decomposition, self.config = run, decomposition, config
        self.prepared = prepare_run(run, config.device)
        self.leave_out = LeaveOut(run, decomposition, self.prepared)
        self.held_out = np.array(decomposition.notes.held_out, dtype=np.int64)
        self.liftable = config.parts and decomposition.config.method in LIFTABLE_METHODS
        self.prompts = read_prompts(run, self.prepared)
        if self.liftable:
            self.anatomy = Anatomy(self.prepared.model.network, self.prepared.selection.modules)
            self.lifter = Lifter(run, self.prepared, self.prompts)

    def explain(self, components: Sequence[int]) -> Iterator[tuple[int, dict[str, object]]]:
        """What is found of each component: fields of `Explanation`."""
        nothing = ((j, None, None) for j in components)
        for j, vector, fidelity in self._vectors(components) if self.liftable else nothing:
            found: dict[str, object] = {"words": self.words(j)} if self.config.words else {}
            if vector is not None:
                parts, traced = self._parts(j, vector)
                found |= {"parts": parts, "trace": traced, "fidelity": fidelity}
            yield j, found

    def words(self, component: int) -> list[WordEffects]:
        """What the words of the component's examples carry."""
        chosen = examples_of(self.run, self.decomposition, component, self.config.examples)
        examples = [words_of_example(self.run, self.prepared, i) for i, _ in chosen]
        return [
            replace(effects, example=i, held_out=held_out)
            for (i, held_out), effects in zip(chosen, weigh_words(self.leave_out, examples, component), strict=True)
        ]

    def answers(self, component: int) -> Answers | None:
        """What the component does to answers from the vocabulary, for which the run keeps too few probabilities."""
        if not can_read(self.run, self.decomposition) or self.run.manifest.task.labels:
            return None
        top = top_examples(self.decomposition.coefficients[:, component].abs().numpy(), self.run.usable, TOP)
        p = Divergence(self.prepared, self.prompts, np.sort(top).tolist()).probabilities
        return signature(self.run, self.decomposition.components[component], top, self._token, p)

    def _token(self, token: int) -> str:
        return str(self.prepared.model.tokenizer.decode([token]))

    def _vectors(self, components: Sequence[int]) -> Iterator[tuple[int, Parameters, float]]:
        """Components as vectors of parameters, as many at a time as memory allows, and how near they are."""
        source = self.run.source(self.decomposition.kind)
        size = max(1, int(self.config.memory_gb * 1e9 / (4 * self.prepared.selection.size)))
        self.nulls = self._nulls()
        for start in range(0, len(components), size):
            group = list(components[start : start + size])
            mix = torch.eye(len(self.decomposition.components))[group]
            sums, _, cosines = truncate(
                component_sums(self.decomposition, source, mix), {self.decomposition.kind: source}, self.config.fidelity
            )
            vectors = self.lifter.lift(sums)
            for place, j in enumerate(group):
                vector, vectors[place] = vectors[place], {}
                yield j, vector, cosines[place]

    def _nulls(self) -> Array:
        """Mean energies of directions that random groups of examples share."""
        source, generator = self.run.source(self.decomposition.kind), np.random.default_rng([self.config.seed, 5])
        fitted = np.setdiff1d(np.flatnonzero(self.run.usable), self.held_out)
        energies = []
        for _ in range(NULLS):
            vector, weights = group_sum(source, np.sort(generator.permutation(fitted)[:TOP]))
            (lifted,) = self.lifter.lift(RowSums(vector[None], {self.decomposition.kind: weights[None]}))
            energies.append(self.anatomy.energies(lifted))
        return np.mean(energies, 0)

    def _parts(self, component: int, vector: Parameters) -> tuple[Parts, Trace]:
        chosen = examples_of(self.run, self.decomposition, component, self.config.examples)
        measured = [i for i, held_out in chosen if held_out]
        parts = describe(self.anatomy, vector, self.nulls)
        if measured:  # effects count on held-out examples only
            points = check_parts(
                self.prepared, self.anatomy, vector, [self.prompts[i] for i in measured], self.config.seed
            )
            parts = replace(parts, curve=points)
        network, examples = self.prepared.model.network, measured or [i for i, _ in chosen]
        prompts, heads = [self.prompts[i] for i in examples], parts.leading_heads[:VIEWED]
        weights = attention_from_end(network, prompts[0], heads)
        views = [HeadView(*pair) for pair in zip(heads, weights, strict=False)]
        tokens = [self._token(token) for token in prompts[0]]
        sizes = [trace(self.prepared, list(blocks(network)), prompt, vector) for prompt in prompts]
        return parts, Trace(examples[0], tokens, sizes[0], views, examples, *mean_trace(prompts, sizes, tokens))


def examples_of(run: Run, decomposition: Decomposition, component: int, count: int) -> list[tuple[int, bool]]:
    """Examples that use a component most.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        component: Number of the component.
        count: How many examples that it was fitted to, and as many that were held out.

    Returns:
        Number, and whether it was held out, of each: fitted ones first.
    """
    scores = decomposition.scores()[:, component].numpy()
    held_out = np.isin(np.arange(len(scores)), decomposition.notes.held_out)
    parts = [top_examples(scores, run.usable & which, count) for which in (~held_out, held_out)]
    return [(int(i), bool(place)) for place, part in enumerate(parts) for i in part]


def words_of_example(run: Run, prepared: Prepared, example: int) -> Words:
    """The words of one of a run's examples."""
    row = run.table.slice(example, 1).to_pylist()[0]
    fields = {name: row[FIELD + name] for name in prepared.task.fields}
    return read_words(prepared, run.manifest.task.before, row["text"], fields)


def weigh_words(leave_out: LeaveOut, examples: Sequence[Words], component: int) -> list[WordEffects]:
    """How much of a component's coefficient the words of examples carry.

    Args:
        leave_out: The model at work.
        examples: The examples; at most `MOST_WORDS` words or phrases of each are removed one at a time.
        component: Number of the component.

    Returns:
        One for each example. Words of a phrase that is removed as a whole share its effect.
    """
    singles = [phrases(len(each.words)) for each in examples]
    doubles = [list(pairwise(own)) for own in singles]
    spans = [[*own, *((a[0], b[1]) for a, b in pairs)] for own, pairs in zip(singles, doubles, strict=True)]
    some = [n for n, own in enumerate(spans) if own]
    removed = leave_out.remove([examples[n] for n in some], [spans[n] for n in some]) if some else []
    found = [WordEffects(None, False, list(each.places), [0.0] * len(each.words)) for each in examples]
    for n, outcome in zip(some, removed, strict=True):
        effects, own = outcome.effects(component).tolist(), singles[n]
        pairs = [
            Pair(a[0], rounded([both])[0])
            for k, ((a, _), both) in enumerate(zip(doubles[n], effects[len(own) :], strict=True))
            if both - max(effects[k], 0.0) - max(effects[k + 1], 0.0) > TELLS and a[1] - a[0] == 1
        ]
        found[n] = replace(found[n], effects=_by_word(effects, own), pairs=pairs)
    return found


def weigh_text(
    leave_out: LeaveOut, text: str, fields: Mapping[str, str] | None = None, components: Sequence[int] = ()
) -> WeighedText:
    """How much of the coefficients of a text its words carry.

    Args:
        leave_out: The model at work.
        text: Any text.
        fields: Other columns that the prompt names.
        components: Which components; without any, the eight with the largest coefficients.

    Returns:
        The effect of every word on each component; words of a phrase that is removed as a whole share its effect.
    """
    example = read_words(leave_out.prepared, leave_out.run.manifest.task.before, text, fields)
    spans = phrases(len(example.words))
    if not spans:
        return WeighedText(text, [], list(components), [[] for _ in components])
    (outcome,) = leave_out.remove([example], [spans])
    largest = outcome.coefficients.topk(min(8, len(outcome.coefficients)))
    used = [j for j, value in zip(largest.indices.tolist(), largest.values.tolist(), strict=True) if value > 0]
    listed = list(components) or used
    return WeighedText(
        text, list(example.places), listed, [_by_word(outcome.effects(j).tolist(), spans) for j in listed]
    )


def _by_word(effects: Sequence[float], spans: Sequence[Span]) -> list[float]:
    """Effects of spans as effects of their words."""
    return rounded([effects[k] / (stop - start) for k, (start, stop) in enumerate(spans) for _ in range(start, stop)])
