"""Evidence, relatives, comparison, split tree and downloads in a real Chromium, from disk and from the server."""

from __future__ import annotations

import csv
import io
import re
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from playwright.sync_api import Browser, Locator, Page, expect

from npeff.decompose.run import open_decomposition
from npeff.explore.config import ExportConfig
from npeff.explore.export import export
from npeff.explore.server import make_server
from npeff.store.layout import choose_decomposition
from npeff.store.run import Run
from tests.analyse.test_relations import EXAMPLES, put
from tests.browser import show, watched
from tests.explore.conftest import HELD_OUT, IN_SAMPLE
from tests.explore.test_export import data
from tests.synthetic import add_decomposition, make_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def site(perturbed: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(ExportConfig(str(perturbed.path), str(tmp_path_factory.mktemp("compare") / "site"))).parent


def kept(page: Page, button: Locator) -> bytes:
    """What a button that saves something saves."""
    with page.expect_download() as waiting:
        button.click()
    return Path(waiting.value.path()).read_bytes()


def table(content: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode("utf-8"))))


def verdict(found: dict[str, Any]) -> str:
    above = found["record"]["best"]["ratio"] > found["limit"]
    return "above chance" if above else "no effect above chance"


def test_perturbations_on_the_page_of_a_component(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "#/d/npeff-4-0/c/1", "Component 1")
        first, second = data(site, "0/component/1")["perturbations"]  # the held-out one is shown first
        best, null = first["record"]["best"], first["about"]["summary"]["null"]
        expect(page.locator("#perturbed thead th")).to_have_text(["+" if best["sign"] > 0 else "\u2212"])
        expect(page.locator("#perturbed .badge")).to_have_text(["held-out", verdict(first)])
        expect(page.locator("#perturbed")).to_contain_text("in the top held-out examples of this component")
        expect(page.locator("#perturbed")).not_to_contain_text("In-sample")
        expect(page.locator("#perturbed")).to_contain_text("60 fit, 20 tune, 40 test")

        def numbers(title: str) -> list[float]:
            row = page.locator("#perturbed tbody tr", has_text=title)
            expect(row.locator(".what")).to_have_count(1)  # every figure is explained where it stands
            return [float(found) for found in re.findall(r"\d[\d.]*(?:e-\d+)?", row.locator("td").inner_text())]

        assert numbers("KL ratio") == [pytest.approx(best["ratio"], rel=1e-2)]
        assert numbers("95% interval") == pytest.approx(best["interval"], rel=1e-2)
        assert numbers("random groups") == pytest.approx(null["single"], rel=1e-2)
        permuted = [best["permuted"][name] for name in ("low", "high")]
        *range_of, p = numbers("permuted coefficients")
        assert range_of == pytest.approx(permuted, rel=1e-2)
        assert p == float(f"{best['permuted']['p']:.2g}")
        for damage in best["elsewhere"]:
            share = 100 * damage["kl"] / best["top_kl"]
            assert numbers(damage["text"]) == [pytest.approx(damage["kl"], rel=0.05), pytest.approx(share, abs=0.06)]
        assert numbers("flipped of the top") == [best["flipped"]["top"], 4]
        assert numbers("flipped of random ones") == [best["flipped"]["random"], first["others"]]
        expect(page.locator("#perturbed svg .curve")).to_have_count(1)
        heat = page.locator("#where svg.heat")
        places = len(first["heat"]["layers"]) * len(first["heat"]["kinds"])
        expect(heat.locator(".cell[data-at]")).to_have_count(places)
        # numbers by pointer and by keyboard; arrows do not turn the page here
        said = page.locator("#where p[aria-live]")
        expect(said).to_contain_text("most in")
        heat.locator(".cell[data-at='1 0']").hover()
        expect(said).to_have_text(f"layer 1 · {first['heat']['kinds'][0]}: {100 * first['heat']['shares'][1][0]:.2f}%")
        heat.focus()
        before = said.inner_text()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowRight")
        expect(page.locator("main h1")).to_have_text("Component 1")
        assert said.inner_text() != before
        page.get_by_text("The 20 largest entries").click()
        expect(page.locator("#where tbody tr")).to_have_count(20)
        page.get_by_role("button", name=second["about"]["name"]).click()
        expect(page.locator("#perturbed")).to_contain_text("direction reject")
        expect(page.locator("#perturbed .badge")).to_have_text(["in-sample", verdict(second)])
        expect(page.locator("#perturbed")).to_contain_text("So the ratio flatters")
        expect(page.locator("#perturbed")).not_to_contain_text("top held-out")
        show(page, site, "#/d/npeff-8-0/c/0", "Component 0")
        expect(page.locator("#perturbed")).to_have_count(0)


