"""`npeff evalkit make`: forms for a blind study of a run's components."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from npeff.decompose.run import open_decomposition
from npeff.store.examples import encode, usable
from npeff.store.layout import decomposition_folder, decomposition_names
from npeff.store.run import Run
from npeff.study import page, pdf
from npeff.study.choose import Picked, Pool, Ranking, deal, pick_components, shares
from npeff.study.config import MakeConfig
from npeff.study.kit import FORMAT, GROUPS, KEY, Group, KeyEntry, Kit, Sample
from npeff.study.preamble import SAMPLES, about_task, preamble
from npeff.utils.configs import to_dict
from npeff.utils.errors import UserError
from npeff.utils.files import read_json, whole_file, write_json
from npeff.utils.version import __version__

LONGEST = 700
"""Characters of a text that are shown."""
CUT = " … [cut]"
NOTE = """This directory says which groups of the kit are components and which are random texts.
Keep it from the annotators until all forms are in: hand out only the form.
"""


def make(config: MakeConfig) -> Path:
    """Write the kit and return its directory. The same config and run give the same files."""
    pdf.check_library()
    run = Run.open(config.run)
    names = _names(run, config)
    texts = shown_texts(run.table)
    pool = Pool(encode(pa.chunked_array([texts], pa.string()))[0], usable(run.table))
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


def _names(run: Run, config: MakeConfig) -> list[str]:
    known = decomposition_names(run.path)
    if config.decomposition or len(known) == 1:
        return list(config.decomposition) or known
    if not known:
        raise UserError(f"{run.path} has no finished decomposition. `npeff decompose {run.path}` makes one.")
    raise UserError(
        f"{run.path} has several decompositions: name one or more with --decomposition: {', '.join(known)}."
    )


def _ranking(run: Run, name: str) -> Ranking:
    scores = open_decomposition(run, name).scores()
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
    tensors = {name: read_json(decomposition_folder(run.path, name) / "config.json")["sha256"] for name in names}
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
