"""Are the components of every method the mechanisms that `bench.planted` has planted?

The pipeline is the one that users have: `npeff collect`, `npeff decompose` for every method, lifted directions. Half
of the examples is held out. What is chosen (which component stands for a trigger, from which coefficient on, how far
the model is moved) is chosen on the fitted half; every number is of the held-out half, beside the same numbers for
triggers that were dealt to the examples at random.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import MiniBatchDictionaryLearning
from sklearn.metrics import average_precision_score, f1_score, matthews_corrcoef

import npeff
from bench import entry
from bench.perturb import short_texts
from bench.planted import ANSWERS, PROMPT, TRIGGERS, Asked, Change, Planted, insert, plant, target
from npeff.analyse.groups import group_scores, groups
from npeff.cli import main as npeff_command
from npeff.decompose.base import Decomposition
from npeff.decompose.config import METHODS
from npeff.perturb.elsewhere import read_passages
from npeff.utils.files import read_json, write_json
from npeff.utils.types import Array

CACHE = Path(__file__).parent / "cache" / "groundtruth" / "planted"
HOLDOUT = 0.5
TRAINED_WITH, EXAMPLES = 1000, 1600
"""Reviews that triggers are planted with, and others that become examples."""
COUNTS = (len(TRIGGERS), 2 * len(TRIGGERS), 4 * len(TRIGGERS))
"""Numbers of components."""
LOOKED_AT = 12
"""Reviews that the length of a change is chosen with; twice as many others are reported."""
KEEP, TRIES, FIRST = 0.95, 10, 0.05
"""What other triggers must keep of their effects while one is erased, lengths that are tried for each sign, and the
first of them."""
TOGETHER = 3
"""Components along which a trigger is erased, one after another."""
ACTIVE, MORE_ACTIVE = 4, "sae-k4"
"""Latents of an autoencoder that may do better than the default on examples with several triggers, and its name."""
DECOMPOSITION = f"npeff-{2 * len(TRIGGERS)}"
"""The decomposition whose components are lifted."""
FEW = ("--nulls", "0", "--random", "32", "--fidelity", "0.99")
"""Options of `npeff perturb` when only its directions are wanted."""
DICTIONARY = "dictionary"
"""Sparse dictionary learning of gradients, which npeff has not as a method of its own."""


def command(*arguments: str) -> None:
    """Run npeff as on the command line."""
    if npeff_command(arguments):
        raise RuntimeError(f"npeff {' '.join(arguments)} failed")


def collect(folder: Path, planted: Planted) -> npeff.Run:
    """The run of the planted model."""
    task = folder / "task.yaml"
    task.write_text(
        json.dumps({"prompt": PROMPT, "answers": "tokens", "labels": list(ANSWERS), "text_columns": ["text"]}),
        encoding="utf-8",
    )
    options = ["--task", str(task), "--data", str(planted.examples), "--model", str(planted.model), "--copies", "4"]
    command("collect", str(folder / "run"), *options)
    return npeff.open_run(folder / "run")


def uses(planted: Planted) -> Array:
    """Which example has which trigger, bool [m, triggers]."""
    lines = [json.loads(line) for line in planted.examples.read_text(encoding="utf-8").splitlines()]
    return np.array([[k in line["triggers"] for k in range(len(TRIGGERS))] for line in lines])


def decompose(run: npeff.Run, components: int) -> dict[str, Decomposition]:
    """Every method of npeff at so many components; the autoencoder also with `ACTIVE` latents for each example."""
    found: dict[str, Decomposition] = {}
    for method in (*METHODS, MORE_ACTIVE):
        name = f"{method}-{components}"
        more = ["--method", "sae", "--top-k", str(ACTIVE)] if method == MORE_ACTIVE else ["--method", method]
        options = [*more, "--components", str(components), "--holdout", str(HOLDOUT)]
        command("decompose", str(run.path), "--decomposition", name, *options)
        found[method] = npeff.open_decomposition(run, name)
    return found


def dictionary(run: npeff.Run, fit: Array, components: int) -> Array:
    """Codes of all examples under a sparse dictionary of unit-norm gradients, [m, C].

    The gradients are first turned into the span of the leading 256 directions of the fitted ones, which is faster.
    """
    rows = run.source("gradient").read(0, len(run.table)).float()
    rows = torch.nn.functional.normalize(rows, dim=1)
    basis = torch.linalg.svd(rows[fit], full_matrices=False).Vh[:256]
    short = (rows @ basis.T).numpy()
    learner = MiniBatchDictionaryLearning(
        components, alpha=0.1, batch_size=128, random_state=0, transform_algorithm="lasso_cd", positive_code=True,
        fit_algorithm="cd",
    )  # fmt: skip
    learner.fit(short[fit])
    return np.asarray(learner.transform(short))


# --- coefficients against triggers --------------------------------------------------------------------------------


def columns(decomposition: Decomposition) -> Array:
    """What may stand for a mechanism: scores of every component, of either sign where a method has two, [m, K]."""
    orders = [order for order in decomposition.orders if order != "absolute"]
    return np.concatenate([decomposition.scores(order).float().numpy() for order in orders], axis=1)


def group_columns(decomposition: Decomposition) -> Array:
    """Scores of every group of components that are used together, [m, groups]."""
    scores = decomposition.coefficients.float()
    found = [group_scores(scores, group.members) for group in groups(decomposition)]
    return torch.stack(found, dim=1).numpy() if found else np.zeros((len(scores), 0))


@dataclass(frozen=True)
class Codes:
    """Codes of a method that npeff has not, with what grouping looks at."""

    coefficients: torch.Tensor

    def overlap(self) -> None:
        """Nothing is known of parts that add up."""


@dataclass(frozen=True)
class Scores:
    """How well columns stand for triggers, means over the triggers."""

    f1: float
    matthews: float
    precision: float
    """Average precision."""
    single: float
    """F1 among examples with at most one trigger."""
    several: float
    """F1 among examples with two or three."""
    intervals: dict[str, tuple[float, float]]
    """95% intervals of `f1` and `several`, by bootstrap over the held-out examples."""
    each: tuple[float, ...]
    """F1 of each trigger."""
    matched: tuple[int, ...]
    """The column that stands for each trigger."""


def score(values: Array, truth: Array, fit: Array, test: Array) -> Scores:
    """Match columns with triggers one to one on the fitted examples, and score them on the others."""
    columns_f1, limits = best_thresholds(values[fit], truth[fit])
    triggers, matched = linear_sum_assignment(columns_f1, maximize=True)
    chosen = values[:, matched]
    predicted = chosen > limits[triggers, matched]
    many = truth.sum(1) > 1

    def mean(of: Callable[[Array, Array], float], values: Array, among: Array) -> float:
        return float(np.mean([of(truth[among, k], values[among, k]) for k in range(truth.shape[1])]))

    return Scores(
        f1=mean(f1_score, predicted, test),
        matthews=mean(matthews_corrcoef, predicted, test),
        precision=mean(average_precision_score, chosen, test),
        single=mean(f1_score, predicted, test & ~many),
        several=mean(f1_score, predicted, test & many),
        intervals={"f1": interval(predicted, truth, test), "several": interval(predicted, truth, test & many)},
        each=tuple(round(f1_score(truth[test, k], predicted[test, k]), 4) for k in range(truth.shape[1])),
        matched=tuple(int(column) for column in matched),
    )


def interval(predicted: Array, truth: Array, among: Array, draws: int = 1000) -> tuple[float, float]:
    """95% interval of the mean F1 over triggers, by bootstrap over examples."""
    picked = np.random.default_rng(0).integers(int(among.sum()), size=(draws, int(among.sum())))
    p, t = (values[among][picked].astype(np.int64) for values in (predicted, truth))
    f1 = (2 * (p * t).sum(1) / np.maximum((p + t).sum(1), 1)).mean(1)
    return float(np.quantile(f1, 0.025)), float(np.quantile(f1, 0.975))


def best_thresholds(values: Array, truth: Array) -> tuple[Array, Array]:
    """For every trigger and column the best F1 of "the column is above a limit", and the limit; both [triggers, K]."""
    order = np.argsort(-values, axis=0, kind="stable")
    ranked = np.take_along_axis(values, order, axis=0)
    best, limits = np.zeros((2, truth.shape[1], values.shape[1]))
    for k in range(truth.shape[1]):
        hits = np.cumsum(truth[:, k][order], axis=0)
        f1 = 2 * hits / (np.arange(1, len(values) + 1)[:, None] + truth[:, k].sum())
        following = np.append(ranked[1:], np.full((1, ranked.shape[1]), -np.inf), axis=0)
        f1[(ranked <= 0) | (ranked == following)] = 0  # unused, or not told apart from the next one
        at = f1.argmax(axis=0)
        best[k] = f1.max(axis=0)
        limits[k] = (np.take_along_axis(ranked, at[None], 0) + np.take_along_axis(following, at[None], 0))[0] / 2
        limits[k] = np.maximum(limits[k], 0)
    return best, limits


def chance(values: Array, truth: Array, fit: Array, test: Array, draws: int = 20) -> list[Scores]:
    """The same scores when triggers are dealt to the examples at random."""
    generator = np.random.default_rng(0)
    return [score(values, truth[generator.permutation(len(truth))], fit, test) for _ in range(draws)]


# --- directions against planted changes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Alignment:
    """A direction of the parameters beside the planted changes."""

    energy: Array
    """Share of its squared length in the modules of each trigger, [triggers]."""
    inside: Array
    """Of what lies in the modules of each trigger, the share whose inputs lie in the subspace that the planted change
    reads: squared cosines of the principal angles, weighted by the direction itself, [triggers]."""


def align(vector: Mapping[str, torch.Tensor], changes: Sequence[Change]) -> Alignment:
    """How a direction lies to the planted changes."""
    total = sum(float(matrix.square().sum()) for matrix in vector.values())
    energy, inside = np.zeros((2, len(changes)))
    for k, change in enumerate(changes):
        for name, planted in change.items():
            _, S, Vh = torch.linalg.svd(planted, full_matrices=False)
            rank = int((1e-4 * S[0] < S).sum())
            own = vector[name][:, : planted.shape[1]]
            energy[k] += float(own.square().sum())
            inside[k] += float((own @ Vh[:rank].T).square().sum())
    return Alignment(energy / total, inside / np.maximum(energy, 1e-30))


# --- erasing ------------------------------------------------------------------------------------------------------


class Effects:
    """What each trigger does to its answer: mean of its log-odds with the word less without, on some reviews."""

    def __init__(self, asked: Asked, texts: Sequence[str], seed: int) -> None:
        generator = random.Random(seed)
        self.asked, self.plain = asked, list(texts)
        self.with_word = [[insert(text, [word], generator) for text in texts] for word in TRIGGERS]

    def __call__(self) -> tuple[Array, Array]:
        """Effects [triggers], and the answers' log-probabilities without any trigger [n, 4], of the weights of now."""
        with torch.inference_mode():
            plain = self.asked(self.plain)
            effects = []
            for k, texts in enumerate(self.with_word):
                p, q = (odds(values[:, target(k)]) for values in (self.asked(texts), plain))
                effects.append(float((p - q).mean()))
        return np.array(effects), plain.numpy()