def test_perturbations_on_the_overview(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "#/d/npeff-4-0", "4 components")
        rows = page.locator("#perturbations tbody tr")
        expect(rows.locator("th")).to_have_text([HELD_OUT, IN_SAMPLE])
        expect(rows.locator(".badge")).to_have_text(["held-out", "in-sample"])
        expect(rows.first).to_contain_text("60, 20, 40")
        titles = [title.strip() for title in page.locator("#perturbations thead th").all_inner_texts()]
        lines = data(site, "0/components")["perturbations"]
        for row, line in zip(rows.all(), lines, strict=True):
            cells = dict(zip(titles, row.locator("th, td").all_inner_texts(), strict=True))
            summary = line["summary"]
            assert float(cells["KL ratio"]) == pytest.approx(summary["kl_ratio"], rel=1e-2)
            for title, ends in (("95% interval", summary["interval"]), ("95% of them", summary["null"]["single"])):
                assert [float(end) for end in cells[title].split(" to ")] == pytest.approx(ends, rel=1e-2)
            assert float(cells["random groups"]) == pytest.approx(summary["null"]["ratio"], rel=1e-2)
            assert float(cells["running text ÷ top"].rstrip("%")) == pytest.approx(100 * summary["elsewhere"], abs=0.06)
            assert cells["above chance"] == f"{summary['above_null']} of {summary['components']}"
        expect(page.locator("main")).to_contain_text("So the ratio flatters")
        page.get_by_role("button", name="held-out KL ratio", exact=True).click()
        expect(page.locator("#components tbody tr").first).to_contain_text(re.compile(r"^[13]"))
        effects = data(site, "0/components")["effects"]
        cells = page.locator("#components tbody tr td:nth-child(7)")
        none = sum(effect is not None and effect["ratio"] <= effect["limit"] for effect in effects)
        expect(cells.filter(has_text="no effect above chance")).to_have_count(none)
        expect(cells.filter(has_text=re.compile("^\u2013$"))).to_have_count(2)  # in-sample ratios are not in this table


def test_the_page_opens_on_the_default_decomposition_and_says_where_perturbations_are(
    browser: Browser, site: Path, perturbed: Run
) -> None:
    default = choose_decomposition(perturbed.path)
    assert default != "npeff-4-0"
    with watched(browser) as page:
        show(page, site, "", "4 components")
        expect(page.locator("#pick option:checked")).to_have_text(default)
        expect(page.locator("#elsewhere")).to_contain_text("npeff-4-0 (4 components)")
        page.locator("#elsewhere a").click()
        expect(page.locator("#perturbations tbody tr")).to_have_count(2)


def test_perturbations_are_near_the_top_of_a_narrow_screen(browser: Browser, site: Path) -> None:
    with watched(browser, 400) as page:
        show(page, site, "#/d/npeff-4-0/c/1", "Component 1")
        assert page.evaluate("document.getElementById('perturbed').getBoundingClientRect().top") < 2000
        shown = page.locator("main ol.list").first.locator("li:visible")
        expect(shown).to_have_count(5)
        page.get_by_role("button", name="Show all").click()
        assert shown.count() > 5


