"""`npeff study make`: forms for a blind study of a run's components.

A form shows two kinds of groups: top examples of components that are drawn at random, and as controls texts that are
drawn at random.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    about = config.about or about_task(run.manifest["task"])
    pool = Pool(encode(pa.chunked_array([texts], pa.string()))[0], run.usable)
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
    """What annotators see of each example: its text and the other columns of its prompt, cut where it is very long."""
    texts = table["text"].to_pylist()
    for name in (name for name in table.column_names if name.startswith(FIELD)):
        field = name.removeprefix(FIELD)
        texts = [f"{text}\n{field}: {value}" for text, value in zip(texts, table[name].to_pylist(), strict=True)]
    stripped = (text.strip() or "(empty)" for text in texts)
    return [text if len(text) <= LONGEST else text[: LONGEST - len(CUT)].rstrip() + CUT for text in stripped]


# --- which groups -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """The examples that may be shown."""

    texts: Array
    """Int64 [m]; examples with the same number are shown with the same text."""
    usable: Array
    """Bool [m]; false for examples that were set aside."""

    def top(self, scores: torch.Tensor, size: int) -> tuple[int, ...]:
        """The `size` best examples by `scores` [m] with distinct texts; fewer if fewer are above zero."""
        order = top_examples(scores.float().cpu().numpy(), self.usable)
        return tuple(distinct(order, self.texts, size).tolist())

    def random(
        self, random: np.random.Generator, count: int, size: int, without: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Groups of random examples; no text occurs twice in them.

        Args:
            random: Generator to draw with.
            count: How many groups.
            size: Examples in a group.
            without: Examples whose texts are not to occur.

        Returns:
            The examples of each group.

        Raises:
            UserError: There are too few texts.
        """
        free = np.flatnonzero(self.usable & ~np.isin(self.texts, self.texts[list(without)]))
        free = distinct(random.permutation(free), self.texts)
        if len(free) < count * size:
            raise UserError(
                f"{count} control groups need {count * size} distinct texts beside those of the components; the run "
                f"has {len(free)}. {SMALLER}"
            )
        return [tuple(free[start : start + size].tolist()) for start in range(0, count * size, size)]


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
    random = np.random.default_rng(config.seed)
    sample = _sample_top(config, pool, *next(iter(scores.items())))
    total, tops = config.forms * (config.groups - config.random_groups), []
    for place, (name, of_components) in enumerate(scores.items()):
        count = total // len(scores) + (place < total % len(scores))
        without = {config.sample_component} if place == 0 else ()
        tops += _pick_components(random, name, of_components, pool, count, config.size, without)
    shown = [example for top in tops for example in top.examples] + list(sample)
    count = config.forms * config.random_groups
    drawn = pool.random(random, count + bool(sample), config.size, shown)
    controls = [KeyEntry(0, None, None, examples) for examples in drawn[:count]]
    samples = TEXTS.samples
    if sample:
        themed = Sample(_of(texts, sample), "yes", (config.sample_theme or "").strip())
        samples = (themed, Sample(_of(texts, drawn[-1]), "no", ""))
    return samples, deal(random, tops, controls, config.forms)


def _pick_components(
    random: np.random.Generator,
    name: str,
    scores: torch.Tensor,
    pool: Pool,
    count: int,
    size: int,
    without: Collection[int | None],
) -> list[KeyEntry]:
    """`count` components at random, none of `without`, among those with `size` distinct texts."""
    picked: list[KeyEntry] = []
    for component in random.permutation(scores.shape[1]).tolist():
        top = pool.top(scores[:, component], size) if len(picked) < count and component not in without else ()
        if len(top) == size:
            picked.append(KeyEntry(0, name, component, top))
    if len(picked) < count:
        raise UserError(
            f"{name} has {len(picked)} components with {size} distinct active texts to choose from; {count} are "
            f"needed. {SMALLER}"
        )
    return picked


def _sample_top(config: MakeConfig, pool: Pool, name: str, scores: torch.Tensor) -> tuple[int, ...]:
    """The examples of the worked sample that the user chose."""
    component = config.sample_component
    if component is None:
        return ()
    if not 0 <= component < scores.shape[1]:
        raise UserError(f"{name} has no component {component}; choose another sample.")
    top = pool.top(scores[:, component], config.size)
    if len(top) < config.size:
        raise UserError(f"Component {component} has only {len(top)} distinct active texts; choose another sample.")
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
