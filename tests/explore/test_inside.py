"""What `npeff explain` found, on the page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from npeff.explain.casestudy import casestudy
from npeff.explain.config import CaseStudyConfig, ExplainConfig
from npeff.explain.run import explain
from npeff.explore.config import ExportConfig
from npeff.explore.export import export
from npeff.store.run import Run
from tests.browser import show, watched
from tests.explore.serving import serving

NAME = "npeff-4-0"


@pytest.fixture(scope="module")
def run(perturbed: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("inside") / "run"
    shutil.copytree(perturbed.path, path)
    explain(ExplainConfig(str(path), NAME, (1,), examples=3, device="cpu"))
    casestudy(CaseStudyConfig(str(path), 1, NAME, examples=1, device="cpu"))
    return Run.open(path)


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
        expect(page.locator("#answers tbody tr")).to_have_count(2)
        expect(page.locator("#heads svg.heat .cell[data-at]")).to_have_count(2 * 4)
        expect(page.locator("#heads tbody tr")).to_have_count(6)
        expect(page.locator("#sufficiency tbody tr")).to_have_count(4)
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
        expect(page.locator("#answers tbody tr")).to_have_count(2)
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