def test_relatives_of_a_component(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "#/d/npeff-4-0/c/2", "Component 2")
        (match,) = [e for e in data(site, "0/component/2")["relations"] if e["kind"] == "match" and e["other"] == 1]
        found = page.locator("#seeds li a")
        expect(found).to_have_text(f"Component {match['items'][0][0]}")
        expect(page.locator("#others h3")).to_contain_text("clusters-4-0")
        expect(page.locator("#parents")).to_have_count(0)
        (splits,) = [e for e in data(site, "0/component/2")["relations"] if e["kind"] == "splits"]
        expect(page.locator("#splits li")).to_have_count(len(splits["items"]))
        found.click()
        expect(page).to_have_url(re.compile(r"#/d/npeff-4-1/c/\d$"))
        show(page, site, "#/d/npeff-8-0/c/0", "Component 0")
        expect(page.locator("#parents h3")).to_have_count(3)
        page.locator("#parents h3", has_text="npeff-4-0").get_by_role("link", name="compare").click()
        expect(page.locator("main h1")).to_have_text("Compare")


CHANGE_BOTH = """(wanted) => {
  for (const [id, name] of Object.entries(wanted)) {
    const select = document.getElementById(id);
    select.value = [...select.options].find((option) => option.textContent === name).value;
    select.dispatchEvent(new Event("change"));
  }
}"""
"""Faster than the page is drawn."""


def test_compare_two_decompositions(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "", "4 components")
        page.get_by_role("link", name="compare", exact=True).click()
        expect(page.locator("main h1")).to_have_text("Compare")
        page.locator("#compare-a").select_option(label="npeff-8-0")
        page.locator("#compare-b").select_option(label="npeff-4-0")
        expect(page).to_have_url(re.compile("#/compare/npeff-8-0/npeff-4-0$"))
        page.evaluate(CHANGE_BOTH, {"compare-a": "npeff-4-1", "compare-b": "npeff-8-0"})
        expect(page).to_have_url(re.compile("#/compare/npeff-4-1/npeff-8-0$"))
        page.evaluate(CHANGE_BOTH, {"compare-a": "npeff-8-0", "compare-b": "npeff-4-0"})
        expect(page).to_have_url(re.compile("#/compare/npeff-8-0/npeff-4-0$"))
        names = [d["analysis"]["name"] for d in data(site, "run")["decompositions"]]
        a, b = names.index("npeff-4-0"), names.index("npeff-8-0")
        pair = data(site, f"pair/{a}-{b}")
        rows = page.locator("#matched tbody tr")
        expect(rows).to_have_count(4)
        # the coarser one is first in the file, the finer one on the page
        expect(rows.first.locator("td.half a")).to_have_text(
            [f"Component {pair['matched']['second'][0]}", f"Component {pair['matched']['first'][0]}"]
        )
        expect(rows.first.locator("td").first).to_contain_text(f"{pair['matched']['coefficients'][0]:.2f}")
        expect(page.locator("#unmatched tbody tr")).to_have_count(4)
        expect(page.locator("#tunings thead th")).to_have_text(["npeff-8-0", "npeff-4-0"])
        expect(page.locator("table.pairs tbody tr")).to_have_count(6)
        page.locator("#compare-b").select_option(label="npeff-8-0")
        expect(page.locator("main")).to_contain_text("Choose two different")
        for route in ("#/compare/npeff-8-0/absent", "#/tree/absent", "#/tree/clusters-4-0"):
            show(page, site, route, "Not found")


