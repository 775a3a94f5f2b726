"""`npeff evalkit make`: forms for a blind study of a run's components."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tyro

from npeff import __version__
from npeff.analyse.run import decomposition_folder, encode, finished_decompositions, load_decomposition
from npeff.store.run import Run
from npeff.study import page, pdf
from npeff.study.choose import Picked, Pool, Ranking, deal, pick_components, shares
from npeff.study.kit import FORMAT, GROUPS, KEY, Group, KeyEntry, Kit, Sample
from npeff.study.preamble import SAMPLES, about_task, preamble
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, whole_file, write_json

LONGEST = 700
"""Characters of a text that are shown."""
CUT = " … [cut]"
NOTE = """This directory says which groups of the kit are components and which are random texts.
Keep it from the annotators until all forms are in: hand out only the form.
"""


@dataclass(frozen=True)
class MakeConfig:
    """Write forms for a blind study: do the top examples of components have a theme, and do random ones?

    The defaults are one of the five forms that the paper's annotators were given for a task; --forms 5 makes all.
    """

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    out: tyro.conf.Positional[str]
    """Directory to write the kit to."""
    decomposition: tuple[str, ...] = ()
    """Decomposition to study; several are mixed in the same forms. May be left out if the run has only one."""
    groups: int = 20
    """Groups in a form."""
    forms: int = 1
    """Forms, each with other groups."""
    size: int = 5
    """Texts in a group: the top examples of a component, no text twice, or as many random ones."""
    random_share: float = 0.5
    """Share of the groups that are random texts."""
    seed: int = 0
    """Seed of all random choices."""
    about: str | None = None
    """What the texts are, in a sentence or two for the annotators; without it, what the task says."""
    sample_component: int | None = None
    """Component of the first decomposition to show as a worked sample, beside random texts; the study leaves it out.
    Without it the samples are invented texts."""
    sample_theme: str | None = None
    """The theme of --sample-component in a few words."""
    font: str | None = None
    """TrueType font of the PDF, for texts that DejaVu Sans cannot show, such as Chinese."""

    def __post_init__(self) -> None:
        if self.groups < 2 or self.forms < 1 or self.size < 2:
            raise UserError("A kit needs at least 2 --groups, 1 form in --forms and a --size of 2.")
        if not 0 < self.random_groups < self.groups:
            raise UserError(
                f"--random-share {self.random_share} of {self.groups} groups leaves no random or no component group."
            )
        if len(set(self.decomposition)) < len(self.decomposition):
            raise UserError("--decomposition names the same one twice.")
        if (self.sample_component is None) != (not (self.sample_theme or "").strip()):
            raise UserError("--sample-component and --sample-theme go together.")
        if self.about is not None and not self.about.strip():
            raise UserError("--about is empty; leave it out or say what the texts are.")
        if self.seed < 0:
            raise UserError("--seed must not be negative.")

    @property
    def random_groups(self) -> int:
        """Random groups in a form."""
        return round(self.groups * self.random_share)


def make(config: MakeConfig) -> Path:
    """Write the kit and return its directory. The same config and run give the same files."""
    pdf.check_library()
    run = Run.open(config.run)
    names = _names(run, config)
    texts = shown_texts(run.table)
    pool = Pool(encode(pa.chunked_array([texts], pa.string()))[0], _usable(run.table))
    samples, dealt = _choose(config, pool, [_ranking(run, name) for name in names], texts)
    groups = tuple(
        Group(number, form, tuple(texts[i] for i in picked.examples)) for number, (form, picked) in enumerate(dealt, 1)
    )
    kit = Kit(preamble(config.about or about_task(run.manifest["task"]), config.size), samples, groups)
    entries = [
        KeyEntry(number, picked.decomposition, picked.component, picked.examples)
        for number, (_, picked) in enumerate(dealt, 1)
    ]
    out = Path(config.out)
    _write(out, kit, _key(kit, config, run, names, entries), config.font)
    print(f"{len(groups)} groups of {config.size} texts in {len(kit.forms)} form{'s' * (len(kit.forms) > 1)}, in {out}")
    print(f"Hand out the PDF or the page. Keep {out / KEY} to yourself; `npeff evalkit score {out} FORM ...` uses it.")
    return out


def shown_texts(table: pa.Table) -> list[str]:
    """What annotators see of each example: its text and the other columns of its prompt, cut where it is very long."""
    texts = table["text"].to_pylist()
    for name in (name for name in table.column_names if name.startswith("field:")):
        label = name.removeprefix("field:")
        texts = [f"{text}\n{label}: {value}" for text, value in zip(texts, table[name].to_pylist(), strict=True)]
    return [_cut(text.strip()) or "(empty)" for text in texts]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - len(CUT)].rstrip() + CUT


def _usable(table: pa.Table) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return ~table["set_aside"].is_valid().to_numpy(zero_copy_only=False)


def _names(run: Run, config: MakeConfig) -> list[str]:
    known = finished_decompositions(run)
    if config.decomposition or len(known) == 1:
        return list(config.decomposition) or known
    if not known:
        raise UserError(f"{run.path} has no finished decomposition. `npeff decompose {run.path}` makes one.")
    raise UserError(
        f"{run.path} has several decompositions: name one or more with --decomposition: {', '.join(known)}."
    )


def _ranking(run: Run, name: str) -> Ranking:
    scores = load_decomposition(run, name).scores()
    return Ranking(name, scores.shape[1], lambda component: scores[:, component].float().cpu().numpy())


def _choose(
    config: MakeConfig, pool: Pool, rankings: list[Ranking], texts: list[str]
) -> tuple[tuple[Sample, ...], list[tuple[int, Picked]]]:
    """The worked samples, and all groups with the form that each is in."""
    random = np.random.default_rng(config.seed)
    sample = _sample_top(config, pool, rankings[0])
    counts = shares(config.forms * (config.groups - config.random_groups), len(rankings))
    tops: list[Picked] = []
    for ranking, count in zip(rankings, counts, strict=True):
        without = () if config.sample_component is None or ranking is not rankings[0] else (config.sample_component,)
        tops += pick_components(random, ranking, pool, count, config.size, without)
    taken = [i for top in tops for i in top.examples] + list(sample)
    count = config.forms * config.random_groups
    controls = pool.random(random, count + bool(sample), config.size, taken)
    dealt = deal(random, tops, [Picked(examples) for examples in controls[:count]], config.forms)
    if not sample:
        return SAMPLES, dealt
    themed = Sample(tuple(texts[i] for i in sample), "yes", (config.sample_theme or "").strip())
    return (themed, Sample(tuple(texts[i] for i in controls[-1]), "no", "")), dealt


def _sample_top(config: MakeConfig, pool: Pool, ranking: Ranking) -> tuple[int, ...]:
    if config.sample_component is None:
        return ()
    if not 0 <= config.sample_component < ranking.components:
        raise UserError(f"{ranking.name} has no component {config.sample_component}; choose another sample.")
    top = pool.top(ranking.scores(config.sample_component), config.size)
    if len(top) < config.size:
        raise UserError(
            f"Component {config.sample_component} has only {len(top)} distinct active texts; choose another sample."
        )
    return top


def _key(kit: Kit, config: MakeConfig, run: Run, names: list[str], entries: list[KeyEntry]) -> dict[str, Any]:
    tensors = {name: read_json(decomposition_folder(run, name) / "config.json")["sha256"] for name in names}
    return {
        "format": FORMAT,
        "kit": kit.id,
        "npeff": __version__,
        "config": {key: value for key, value in to_dict(config).items() if key != "out"},
        "run": run.fingerprint,
        "decompositions": tensors,
        "groups": [asdict(entry) for entry in entries],
    }


def _write(out: Path, kit: Kit, key: dict[str, Any], font: str | None) -> None:
    """Write all files. groups.json comes first: what was not finished is known again and completed by the next call."""
    if out.is_dir() and any(out.iterdir()):
        old = read_json(out / GROUPS) if (out / GROUPS).is_file() else {}
        if not isinstance(old, dict) or old.get("kit") != kit.id:
            raise UserError(f"{out} holds something else than this kit. Choose a new directory.")
    face = pdf.load_font(font)
    write_json(out / GROUPS, kit.to_json())
    write_json(out / KEY, key)
    with whole_file((out / KEY).with_name("README.txt")) as file:
        file.write_text(NOTE, encoding="utf-8")
    for form in kit.forms:
        with whole_file(out / f"{kit.form_name(form)}.html") as file:
            file.write_text(page.render(kit, form), encoding="ascii")
        with whole_file(out / f"{kit.form_name(form)}.pdf") as file:
            pdf.write_form(file, kit, form, face)
