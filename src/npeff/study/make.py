"""`npeff study make`: forms for a blind study of a run's components.

A form shows two kinds of groups: top examples of components that are drawn at random, and as controls texts that are
drawn at random.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import yaml

from npeff.analyse.ranking import distinct, top_examples
from npeff.decompose.run import open_decomposition
from npeff.explore.themes import Themes
from npeff.store.examples import encode
from npeff.store.layout import choose_decomposition
from npeff.store.run import Run
from npeff.store.schema import AskedTask
from npeff.study.config import MakeConfig
from npeff.study.kit import GROUPS, KEY, Group, Key, KeyEntry, Kit, Sample
from npeff.tasks.config import FIELD
from npeff.utils import Record, UserError, from_dict, read_object, to_dict, write_record, write_text

LONGEST = 700
"""Characters of a text that are shown."""
CUT = " … [cut]"
NOTE = """This directory says which groups of the kit are components and which are random texts.
Keep it from the annotators until all forms are in: hand out only the form.
"""
_LISTED = 20
"""Answers of a task that are all listed; of more than these a few are."""
_FORM = Path(__file__).with_name("form")
SMALLER = "Ask for fewer --groups or --forms, or a smaller --size."


def make(config: MakeConfig) -> Path:
    """Write a kit; the same config and run give the same files.

    Args:
        config: Options of the command.

    Returns:
        Directory of the kit.
    """
    run = Run.open(config.run)
    names = list(config.decomposition) or [choose_decomposition(run.path)]
    about = config.about or about_task(run.manifest.task)
    pool, scores = Pool(config, run), {name: open_decomposition(run, name).scores() for name in names}
    dealt = choose_groups(config, pool, scores)
    groups = tuple(Group(entry.number, form, pool.shown(entry.examples)) for form, entry in dealt)
    preamble = tuple(text.format(size=config.size, about=about) for text in TEXTS.preamble)
    kit = Kit(preamble, TEXTS.samples, groups)
    tensors = {name: Themes(run, name).fingerprint for name in names}
    options = {option: value for option, value in to_dict(config).items() if option != "out"}
    key = Key(kit.id, run.fingerprint, tensors, tuple(entry for _, entry in dealt), options)
    out = Path(config.out)
    _write(out, kit, key)
    forms = f"{len(kit.forms)} form{'s' * (len(kit.forms) > 1)}"
    print(f"{len(groups)} groups of {config.size} texts in {forms}, about {' and '.join(names)}, in {out}")
    print(f"Hand out {out}/*.html. Keep {out / KEY} to yourself; `npeff study score {out} FORM ...` uses it.")
    return out


def shown_texts(table: pa.Table) -> list[str]:
    """What annotators see of each example.

    Args:
        table: Example table of the run, m rows.

    Returns:
        Its text and the other columns of its prompt, cut where this is very long, [m].
    """
    texts = table["text"].to_pylist()
    for name in (name for name in table.column_names if name.startswith(FIELD)):
        field = name.removeprefix(FIELD)
        texts = [f"{text}\n{field}: {value}" for text, value in zip(texts, table[name].to_pylist(), strict=True)]
    stripped = (text.strip() or "(empty)" for text in texts)
    return [text if len(text) <= LONGEST else text[: LONGEST - len(CUT)].rstrip() + CUT for text in stripped]


# --- which groups -----------------------------------------------------------------------------------------------------


class Pool:
    """The examples that may be shown, and how groups are drawn from them."""

    def __init__(self, config: MakeConfig, run: Run) -> None:
        self.size, self.random = config.size, np.random.default_rng(config.seed)
        self.texts, self.usable = shown_texts(run.table), run.usable
        self.codes = encode(pa.chunked_array([self.texts], pa.string()))[0]  # int64 [m]: which texts are the same

    def shown(self, examples: Sequence[int]) -> tuple[str, ...]:
        """The texts of some examples."""
        return tuple(self.texts[i] for i in examples)

    def top(self, scores: torch.Tensor) -> tuple[int, ...]:
        """The best examples by `scores` [m] with distinct texts; too few for a group if fewer are above zero."""
        order = top_examples(scores.float().cpu().numpy(), self.usable)
        return tuple(distinct(order, self.codes, self.size).tolist())

    def tops(self, name: str, scores: torch.Tensor, count: int) -> list[KeyEntry]:
        """Top examples of random components that have enough distinct texts.

        Args:
            name: Name of the decomposition.
            scores: How much each example uses each of its components, [m, C].
            count: How many components to draw.

        Returns:
            A group for each of them, without a number yet.

        Raises:
            UserError: There are too few components.
        """
        groups: list[KeyEntry] = []
        for component in self.random.permutation(scores.shape[1]).tolist():
            top = self.top(scores[:, component]) if len(groups) < count else ()
            if len(top) == self.size:
                groups.append(KeyEntry(0, name, component, top))
        if len(groups) < count:
            raise UserError(
                f"{name} has {len(groups)} components with {self.size} distinct active texts to choose from; {count} "
                f"are needed. {SMALLER}"
            )
        return groups

    def controls(self, count: int, without: Sequence[int]) -> list[KeyEntry]:
        """Groups of random examples; no text occurs twice in them.

        Args:
            count: How many groups.
            without: Examples whose texts are not to occur.

        Returns:
            The groups, without numbers yet.

        Raises:
            UserError: There are too few texts.
        """
        free = np.flatnonzero(self.usable & ~np.isin(self.codes, self.codes[list(without)]))
        free = distinct(self.random.permutation(free), self.codes)
        needed = count * self.size
        if len(free) < needed:
            raise UserError(
                f"{count} control groups need {needed} distinct texts beside those of the components; the run has "
                f"{len(free)}. {SMALLER}"
            )
        groups = free[:needed].reshape(count, self.size).tolist()
        return [KeyEntry(0, None, None, tuple(examples)) for examples in groups]


Dealt = list[tuple[int, KeyEntry]]
"""Groups with the form that each is in, in the order in which they are shown."""


def choose_groups(config: MakeConfig, pool: Pool, scores: dict[str, torch.Tensor]) -> Dealt:
    """Draw all groups of a kit.

    Args:
        config: Options of the command.
        pool: The examples that may be shown.
        scores: Name of each decomposition → how much each example uses each of its components, [m, C].

    Returns:
        All groups with the form that each is in.
    """
    total, tops = config.forms * (config.groups - config.random_groups), []
    for place, (name, of_components) in enumerate(scores.items()):
        tops += pool.tops(name, of_components, total // len(scores) + (place < total % len(scores)))
    shown = [example for top in tops for example in top.examples]
    controls = pool.controls(config.forms * config.random_groups, shown)
    return deal(pool.random, tops, controls, config.forms)


def deal(random: np.random.Generator, tops: list[KeyEntry], controls: list[KeyEntry], forms: int) -> Dealt:
    """Put groups into forms, each with as many tops and controls as the others, in random order.

    The examples of a group are shuffled too, so that the best of a component does not always come first.

    Args:
        random: Generator to draw with.
        tops: Groups of top examples, without numbers yet.
        controls: Groups of random examples, without numbers yet.
        forms: How many forms.

    Returns:
        The form of each group and the group with its number, in the order in which they are shown.
    """
    dealt: Dealt = []
    tops = [tops[i] for i in random.permutation(len(tops))]
    for form in range(forms):
        groups = tops[form::forms] + controls[form::forms]
        for i in random.permutation(len(groups)):
            shuffled = tuple(random.permutation(np.array(groups[i].examples)).tolist())
            dealt.append((form + 1, replace(groups[i], number=len(dealt) + 1, examples=shuffled)))
    return dealt


# --- what annotators read, and how it is shown ------------------------------------------------------------------------


def _asset(name: str) -> str:
    return (_FORM / name).read_text(encoding="utf-8")


class Texts(Record):
    """What annotators read, with {names} to be filled in."""

    preamble: tuple[str, ...]
    """Paragraphs before the groups."""
    about: dict[str, str]
    """Built-in task → what its texts are."""
    samples: tuple[Sample, ...]
    """Groups with their answers."""


TEXTS = from_dict(Texts, yaml.safe_load(_asset("texts.yaml")))


def about_task(task: AskedTask) -> str:
    """What the texts of a run are.

    Args:
        task: The task as the run's manifest has it.

    Returns:
        A sentence or two.

    Raises:
        UserError: The run has no task that says it.
    """
    if not task.prompt:
        raise UserError("The run has no task that says what its texts are: say it with --about.")
    labels = task.labels
    listed = ", ".join(labels if len(labels) <= _LISTED else labels[:3])
    if task.name in TEXTS.about:
        return TEXTS.about[task.name].format(labels=listed, count=len(labels))
    prompt = " ".join(task.prompt.replace("{text}", "[text]").split())
    sentence = f"The texts belong to the task “{task.name}”. A language model sees each of them as: {prompt}"
    if not labels:
        return sentence
    choice = f"{len(labels)} answers, such as" if len(labels) > _LISTED else "these answers:"
    return f"{sentence} It chooses one of {choice} {listed}."


def render(kit: Kit, form: int) -> str:
    """The page of one form.

    Args:
        kit: The kit.
        form: Number of the form.

    Returns:
        HTML, ASCII only.
    """
    shown = replace(kit, kit=kit.id, groups=tuple(kit.of_form(form)))
    # without "<" no text can end the element that the data stand in
    data = json.dumps({**to_dict(shown), "form": form, "forms": len(kit.forms)}).replace("<", "\\u003c")
    page = _asset("form.html")
    for name in ("style.css", "script.js"):
        text, place = _asset(name), name.partition(".")[0].upper()
        # as the page's policy wants it: only this very script and style may run
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        page = page.replace(f"@{place}_HASH@", digest).replace(f"@{place}@", text)
    return page.replace("@DATA@", data)  # last: nothing is replaced in them


def _write(out: Path, kit: Kit, key: Key) -> None:
    """Write all files. groups.json comes first: what was not finished is known again and completed by the next call."""
    if out.is_dir() and any(out.iterdir()):
        old = read_object(out / GROUPS) if (out / GROUPS).is_file() else {}
        if old.get("kit") != kit.id:
            raise UserError(f"{out} holds something else than this kit. Choose a new directory.")
    write_record(out / GROUPS, replace(kit, kit=kit.id))
    write_record(out / KEY, key)
    write_text((out / KEY).with_name("README.txt"), NOTE)
    for form in kit.forms:
        write_text(out / f"{kit.form_name(form)}.html", render(kit, form))