def test_a_component_without_a_parent(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(EXAMPLES)])
    put(run, "coarse", 4, 0, dead=False)
    put(run, "fine", 7, 0)
    for components in (4, 7):
        add_decomposition(run, "svd-gradients", components, f"svd-{components}")
    site = export(ExportConfig(str(run.path), str(tmp_path / "site"))).parent
    with watched(browser) as page:
        show(page, site, "#/compare/fine/coarse", "Compare")
        rows = page.locator("#unmatched tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.last.locator("td")).to_have_text([re.compile("0.00"), re.compile("Component 6"), "none is like it"])
        show(page, site, "#/tree/coarse", "Split tree")
        expect(page.locator("#tree a")).to_have_count(4 + 7)
        expect(page.locator("#tree .branch")).to_have_count(6)
        show(page, site, "#/tree/svd-4", "Split tree")  # further singular vectors are like none of the first
        expect(page.locator("#tree .branch")).to_have_count(4)


def test_the_split_tree(browser: Browser, site: Path, perturbed: Run) -> None:
    coarse, fine = (open_decomposition(perturbed, name).coefficients for name in ("npeff-4-0", "npeff-8-0"))
    normal = [W / W.norm(dim=0) for W in (coarse, fine)]
    parents = (normal[0].T @ normal[1]).argmax(dim=0).tolist()
    with watched(browser) as page:
        show(page, site, "#/tree/npeff-4-0", "Split tree")
        expect(page.locator("#tree a")).to_have_count(12)
        expect(page.locator("#tree .branch")).to_have_count(8)
        labels = data(site, "0/components")["labels"][0]  # what the data say, not only what the model answers
        expect(page.locator("#tree a[href='#/d/npeff-4-0/c/0'] text")).to_contain_text(
            ", ".join(f"{name} {count}" for name, count in labels)
        )
        page.locator("#family").select_option("2")
        expect(page.locator("#tree a")).to_have_count(1 + parents.count(2))
        show(page, site, "#/tree/npeff-8-0/5", "Split tree")
        expect(page.locator("#tree .here text")).to_have_text(re.compile("^5"))
        expect(page.locator("#tree a").first).to_have_attribute("href", f"#/d/npeff-4-0/c/{parents[5]}")
        page.locator("#tree .here").focus()
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("#/d/npeff-8-0/c/5$"))
        page.locator("#parents").get_by_role("link", name="Its family").click()
        expect(page.locator("main h1")).to_have_text("Split tree")