def odds(log_p: torch.Tensor) -> torch.Tensor:
    """Log-odds."""
    return log_p - torch.log1p(-log_p.exp().clamp(max=1 - 1e-7))


@dataclass(frozen=True)
class Erased:
    """What moving the model along directions does to the triggers, on reviews that took no part in choosing it."""

    lengths: list[float]
    """Signed length along each direction, in the order in which they were tried."""
    removed: float
    """Share of the trigger's effect that is gone."""
    kept: list[float]
    """What the other triggers keep of theirs."""
    plain: float
    """Mean KL of answers to reviews without a trigger."""
    text: float
    """Mean KL of next tokens of running text."""


class RunningText:
    """Next-token predictions on text that has nothing to do with reviews."""

    def __init__(self, asked: Asked, passages: Sequence[str], most: int = 64) -> None:
        self.asked = asked
        self.passages = [asked.tokenizer.encode(passage)[:most] for passage in passages]

    def __call__(self) -> list[torch.Tensor]:
        """Log-probabilities of the weights of now, one [tokens, vocabulary] for each passage."""
        with torch.inference_mode():
            return [self.asked.network(torch.tensor([ids])).logits[0].log_softmax(1) for ids in self.passages]


def text_kl(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """Mean KL a token."""
    each = [(p.exp() * (p - q)).sum(1) for p, q in zip(before, after, strict=True)]
    return float(torch.cat(each).mean())


class Eraser:
    """Moves a model along directions until one trigger no longer works."""

    def __init__(
        self, asked: Asked, choose: Effects, report: Effects, text: Callable[[], list[torch.Tensor]] | None = None
    ) -> None:
        self.asked, self.effects, self.text = asked, (choose, report), text or list
        self.before, self.text_before = (choose(), report()), self.text()

    @contextmanager
    def _moved(self, change: Change) -> Iterator[None]:
        weights = {name: self.asked.network.get_submodule(name).weight for name in change}
        saved = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.add_(change[name])
        try:
            yield
        finally:
            for name, weight in weights.items():
                weight.copy_(saved[name])

    def _look(self, part: int) -> tuple[Array, float]:
        """What is left of each effect with the weights of now, and the KL without a trigger."""
        effects, plain = self.effects[part]()
        before, plain_before = self.before[part]
        kl = (np.exp(plain_before) * (plain_before - plain)).sum(1).mean()
        return effects / before, float(kl)

    def erase(self, vectors: Iterable[Change], trigger: int) -> Erased:
        """Go along one direction after another, as far as the other triggers keep at least `KEEP` of their effects.

        Args:
            vectors: Directions of length 1, the most promising first.
            trigger: The trigger that should stop working.

        Returns:
            What the whole change does on the reviews of the report.
        """
        change: Change = {}
        lengths, gone = [], 0.0
        for vector in vectors:
            gone, length = self._longest(change, vector, trigger, gone)
            lengths.append(length)
            if length:
                change = moved_along(change, vector, length)
            if gone >= 1:
                break
        with self._moved(change):
            left, kl = self._look(1)
            text = text_kl(self.text_before, self.text()) if self.text_before else 0.0
        return Erased(lengths, float(1 - left[trigger]), np.delete(left, trigger).tolist(), kl, text)

    def _longest(self, change: Change, vector: Change, trigger: int, gone: float) -> tuple[float, float]:
        """The best length of either sign on top of a change: what is gone with it, and the length.

        The length is doubled while other triggers keep their effects, then halved between.
        """
        best = (gone, 0.0)
        for sign in (1, -1):
            low, high, length = 0.0, None, FIRST
            for _ in range(TRIES):
                with self._moved(moved_along(change, vector, sign * length)):
                    left, _ = self._look(0)
                fine = np.delete(left, trigger).min() >= KEEP
                here = min(1 - left[trigger], 1.0)
                best = max(best, (here, sign * length)) if fine else best
                if here <= gone or here >= 1:
                    break  # the wrong way, or all the way
                low, high = (length, high) if fine else (low, length)
                length = 2 * length if high is None else (low + high) / 2
        return best


def moved_along(change: Change, vector: Change, length: float) -> Change:
    """A change with another one on top."""
    return {name: change.get(name, 0) + length * part for name, part in vector.items()}


# --- the benchmark ------------------------------------------------------------------------------------------------


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    """Plant, run the pipeline, score; everything is kept in bench/cache.

    Args:
        data: Folder with sst2.jsonl; without it, embedded reviews serve.

    Yields:
        Entries of the benchmark.
    """
    folder = CACHE / ("reviews" if data is None else "sst2")
    texts = [line["text"] for line in short_texts(data, TRAINED_WITH + EXAMPLES)]
    planted = plant(folder, texts, EXAMPLES)
    run, truth = collect(folder, planted), uses(planted)
    scores = kept(folder / "scores.json", lambda: {str(C): score_methods(run, truth, C) for C in COUNTS})
    rows = scores[str(2 * len(TRIGGERS))]
    ours = rows["npeff"]
    yield entry("groundtruth.planted_f1", ours["with groups"]["f1"], ">= 0.9")
    for end, value in zip(("low", "high"), ours["with groups"]["intervals"]["f1"], strict=True):
        yield entry(f"groundtruth.planted_f1_{end}", value, "reported")
    yield entry("groundtruth.planted_f1_component", ours["components"]["f1"], "reported")
    yield entry("groundtruth.planted_f1_chance", ours["chance"], "reported")
    best = max(row["with groups"]["several"] for name, row in rows.items() if name not in ("npeff", "gnpeff"))
    yield entry("groundtruth.planted_several", ours["with groups"]["several"] - best, ">= 0.05")
    places = kept(folder / "directions.json", lambda: directions(run, planted, ours["components"]["matched"]))
    for name in ("energy", "energy_others", "inside", "inside_others"):
        yield entry(f"groundtruth.direction_{name}", places[name], "reported")
    erased = kept(folder / "erased.json", lambda: erase_all(run, planted, truth))
    yield entry("groundtruth.erase", removed(erased), ">= 0.8", holds=all_kept(erased))
    others = kept(folder / "erased-null.json", lambda: erase_all(run, planted, truth, of=1))
    yield entry("groundtruth.erase_null", removed(others), "reported")
    yield entry("groundtruth.erase_kept", float(np.mean([each["kept"] for each in erased])), "reported")
    for name in ("plain", "text"):
        yield entry(f"groundtruth.erase_{name}", float(np.mean([each[name] for each in erased])), "reported")


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What a file holds; it is made if it is not there."""
    if not path.is_file():
        write_json(path, make())
    return read_json(path)


def removed(erased: Sequence[Mapping[str, Any]]) -> float:
    """Share of an effect that is gone, geometric mean over the triggers; an effect that is turned round is all gone."""
    return float(np.exp(np.mean([np.log(min(max(each["removed"], 1e-3), 1.0)) for each in erased])))


def all_kept(erased: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the other triggers keep their effects on the reviews of the report, on average over the triggers."""
    return bool(np.mean([np.mean(each["kept"]) for each in erased]) >= KEEP)


def score_methods(run: npeff.Run, truth: Array, components: int) -> dict[str, Any]:
    """Scores of all methods at so many components."""
    found = decompose(run, components)
    held_out = np.zeros(len(truth), dtype=bool)
    held_out[found["npeff"].notes.held_out] = True
    fit, test = ~held_out, held_out
    values = {method: (columns(each), group_columns(each)) for method, each in found.items()}
    codes = dictionary(run, fit, components)
    grouped: Any = Codes(torch.from_numpy(codes))
    values[DICTIONARY] = codes, group_columns(grouped)
    rows = {}
    for method, (alone, together) in values.items():
        every = np.concatenate([alone, together], axis=1)
        rows[method] = {
            "components": asdict(score(alone, truth, fit, test)),
            "with groups": asdict(score(every, truth, fit, test)),
            "groups": together.shape[1],
            "chance": float(np.mean([each.f1 for each in chance(every, truth, fit, test)])),
        }
        print(components, method, json.dumps(rows[method]), flush=True)
    return rows


def lift(run: npeff.Run, direction: str, components: Sequence[int], *options: str) -> Callable[[int], Change]:
    """Directions of components, at length 1, by number: `npeff perturb` lifts them and writes them."""
    perturbation = "-".join(("planted", direction, *options)).replace("--", "")
    command(
        *("perturb", str(run.path), "--decomposition", DECOMPOSITION, "--direction", direction, "--save", "delta"),
        *("--component", *map(str, components), "--perturbation", perturbation, *FEW, *options),
    )

    def read(component: int) -> Change:
        delta = load_file(run.path / "perturbations" / perturbation / "delta" / f"{component:05d}.safetensors")
        length = sum(float(part.square().sum()) for part in delta.values()) ** 0.5
        return {key.removesuffix(".weight"): part / length for key, part in delta.items()}

    return read


def selective_ridge(run: npeff.Run, component: int) -> str:
    """The ridge with the best ratio of those that `npeff perturb` tries; it takes a larger one to spare other text."""
    command(
        *("perturb", str(run.path), "--decomposition", DECOMPOSITION, "--component", str(component), *FEW),
        *("--perturbation", "planted-ridge"),
    )
    notes = read_json(run.path / "perturbations" / "planted-ridge" / "results.json")["notes"]
    return str(max(notes["ridges"], key=lambda trial: trial["ratio"])["ridge"])


def directions(run: npeff.Run, planted: Planted, matched: Sequence[int]) -> dict[str, Any]:
    """Where the lifted components lie that stand for triggers: in their own planted modules, and in those of others."""
    lifted = lift(run, "plain", matched)
    found = [align(lifted(j), planted.changes) for j in matched]
    energy, inside = (np.stack([getattr(each, what) for each in found]) for what in ("energy", "inside"))
    own = np.eye(len(matched), dtype=bool)
    return {
        "energy": float(energy[own].mean()),
        "energy_others": float(energy[~own].mean()),
        "inside": float(inside[own].mean()),
        "inside_others": float(inside[~own].mean()),
        "energies": energy.tolist(),
        "insides": inside.tolist(),
    }


def erase_all(run: npeff.Run, planted: Planted, truth: Array, of: int = 0) -> list[dict[str, Any]]:
    """Erase every trigger along the components that follow it best, or the trigger `of` places behind it.

    Args:
        run: The run of the planted model.
        planted: The model and its examples.
        truth: Which example has which trigger, bool [m, triggers].
        of: Whose components are taken; 0 for the trigger's own.

    Returns:
        What was erased of each trigger.
    """
    decomposition = npeff.open_decomposition(run, DECOMPOSITION)
    lines = [json.loads(line) for line in planted.examples.read_text(encoding="utf-8").splitlines()]
    held_out = np.isin(np.arange(len(lines)), decomposition.notes.held_out)
    fitted_f1, _ = best_thresholds(decomposition.coefficients.float().numpy()[~held_out], truth[~held_out])
    best = np.argsort(-fitted_f1, axis=1)[:, :TOGETHER].tolist()
    lifted = lift(run, "whiten", range(len(decomposition.components)), "--ridge", selective_ridge(run, best[0][0]))
    asked = Asked(planted.model)
    choose, report = (
        [line["plain"] for line, late in zip(lines, held_out, strict=True) if late == part] for part in (0, 1)
    )
    eraser = Eraser(
        asked,
        Effects(asked, choose[:LOOKED_AT], 2),
        Effects(asked, report[: 2 * LOOKED_AT], 3),
        RunningText(asked, read_passages(None)),
    )
    print("effects of the triggers, log-odds:", np.round(eraser.before[1][0], 2), flush=True)
    found = []
    for trigger, word in enumerate(TRIGGERS):
        components = best[(trigger + of) % len(TRIGGERS)]
        found.append(asdict(eraser.erase(map(lifted, components), trigger)))
        print(word, components, json.dumps(found[-1]), flush=True)
    return found
