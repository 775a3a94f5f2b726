"""The page of a large run: 100,000 examples × 2,048 explained components, all synthetic, opened in a real Chromium."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from playwright.sync_api import Page, Request, sync_playwright

from bench import entry
from npeff.analyse.answers import Answers
from npeff.decompose.config import FitConfig
from npeff.decompose.methods import create
from npeff.explain.names import Name
from npeff.explain.parts import CausalPoint, Part, Parts
from npeff.explain.records import NAMES, Explanation, HeadView, Names, Trace, WordEffects, explanations_folder, key_of
from npeff.explore.export import export_site
from npeff.store.run import Run
from npeff.utils.configs import write_record
from tests.browser import launch
from tests.synthetic import make_run

EXAMPLES, COMPONENTS, CLASSES, DIM = 100_000, 2048, 10, 32
SHARD = 8192
DENSITY = 0.1
"""Share of coefficients that are not zero; decompositions of this size have less."""
OPENINGS = 5


def benchmarks(data: Path | None) -> Iterator[dict[str, Any]]:
    """Time until the first view of each kind of page, what it reads, and the cost of writing the page."""
    with tempfile.TemporaryDirectory() as folder:
        run, coefficients = synthetic_run(Path(folder) / "run")
        begin = time.perf_counter()
        coefficients.T @ coefficients
        unit = time.perf_counter() - begin
        begin = time.perf_counter()
        index = export_site(run, Path(folder) / "page")
        seconds = time.perf_counter() - begin
        del coefficients
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
        size = sum(path.stat().st_size for path in index.parent.rglob("*") if path.is_file()) / 1e9
        print(f"export: {seconds:.0f} s, {size:.2f} GB, peak {peak:.1f} GB", file=sys.stderr)
        yield entry("explore.export_gemm_ratio", seconds / unit, "<= 20")
        for name, (wait, megabytes) in first_views(index).items():
            yield entry(f"explore.{name}_seconds", wait, "<= 1")
            yield entry(f"explore.{name}_mb", megabytes, "<= 2")


def synthetic_run(path: Path) -> tuple[Run, torch.Tensor]:
    """A finished run of random texts, and a decomposition of it whose coefficients are returned."""
    random = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(5000)])
    texts = [" ".join(row) for row in words[random.integers(0, len(words), (EXAMPLES, 18))]]
    labels = random.integers(0, CLASSES, EXAMPLES).tolist()
    run = make_run(path, texts, labels, [f"class {i}" for i in range(CLASSES)], shard_examples=SHARD)
    generator = torch.Generator().manual_seed(0)
    decomposition = create(FitConfig(method="npeff", components=COMPONENTS))
    coefficients = torch.empty(EXAMPLES, COMPONENTS).uniform_(generator=generator)
    coefficients.sub_(1 - DENSITY).relu_()
    decomposition.coefficients = coefficients
    decomposition.components = torch.randn(COMPONENTS, DIM, generator=generator)
    decomposition.residuals = torch.rand(EXAMPLES, generator=generator)
    decomposition.notes.run = run.fingerprint
    decomposition.save(run.path / "decompositions" / "npeff")
    explain_at_random(run, random)
    return run, coefficients


def explain_at_random(run: Run, random: np.random.Generator) -> None:
    """Explanations of all components, as large as those of a model of 30 blocks with 9 heads."""
    folder, key = explanations_folder(run, "npeff"), key_of(run, "npeff")
    names = [
        Name(j, [f"word{n}" for n in random.integers(0, 5000, 16)], [1.0] * 16, [3.0] * 16, 0.7)
        for j in range(COMPONENTS)
    ]
    answers: list[Answers | None] = [
        Answers([f"class {i}" for i in range(8)], [0.1] * 8, 0.9, 1, "class 0", list(range(16)), [[0.1] * 8] * 16)
        for _ in names
    ]
    write_record(folder / NAMES, Names(key, names, answers), sealed=True)

    def shares(*shape: int) -> Any:
        return random.random(shape).round(5).tolist()

    places = [(7 * n, 7 * n + 6) for n in range(18)]
    for j in range(COMPONENTS):
        heads = [Part(n, "head", n % 9, 0.01, 0.005) for n in range(12)]
        points = [CausalPoint(share, 0.9, 0.9, 0.1) for share in (0.01, 0.03, 0.1, 0.3)]
        parts = Parts(shares(30, 9), shares(30), heads, heads, 0.4, points)
        views = [HeadView(head, shares(40)) for head in heads[:3]]
        trace = Trace(0, ["token"] * 40, shares(30, 40), views, [0], ["token"] * 20, shares(30, 20))
        words = [WordEffects(int(i), False, places, shares(18)) for i in random.integers(0, EXAMPLES, 16)]
        found = Explanation(j, key, answers[j], words, parts, trace, 0.9)
        write_record(folder / "components" / f"{j:05d}.json", found, sealed=True)


def first_views(index: Path) -> dict[str, tuple[float, float]]:
    """Page → median seconds from opening it until it is drawn, and megabytes of all files that it read."""
    pages = {"overview": "", "component": "#/d/npeff/c/1000", "example": "#/d/npeff/e/50000"}
    found = {}
    with sync_playwright() as driver:
        browser = launch(driver)
        for name, place in pages.items():
            openings = [_open(browser.new_page(), f"{index.as_uri()}{place}") for _ in range(OPENINGS)]
            waits, read = zip(*openings, strict=True)
            found[name] = (float(np.median(waits)), max(read))
        browser.close()
    return found


def _open(page: Page, address: str) -> tuple[float, float]:
    """Seconds until a page is painted, and megabytes of all files that it asked for."""
    asked: set[Path] = set()

    def note(request: Request) -> None:
        asked.add(Path(unquote(urlsplit(request.url).path)))

    page.on("request", note)
    begin = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("main h1")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    seconds = time.perf_counter() - begin
    page.close()
    return seconds, sum(path.stat().st_size for path in asked) / 1e6
