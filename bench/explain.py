"""What explanations of components are worth with SmolLM2-135M on short reviews, measured on held-out examples.

The run is that of `bench.perturb`: short SST2 phrases (of `NPEFF_BENCH_DATA`; else embedded reviews), half of them held
out. Components are drawn at random from those that enough held-out examples use. What was measured of each is kept in
bench/cache/explain, so that a stopped benchmark continues; remove the folder to measure again. NPEFF_BENCH_RUN names a
finished run to take instead, which is only read.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from bench import entry
from bench.perturb import CACHE as PERTURB_CACHE
from bench.perturb import SCALE, prepare
from npeff.analyse.answers import change_of_answers
from npeff.analyse.ranking import top_examples
from npeff.analyse.run import read_examples
from npeff.collect.session import Prepared, collect_prompts, prepare_run, read_prompts
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.explain.names import TOLD, Lexicon, give_name
from npeff.explain.parts import RANDOM_AT, Anatomy, check_parts
from npeff.explain.run import words_of_example
from npeff.explain.words import LeaveOut, Removed, Words, leave_out_exactly, phrases
from npeff.perturb.lift import Lifter, Parameters, component_sums, scale_to_unit, truncate
from npeff.perturb.weights import EditedWeights
from npeff.store.run import Run
from npeff.utils.files import read_json, write_json
from npeff.utils.types import Array

CACHE = Path(__file__).parent / "cache" / "explain"
COMPONENTS = 12
EXAMPLES = 3
"""Held-out examples of each component whose words are weighed."""
FEWEST_WORDS = 6
"""Words of an example: of four, any one is a quarter of the text, and a random one carries as much."""
MEASURED = 8
"""Held-out examples of each component whose answers are measured."""
FIDELITY = 0.9
TOGETHER = 2
STEP = 3e-4
"""Length of a change at which answers are measured; log-probabilities change by about a hundredth."""
TIMED = 6
"""Components whose examples' words are timed."""


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    given = os.environ.get("NPEFF_BENCH_RUN")
    source = ("reviews" if data is None else "sst2", f"scale-{SCALE}")
    run = Run.open(Path(given)) if given else prepare(PERTURB_CACHE.joinpath(*source), data)
    folder = CACHE / run.fingerprint[:12]
    decomposition = open_decomposition(run) if given else open_decomposition(run, "npeff")
    yield from names(run, decomposition, folder)
    work = Work(run, decomposition)
    words = [cached(folder / f"words-{j:05d}.json", lambda j=j: work.words(j)) for j in work.components]  # type: ignore[misc]
    pairs = [pair for each in words for pair in each]
    yield from with_interval("explain.words_agreement", np.array([agreement(*pair) for pair in pairs]), ">= 0.8")
    generator = np.random.default_rng(0)
    shuffled = [agreement(generator.permutation(shown).tolist(), exact) for shown, exact in pairs for _ in range(100)]
    yield entry("explain.words_agreement_null", statistics.fmean(shuffled), "reported")
    falls = np.array([[exact[int(np.argmax(shown))], max(exact), statistics.fmean(exact)] for shown, exact in pairs])
    first, best, anyone = falls.mean(0)
    yield entry("explain.words_deletion", first / anyone, ">= 2.5")
    drawn = falls[generator.integers(len(falls), size=(2000, len(falls)))].mean(1)
    for name, share in (("low", 0.025), ("high", 0.975)):
        value = float(np.quantile(drawn[:, 0] / drawn[:, 2], share))
        yield entry(f"explain.words_deletion_{name}", value, "reported")
    yield entry("explain.words_deletion_exact", best / anyone, "reported")
    yield entry("explain.words_cost", cached(folder / "cost.json", work.words_cost), "<= 0.5")
    parts = work.all_parts(folder)
    yield entry("explain.answers_error", statistics.fmean(each["error"] for each in parts), "<= 0.05")
    ratios = np.log([each["kept"] / each["random"] for each in parts])
    for each in with_interval("explain.parts_sufficiency", ratios, "reported"):
        yield each | {"value": float(np.exp(each["value"]))}
    yield entry("explain.parts_kept", statistics.fmean(each["kept"] for each in parts), "reported")


def cached(path: Path, measure: Callable[[], Any]) -> Any:
    if not path.is_file():
        write_json(path, measure())
    return read_json(path)


def agreement(shown: Sequence[float], exact: Sequence[float]) -> float:
    """Spearman's correlation; 0 where one of both does not tell the words apart."""
    found = float(spearmanr(shown, exact).statistic) if np.ptp(shown) and np.ptp(exact) else 0.0
    return found


def with_interval(name: str, values: Array, bar: str) -> Iterator[dict[str, Any]]:
    """A mean, and the ends of its 95% interval by bootstrap."""
    yield entry(name, float(values.mean()), bar)
    for end, value in zip(("low", "high"), bootstrap(values), strict=True):
        yield entry(f"{name}_{end}", value, "reported")


def bootstrap(values: Array) -> tuple[float, float]:
    drawn = np.random.default_rng(0).choice(values, (2000, len(values))).mean(1)
    return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def names(run: Run, decomposition: Decomposition, folder: Path) -> Iterator[dict[str, Any]]:
    """Names of all components by their words, and by the words of permuted coefficients, on held-out examples."""
    held_out, examples = np.array(decomposition.notes.held_out), read_examples(run)
    lexicon = Lexicon(run.table["text"].to_pylist(), np.setdiff1d(np.flatnonzero(run.usable), held_out))
    generator = np.random.default_rng(0)

    def told(scores: Callable[[int], Array]) -> list[float]:
        every = (
            give_name(j, scores(j), lexicon, examples, held_out).detection for j in range(len(decomposition.components))
        )
        return [found for found in every if found is not None]

    W = decomposition.coefficients.numpy()
    found = cached(folder / "names.json", lambda: told(lambda j: W[:, j]))
    yield from with_interval("explain.names_detection", np.array(found), ">= 0.6")
    null = cached(folder / "names-null.json", lambda: told(lambda j: generator.permutation(W[:, j])))
    yield entry("explain.names_detection_null", statistics.fmean(null), "reported")


