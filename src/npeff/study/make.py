"""`npeff study make`: forms for a blind study of a run's components.

A form shows two kinds of groups: top examples of components that are drawn at random, and as controls texts that are
drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from npeff.analyse.ranking import distinct, top_examples
from npeff.decompose.run import open_decomposition
from npeff.store.examples import encode
from npeff.store.layout import choose_decomposition, decomposition_folder
from npeff.store.run import Run
from npeff.study.config import MakeConfig
from npeff.study.kit import GROUPS, KEY, Group, Key, KeyEntry, Kit, Sample, check_pdf_libraries
from npeff.study.page import render
from npeff.study.preamble import TEXTS, about_task, preamble
from npeff.tasks.config import FIELD
from npeff.utils.configs import to_dict, write_record
from npeff.utils.errors import UserError
from npeff.utils.files import read_object, whole_file, write_text
from npeff.utils.types import Array

LONGEST = 700
"""Characters of a text that are shown."""
CUT = " … [cut]"
NOTE = """This directory says which groups of the kit are components and which are random texts.
Keep it from the annotators until all forms are in: hand out only the form.
"""
SMALLER = "Ask for fewer --groups or --forms, or a smaller --size."


def make(config: MakeConfig) -> Path:
    """Write a kit; the same config and run give the same files.

    Args:
        config: Options of the command.

    Returns:
        Directory of the kit.
    """
    check_pdf_libraries()
    run = Run.open(config.run)
    names = list(config.decomposition) or [choose_decomposition(run.path)]
    texts = shown_texts(run.table)
    about = config.about or about_task(run.manifest.task)
    codes = encode(pa.chunked_array([texts], pa.string()))[0]
    pool = Pool(codes, run.usable, config.size, np.random.default_rng(config.seed))
    scores = {name: open_decomposition(run, name).scores() for name in names}
    samples, dealt = choose_groups(config, pool, scores, texts)
    groups = tuple(Group(entry.number, form, _of(texts, entry.examples)) for form, entry in dealt)
    kit = Kit(preamble(about, config.size), samples, groups)
    key = Key(
        kit=kit.id,
        run=run.fingerprint,
        decompositions={n: read_object(decomposition_folder(run.path, n) / "config.json")["sha256"] for n in names},
        groups=tuple(entry for _, entry in dealt),
        config={option: value for option, value in to_dict(config).items() if option != "out"},
    )
    out = Path(config.out)
    _write(out, kit, key, config.font)
    forms = f"{len(kit.forms)} form{'s' * (len(kit.forms) > 1)}"
    print(f"{len(groups)} groups of {config.size} texts in {forms}, about {' and '.join(names)}, in {out}")
    print(f"Hand out the PDF or the page. Keep {out / KEY} to yourself; `npeff study score {out} FORM ...` uses it.")
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


@dataclass(frozen=True)
class Pool:
    """The examples that may be shown, and how groups are drawn from them."""

    texts: Array
    """Int64 [m]; examples with the same number are shown with the same text."""
    usable: Array
    """Bool [m]; false for examples that were set aside."""
    size: int
    """Examples in a group."""
    random: np.random.Generator
    """What all is drawn with."""

    def top(self, scores: torch.Tensor) -> tuple[int, ...]:
        """The best examples by `scores` [m] with distinct texts; too few for a group if fewer are above zero."""
        order = top_examples(scores.float().cpu().numpy(), self.usable)
        return tuple(distinct(order, self.texts, self.size).tolist())

    def tops(self, name: str, scores: torch.Tensor, count: int, without: int | None) -> list[KeyEntry]:
        """Top examples of random components that have enough distinct texts.

        Args:
            name: Name of the decomposition.
            scores: How much each example uses each of its components, [m, C].
            count: How many components to draw.
            without: A component that is not to be drawn.

        Returns:
            A group for each of them, without a number yet.

        Raises:
            UserError: There are too few components.
        """
        groups: list[KeyEntry] = []
        for component in self.random.permutation(scores.shape[1]).tolist():
            top = self.top(scores[:, component]) if len(groups) < count and component != without else ()
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
        free = np.flatnonzero(self.usable & ~np.isin(self.texts, self.texts[list(without)]))
        free = distinct(self.random.permutation(free), self.texts)
        needed = count * self.size
        if len(free) < needed:
            raise UserError(
                f"{count} control groups need {needed} distinct texts beside those of the components; the run has "
                f"{len(free)}. {SMALLER}"
            )
        groups = free[:needed].reshape(count, self.size).tolist()
        return [KeyEntry(0, None, None, tuple(examples)) for examples in groups]


def choose_groups(
    config: MakeConfig, pool: Pool, scores: dict[str, torch.Tensor], texts: list[str]
) -> tuple[tuple[Sample, ...], list[tuple[int, KeyEntry]]]:
    """Draw all that a kit shows.

    Args:
        config: Options of the command.
        pool: The examples that may be shown.
        scores: Name of each decomposition → how much each example uses each of its components, [m, C].
        texts: What is shown of each example, [m].

    Returns:
        The worked samples, and all groups with the form that each is in.
    """
    sample = _sample_top(config, pool, *next(iter(scores.items())))
    total, tops = config.forms * (config.groups - config.random_groups), []
    for place, (name, of_components) in enumerate(scores.items()):
        count = total // len(scores) + (place < total % len(scores))
        tops += pool.tops(name, of_components, count, config.sample_component if place == 0 else None)
    shown = [example for top in tops for example in top.examples] + list(sample)
    controls = pool.controls(config.forms * config.random_groups + bool(sample), shown)
    samples = TEXTS.samples
    if sample:
        themed = Sample(_of(texts, sample), "yes", (config.sample_theme or "").strip())
        samples = (themed, Sample(_of(texts, controls.pop().examples), "no", ""))
    return samples, deal(pool.random, tops, controls, config.forms)


def _sample_top(config: MakeConfig, pool: Pool, name: str, scores: torch.Tensor) -> tuple[int, ...]:
    """The examples of the worked sample that the user chose."""
    component = config.sample_component
    if component is None:
        return ()
    top = pool.top(scores[:, component]) if 0 <= component < scores.shape[1] else ()
    if len(top) < config.size:
        raise UserError(f"{name} has no component {component} with {config.size} distinct texts for a sample.")
    return top


def deal(
    random: np.random.Generator, tops: list[KeyEntry], controls: list[KeyEntry], forms: int
) -> list[tuple[int, KeyEntry]]:
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
    dealt: list[tuple[int, KeyEntry]] = []
    tops = [tops[i] for i in random.permutation(len(tops))]
    for form in range(forms):
        groups = tops[form::forms] + controls[form::forms]
        for i in random.permutation(len(groups)):
            shuffled = tuple(random.permutation(np.array(groups[i].examples)).tolist())
            dealt.append((form + 1, replace(groups[i], number=len(dealt) + 1, examples=shuffled)))
    return dealt


def _of(texts: list[str], examples: Sequence[int]) -> tuple[str, ...]:
    return tuple(texts[i] for i in examples)


def _write(out: Path, kit: Kit, key: Key, font: str | None) -> None:
    """Write all files. groups.json comes first: what was not finished is known again and completed by the next call."""
    from npeff.study import pdf

    if out.is_dir() and any(out.iterdir()):
        old = read_object(out / GROUPS) if (out / GROUPS).is_file() else {}
        if old.get("kit") != kit.id:
            raise UserError(f"{out} holds something else than this kit. Choose a new directory.")
    face = pdf.load_font(font)
    kit.write(out)
    write_record(out / KEY, key)
    write_text((out / KEY).with_name("README.txt"), NOTE)
    for form in kit.forms:
        write_text(out / f"{kit.form_name(form)}.html", render(kit, form))
        with whole_file(out / f"{kit.form_name(form)}.pdf") as file:
            pdf.write_form(file, kit, form, face)
