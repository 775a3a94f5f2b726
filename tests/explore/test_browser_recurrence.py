"""What recurs and what belongs together, on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from npeff.analyse.config import AnalyseConfig
from npeff.analyse.records import Analysis
from npeff.analyse.run import analyse
from npeff.explore.config import ExportConfig
from npeff.explore.export import export
from tests.browser import show, watched
from tests.synthetic import add_decomposition, make_run


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Analysis]:
    run = make_run(tmp_path_factory.mktemp("recurrence") / "run", [f"review {i}" for i in range(200)])
    add_decomposition(run, "npeff", 12)
    add_decomposition(run, "clusters", 4)
    (analysis,) = analyse(AnalyseConfig(str(run.path), "npeff"))
    return export(ExportConfig(str(run.path), str(run.path / "site"))).parent, analysis


def test_the_table_leads_with_what_recurs(browser: Browser, analysed: tuple[Path, Analysis]) -> None:
    site, analysis = analysed
    found = {each.number: (-(each.recurrence or 0), -each.energy) for each in analysis.component}
    assert len({share for share, _ in found.values()}) > 1
    with watched(browser) as page:
        show(page, site, "#/d/npeff", "12 components")
        listed = [int(text) for text in page.locator("#components tbody td:first-child").all_inner_texts()]
        assert listed == sorted(found, key=lambda j: found[j])
        expect(page.locator("th[data-name=recurrence]")).to_have_attribute("aria-sort", "descending")
        recurring = sum(each.recurs for each in analysis.component)
        expect(page.locator("#recurring b")).to_have_text(str(recurring))
        expect(page.locator("#recurring")).to_contain_text("by chance")
        show(page, site, f"#/d/npeff/c/{listed[0]}", f"Component {listed[0]}")
        expect(page.locator("main")).to_contain_text(f"found again by {-found[listed[0]][0]:.0%} of 4 other fits")
        show(page, site, "#/d/clusters", "4 components")  # not measured: nothing is claimed
        assert page.locator("#recurring").count() == page.locator("th[data-name=recurrence]").count() == 0


def test_a_component_names_its_group(browser: Browser, analysed: tuple[Path, Analysis]) -> None:
    site, analysis = analysed
    group = analysis.groups[0]
    alone = {each.number for each in analysis.component} - {j for each in analysis.groups for j in each.members}
    with watched(browser) as page:
        show(page, site, f"#/d/npeff/c/{group.members[0]}", f"Component {group.members[0]}")
        section = page.locator("#group")
        expect(section.locator("h2")).to_contain_text(f"Group {group.number}")
        expect(section.locator("li a")).to_have_text([f"Component {j}" for j in group.members[1:]])
        section.locator("li a").first.click()
        expect(page.locator("main h1")).to_have_text(f"Component {group.members[1]}")
        for number in sorted(alone)[:1]:
            show(page, site, f"#/d/npeff/c/{number}", f"Component {number}")
            expect(page.locator("#group")).to_have_count(0)