class Work:
    """The model at work on components that are drawn at random."""

    def __init__(self, run: Run, decomposition: Decomposition) -> None:
        self.run, self.decomposition = run, decomposition
        self.prepared: Prepared = prepare_run(run, "cpu")
        self.held_out = np.isin(np.arange(len(run.table)), decomposition.notes.held_out) & run.usable
        self.lengths = np.array([len(text.split()) for text in run.table["text"].to_pylist()])
        # from the end: the settings of the short way were tried on components at the beginning
        shuffled = np.random.default_rng(0).permutation(len(decomposition.components))[::-1].tolist()
        self.components = [j for j in shuffled if len(self.examples(j, TOLD)) == TOLD][:COMPONENTS]
        self.leave_out = LeaveOut(run, decomposition, self.prepared)
        self.prompts = read_prompts(run, self.prepared)

    def examples(self, component: int, count: int, words: int = 0) -> list[int]:
        """The held-out examples that use a component most, of at least so many words."""
        scores = self.decomposition.coefficients[:, component].numpy()
        return top_examples(scores, self.held_out & (self.lengths >= words), count).tolist()

    def _words(self, component: int) -> tuple[list[Words], list[Any]]:
        chosen = self.examples(component, EXAMPLES, FEWEST_WORDS)
        examples = [words_of_example(self.run, self.prepared, i) for i in chosen]
        return examples, [phrases(len(each.words)) for each in examples]

    def words(self, component: int) -> list[tuple[list[float], list[float]]]:
        """For each example, what is shown of its words, and what exact leave-one-out gives."""
        examples, spans = self._words(component)
        exact = [
            leave_out_exactly(self.run, self.decomposition, self.prepared, *pair)
            for pair in zip(examples, spans, strict=True)
        ]
        both: tuple[list[Removed], list[Removed]] = (self.leave_out.remove(examples, spans), exact)
        return [tuple(each.effects(component).tolist() for each in pair) for pair in zip(*both, strict=True)]  # type: ignore[misc]

    def words_cost(self) -> float:
        """Time of all words of the drawn examples ÷ that of collecting as many examples of the same length.

        Both go through the model in batches of the run's own size. Times of the process, since machines are shared.
        """
        drawn = [self._words(j) for j in self.components[:TIMED]]
        examples, spans = ([each for part in column for each in part] for column in zip(*drawn, strict=True))
        prompts = [each.tokens for each, own in zip(examples, spans, strict=True) for _ in own]
        self.leave_out.remove(examples[:2], spans[:2])
        collect_prompts(self.prepared, prompts[:2], [0, 0])
        ours = seconds(lambda: self.leave_out.remove(examples, spans))
        return ours / seconds(lambda: collect_prompts(self.prepared, prompts, [0] * len(prompts)))

    def all_parts(self, folder: Path) -> list[dict[str, float]]:
        """What is measured along each lifted component; a few are lifted together."""
        paths = {j: folder / f"parts-{j:05d}.json" for j in self.components}
        missing = [j for j, path in paths.items() if not path.is_file()]
        source, kind = self.run.source(self.decomposition.kind), self.decomposition.kind
        for start in range(0, len(missing), TOGETHER):
            group = missing[start : start + TOGETHER]
            mix = torch.eye(len(self.decomposition.components))[group]
            sums, _, cosines = truncate(component_sums(self.decomposition, source, mix), {kind: source}, FIDELITY)
            vectors = Lifter(self.run, self.prepared, self.prompts).lift(sums)
            for place, j in enumerate(group):
                vector, vectors[place] = vectors[place], {}
                write_json(paths[j], {**self.parts(j, vector, sums.vectors[place]), "fidelity": cosines[place]})
        return [read_json(path) for path in paths.values()]

    def parts(self, component: int, vector: Parameters, sketched: torch.Tensor) -> dict[str, float]:
        """Along a lifted component: error of predicted answers, and what leading and random parts keep."""
        length = scale_to_unit(vector)
        chosen = sorted(self.examples(component, MEASURED))
        predicted = change_of_answers(self.run, chosen, sketched[None] / length)[:, 0]
        model, asked = self.prepared.collector.answer_model, [self.prompts[i] for i in chosen]
        with EditedWeights(self.prepared.selection.modules) as weights, torch.inference_mode():
            sides = []
            for sign in (1, -1):
                weights.add(vector, sign * STEP)
                sides.append(model.logits(asked)[0].double().log_softmax(1))
        measured = (sides[0] - sides[1]) / (2 * STEP)
        anatomy = Anatomy(self.prepared.model.network, self.prepared.selection.modules)
        points = check_parts(self.prepared, anatomy, vector, asked, component)
        point = next(each for each in points if each.parts == RANDOM_AT)
        assert point.random is not None
        error = float((predicted - measured).norm() / measured.norm())
        return {
            "error": error,
            "kept": point.kept,
            "random": point.random,
            "energy": point.energy,
        }


def seconds(call: Callable[[], Any]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin
