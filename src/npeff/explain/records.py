"""What `npeff explain` writes: RUN/explanations/NAME/names.json, and components/00000.json for each component."""

import hashlib
import json
from dataclasses import field
from pathlib import Path
from typing import Any

from npeff.analyse.answers import Answers
from npeff.decompose.base import CONFIG
from npeff.explain.names import Name
from npeff.explain.parts import Part, Parts
from npeff.store.layout import EXPLANATIONS, decomposition_folder
from npeff.store.run import Run
from npeff.utils import Record, read_object, read_record

NAMES = "names.json"


class Pair(Record):
    """Two neighbouring words that carry more together than one at a time."""

    first: int
    """Place of the first of them."""
    effect: float
    """Share of the coefficient that is lost without both."""


class WordEffects(Record):
    """What each word of an example carries of a component."""

    example: int | None
    """Number of the example; None for a text that is none of the run's."""
    held_out: bool
    """Whether the component was not fitted to it."""
    places: list[tuple[int, int]]
    """Where each word is in the text: first character, and that behind the last."""
    effects: list[float]
    """Share of the coefficient that is lost without each word; below 0 where it grows."""
    pairs: list[Pair] = field(default_factory=list)
    """Pairs that one word alone does not tell of, as negations."""


class WeighedText(Record):
    """What each word of a text carries of the components that it uses."""

    text: str
    """The text."""
    places: list[tuple[int, int]]
    """Where each word is in it: first character, and that behind the last."""
    components: list[int]
    """The components."""
    effects: list[list[float]]
    """Share of each component's coefficient that is lost without each word."""


class HeadView(Record):
    """What the last token of an example looks at in a head."""

    head: Part
    """The head."""
    weights: list[float]
    """Attention to each position; they add up to 1."""


class Trace(Record):
    """How a change along a component travels through the model, for one example and for the mean of several."""

    example: int
    """The example."""
    tokens: list[str]
    """Its tokens."""
    sizes: list[list[float]]
    """Size of the derivative of the residual stream behind each block ÷ the stream's own, [layers][positions]."""
    attention: list[HeadView]
    """Of the leading heads."""
    examples: list[int] = field(default_factory=list)
    """Those that the mean is of."""
    places: list[str] = field(default_factory=list)
    """The tokens that all of them begin with, equal parts of the rest, the tokens that all end with."""
    mean: list[list[float]] = field(default_factory=list)
    """Mean of `sizes`, [layers][places]."""


class Explanation(Record):
    """What is inside a component (components/00000.json)."""

    component: int
    """Its number."""
    key: str
    """Which run, decomposition and settings it belongs to."""
    answers: Answers | None = None
    """What it does to the answers; None where the run has no Fisher rows."""
    words: list[WordEffects] | None = None
    """What the words of its examples carry; None if that was not asked for."""
    parts: Parts | None = None
    """Its heads and neurons; None if that was not asked for, or for components that are no directions of parameters."""
    trace: Trace | None = None
    """How a change travels; goes with `parts`."""
    fidelity: float | None = None
    """Cosine of the lifted direction with the component."""


class Names(Record):
    """Names of all components (names.json)."""

    key: str
    """Which run and decomposition they belong to."""
    names: list[Name]
    """One for each component."""
    answers: list[Answers | None]
    """What each does to the answers of its top examples."""


class Case(Record):
    """A variant of an example."""

    example: int
    """Number of the example."""
    held_out: bool
    """Whether the component was not fitted to it."""
    variant: str
    """What was done to it."""
    text: str
    """Its text then."""
    coefficient: float
    """Coefficient of the component."""
    answer: str
    """The model's answer."""
    probability: float
    """What the model gives it."""


class CaseStudy(Record):
    """What `npeff casestudy` found (casestudies/00000.json)."""

    component: int
    """Number of the component."""
    key: str
    """Which run and decomposition it belongs to."""
    cases: list[Case]
    """Variants, each example's own text first."""


class Told(Record):
    """How well a judge tells held-out users of a component from others."""

    by: str
    """`theme`; `words` of its name; `other`: what another component is called; `nothing`: the texts alone."""
    description: str
    """What the judge was told."""
    detection: float | None
    """Balanced accuracy of "which of these texts fit?"; 0.5 by chance. None if it was not asked or not answered."""
    intruder: float | None
    """How often it found the one text of five that does not use the component; 0.2 by chance."""


class Judged(Record):
    """What `npeff study detect` found (judged/00000.json)."""

    component: int
    """Number of the component."""
    key: str
    """Which run and decomposition it belongs to."""
    model: str
    """The judge."""
    told: list[Told]
    """One for each description."""


def explanations_folder(run: Run, name: str) -> Path:
    """Where the explanations of a decomposition are."""
    return run.path / EXPLANATIONS / name


def key_of(run: Run, name: str, *options: object) -> str:
    """Digest of a run, a decomposition and options."""
    tensors = read_object(decomposition_folder(run.path, name) / CONFIG).get("sha256")
    made_of = [run.fingerprint, run.manifest.examples_sha256, tensors, *map(str, options)]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def read_names(run: Run, name: str) -> Names | None:
    """The names of a decomposition as it is now; None if there are none."""
    path = explanations_folder(run, name) / NAMES
    names = read_record(Names, path) if path.is_file() else None
    return names if names is not None and names.key == key_of(run, name) else None


def read_explanations(run: Run, name: str) -> dict[int, Explanation]:
    """What is known about the inside of components.

    Args:
        run: The run.
        name: Name of a decomposition.

    Returns:
        Component → its explanation; those of a decomposition that was replaced are left out.
    """
    return _read_all(Explanation, run, name, "components")


def read_case_studies(run: Run, name: str) -> dict[int, CaseStudy]:
    """Component → its case study, as `read_explanations` reads them."""
    return _read_all(CaseStudy, run, name, "casestudies")


def read_judged(run: Run, name: str) -> dict[int, Judged]:
    """Component → what a judge tells by its descriptions, as `read_explanations` reads them."""
    return _read_all(Judged, run, name, "judged")


def _read_all(kind: Any, run: Run, name: str, below: str) -> dict[int, Any]:
    files, key = sorted((explanations_folder(run, name) / below).glob("[!.]*.json")), key_of(run, name)
    return {each.component: each for file in files if (each := read_record(kind, file)).key == key}
