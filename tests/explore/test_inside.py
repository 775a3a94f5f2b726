"""What `npeff explain` found, on the page."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from npeff.explain.casestudy import casestudy
from npeff.explain.config import CaseStudyConfig, ExplainConfig
from npeff.explain.records import Judged, Told, explanations_folder, key_of
from npeff.explain.run import explain
from npeff.explore.config import ExportConfig
from npeff.explore.export import export
from npeff.store.run import Run
from npeff.utils.configs import write_record
from tests.browser import show, watched
from tests.explore.serving import serving
from tests.explore.test_browser_compare import PNG, kept, table
from tests.explore.test_export import data

NAME = "npeff-4-0"


@pytest.fixture(scope="module")
def run(perturbed: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("inside") / "run"
    shutil.copytree(perturbed.path, path)
    explain(ExplainConfig(str(path), NAME, (1,), examples=3, device="cpu"))
    casestudy(CaseStudyConfig(str(path), 1, NAME, examples=1, device="cpu"))
    run = Run.open(path)
    judged = Judged(1, key_of(run, NAME), "a judge", [Told("theme", "films", 0.75, 1.0), Told("other", "x", 0.5, None)])
    write_record(explanations_folder(run, NAME) / "judged" / "00001.json", judged, sealed=True)
    return run


@pytest.fixture(scope="module")
def site(run: Run) -> Path:
    return export(ExportConfig(str(run.path), str(run.path / "site"), NAME)).parent


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_the_inside_of_a_component(browser: Browser, site: Path, width: int, scheme: str) -> None:
    with watched(browser, width, scheme) as page:
        show(page, site, f"#/d/{NAME}/c/1", "Component 1")
        first = page.locator("ol.list a.weighed").first
        words = first.locator("mark.word")
        assert words.count() == len(first.inner_text().split())
        expect(words.first).to_have_attribute("title", page.locator("mark.word").first.get_attribute("title") or "")
        assert "without it" in (words.first.get_attribute("title") or "")
        expect(page.locator("#name .chip, #name .quiet").first).to_be_visible()
        expect(page.locator("#answers > table tbody tr")).to_have_count(2)
        expect(page.locator("#heads svg.heat .cell[data-at]")).to_have_count(2 * 4)
        expect(page.locator("#heads tbody tr")).to_have_count(6)
        expect(page.locator("#sufficiency tbody tr")).to_have_count(4)
        expect(page.locator("#judged caption")).to_contain_text("told by a judge")
        told = ["theme", "75%", "100%", "another's", "50%", "\u2013"]
        expect(page.locator("#judged tbody :is(th, td)")).to_have_text(told)
        expect(page.locator("#trace svg.heat")).to_have_count(1)
        expect(page.locator("#near li")).to_have_count(3)
        assert page.locator("#cases tbody tr.best").count() == 2
        page.locator("#heads svg.heat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#heads [role=status]")).to_contain_text("head")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_overview_finds_components_by_their_inside(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, f"#/d/{NAME}", "4 components")
        rows = page.locator("#components tbody tr")
        expect(page.locator("th[data-name=words]")).to_be_visible()
        page.locator("#filter").fill("head:")
        expect(rows).to_have_count(1)
        page.locator("#filter").fill("like:1")
        expect(rows).to_have_count(3)  # not itself
        page.locator("#filter").fill("like:11")
        expect(rows).to_have_count(0)
        page.locator("#filter").fill("head:0. head:1.")
        counts = rows.count()
        page.locator("#filter").fill("argues:negative")
        negative = rows.count()
        page.locator("#filter").fill("argues:positive")
        assert negative + rows.count() == 4
        assert counts <= 1


def test_a_component_that_was_not_explained(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, f"#/d/{NAME}/c/2", "Component 2")
        expect(page.locator("#answers > table tbody tr")).to_have_count(2)
        expect(page.locator("mark.word")).to_have_count(0)
        expect(page.locator("#heads")).to_have_count(0)
        show(page, site, "#/d/clusters-4-0/c/2", "Component 2")
        expect(page.locator("#name")).to_have_count(0)


def test_words_of_a_text_that_is_tried(browser: Browser, run: Run) -> None:
    with serving(run) as port, watched(browser) as page:
        page.goto(f"http://127.0.0.1:{port}/#/d/{NAME}/try")
        page.locator("textarea").first.fill("a film of great charm")
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("button", name="Show the carrying words").click(timeout=60_000)
        expect(page.locator("p.card mark.word")).to_have_count(5, timeout=30_000)


def test_a_trace_of_the_mean_and_of_an_example(browser: Browser, site: Path) -> None:
    found = data(site, "0/component/1")["inside"]["trace"]
    with watched(browser) as page:
        show(page, site, f"#/d/{NAME}/c/1", "Component 1")
        pictures, buttons = page.locator("#trace svg.heat"), page.locator("#trace .tabs button")
        expect(buttons).to_have_text([f"mean of {len(found['examples'])} examples", "one example"])
        for places, sizes in ((found["places"], found["mean"]), (found["tokens"], found["sizes"])):
            expect(pictures.locator(".cell[data-at]")).to_have_count(2 * len(places))
            rows = table(kept(page, page.locator("#trace .save").get_by_text("CSV", exact=True)))
            assert len(rows) == 1 + 2 * len(places)
            largest = max(max(row) for row in sizes)
            assert [float(row[2]) for row in rows[1:]] == pytest.approx([v / largest for row in sizes for v in row])
            buttons.last.focus()
            page.keyboard.press("Enter")
        expect(buttons.last).to_have_attribute("aria-pressed", "true")
        expect(buttons.first).to_have_attribute("aria-pressed", "false")


def test_what_is_inside_can_be_kept(browser: Browser, site: Path) -> None:
    inside = data(site, "0/component/1")["inside"]
    with watched(browser) as page:
        show(page, site, f"#/d/{NAME}/c/1", "Component 1")

        def saved(place: str, kind: str) -> bytes:
            return kept(page, page.locator(f"{place} .save button").get_by_text(kind, exact=True).first)

        for place in ("#heads", "#trace"):
            assert ElementTree.fromstring(saved(place, "SVG")).tag.endswith("svg")
            assert saved(place, "PNG").startswith(PNG)
        heads = table(kept(page, page.locator("#heads .save").last.get_by_text("CSV", exact=True)))
        assert [float(row[3]) for row in heads[1:]] == [head["share"] for head in inside["parts"]["leading_heads"]]
        neurons = table(saved("#neurons", "CSV"))
        assert [int(row[2]) for row in neurons[1:]] == [part["number"] for part in inside["parts"]["leading_neurons"]]
        answers = table(saved("#answers", "CSV"))
        assert [row[0] for row in answers[1:]] == inside["answers"]["names"]
        page.locator("#each summary").click()
        expect(page.locator("#each tbody tr")).to_have_count(len(inside["answers"]["examples"]))
        each = table(saved("#each", "CSV"))
        assert [[float(value) for value in row[1:]] for row in each[1:]] == inside["answers"]["changes"]
        cases = table(saved("#cases + .save, #cases", "CSV"))
        assert [row[3] for row in cases[1:]] == [case["text"] for case in inside["cases"]]