@pytest.mark.parametrize("served", [False, True])
def test_figures_and_tables_can_be_kept(browser: Browser, site: Path, served: bool) -> None:
    server = make_server(site)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    base = f"http://127.0.0.1:{server.server_port}/" if served else f"{site.as_uri()}/index.html"
    try:
        with watched(browser, scheme="dark" if served else "light") as page:
            page.goto(f"{base}#/d/npeff-4-0/c/3")
            expect(page.locator("main h1")).to_have_text("Component 3")
            figure = ElementTree.fromstring(kept(page, page.locator("#where .save").get_by_text("SVG").first))
            assert figure.tag == "{http://www.w3.org/2000/svg}svg"
            shapes = figure.findall(".//{http://www.w3.org/2000/svg}rect")
            assert all(shape.get("fill", "").startswith(("rgb", "none")) for shape in shapes)
            assert not [shape for shape in shapes if shape.get("class")]
            picture = kept(page, page.locator("#where .save").get_by_text("PNG").first)
            assert picture.startswith(PNG)
            width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
            assert (width, height) == (2 * int(figure.attrib["width"]), 2 * int(figure.attrib["height"]))
            pixels = imread(io.BytesIO(picture), format="png")
            assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 10  # not an empty canvas
            heat = data(site, "0/component/3")["perturbations"][0]["heat"]
            rows = table(kept(page, page.locator("#where .save").first.get_by_text("CSV")))
            assert rows[0] == ["layer", "module", "share"]
            assert [float(row[2]) for row in rows[1:]] == [share for row in heat["shares"] for share in row]
            rows = table(kept(page, page.locator("#perturbed .save").first.get_by_text("CSV")))
            assert rows[0] in (["sign", "+"], ["sign", "\u2212"])
            assert rows[1][0] == "KL ratio"
            assert {len(row) for row in rows} == {2}
            rows = table(kept(page, page.locator("ol.list + .save button").first))
            assert rows[0][:3] == ["place", "example", "text"]
            assert [row[0] for row in rows[1:]] == [str(place + 1) for place in range(len(rows) - 1)]
            page.goto(f"{base}#/d/npeff-4-0/e/{rows[1][1]}")
            expect(page.locator("#example-text")).to_have_text(rows[1][2])
            rows = table(kept(page, page.locator("ul.list + .save button")))
            assert rows[0] == ["component", "coefficient", "share"]
            page.goto(f"{base}#/d/npeff-4-0")
            expect(page.locator("main h1")).to_have_text("4 components")
            for frame in ("svg[role=img]", "table"):  # every figure and table of the overview has its buttons
                expect(page.locator(f"main {frame}[data-kept]")).to_have_count(page.locator(f"main {frame}").count())
            page.goto(f"{base}#/compare/npeff-4-0/npeff-8-0")
            expect(page.locator("main h1")).to_have_text("Compare")
            rows = table(kept(page, page.locator("#matched").locator("xpath=../following-sibling::div[1]//button")))
            assert [len(row) for row in rows] == [6] * 5
            page.goto(f"{base}#/d/npeff-4-0")
            rows = table(kept(page, page.locator("#components").locator("xpath=../following-sibling::div[1]//button")))
            assert sorted(int(row[0]) for row in rows[1:]) == list(range(4))
            assert {"energy", "kl_ratio", "stability", "first"} <= set(rows[0])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_links_can_be_copied(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        for route, title in (
            ("#/d/npeff-4-0/c/3", "Component 3"),
            ("#/d/npeff-4-0/e/3", "Example 3"),
            ("#/compare/npeff-4-0/npeff-4-1", "Compare"),
        ):
            show(page, site, route, title)
            page.get_by_role("button", name="Copy link").click()
            expect(page.get_by_role("button", name="Copied")).to_be_visible()
            page.locator("#query").fill("")
            page.locator("#query").press("Control+V")
            expect(page.locator("#query")).to_have_value(f"{site.as_uri()}/index.html{route}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "route", ["#/d/npeff-4-0/c/1", "#/d/npeff-8-0/c/1", "#/compare/npeff-4-0/npeff-8-0", "#/tree/npeff-4-0", "#/"]
)
def test_narrow_screens(browser: Browser, site: Path, route: str, scheme: str) -> None:
    with watched(browser, 400, scheme) as page:
        page.goto(f"{site.as_uri()}/index.html{route}")
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator("main .save").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_hostile_texts_in_relatives_and_files(browser: Browser, tmp_path: Path) -> None:
    texts = [f"<img src=x onerror='window.ran=1'> \"quoted\", {i}\nline" for i in range(60)]
    run = make_run(tmp_path / "run", texts, task_labels=["<b>no</b>", '</script>,"yes"'])
    for name, components in (("a b#c?d%e<i>", 3), ("other", 5)):
        add_decomposition(run, "npeff", components, name=name)
    site = export(ExportConfig(str(run.path), str(tmp_path / "site"))).parent
    with watched(browser) as page:
        show(page, site, "#/d/other/c/0", "Component 0")
        page.locator("#parents h3").get_by_role("link", name="compare").click()
        expect(page.locator("#matched tbody tr")).to_have_count(3)
        rows = table(kept(page, page.locator("#matched").locator("xpath=../following-sibling::div[1]//button")))
        assert rows[1][4] in texts
        page.get_by_role("link", name="split tree").click()
        expect(page.locator("#tree a")).to_have_count(8)
        picture = kept(page, page.locator(".save").get_by_text("SVG"))
        assert "<b>" not in picture.decode("utf-8")
        ElementTree.fromstring(picture)
        assert page.locator("main script, main img, main b").count() == 0
        assert page.evaluate("window.ran") is None
