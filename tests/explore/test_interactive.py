"""Themes and tried texts in a real Chromium, with a real server and a real (tiny) model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from npeff.explore.config import ExportConfig
from npeff.explore.export import export
from npeff.explore.themes import Themes
from npeff.store.run import Run
from tests.browser import HOSTILE, show, watched
from tests.explore.serving import NAME, collect_tiny, explored, serving
from tests.synthetic import add_decomposition, make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path / "run", [f"an ordinary review number {i}" for i in range(60)])
    add_decomposition(run, "npeff", 6)
    return run


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, model_directory: Path, review_file: Path) -> Run:
    return collect_tiny(tmp_path_factory.mktemp("tiny") / "run", model_directory, review_file)


@pytest.fixture(scope="module")
def tiny_port(tiny_run: Run) -> Iterator[int]:
    with serving(tiny_run) as port:
        yield port


def open_page(page: Page, port: int, route: str, title: str) -> None:
    page.goto(f"http://127.0.0.1:{port}/{route}")
    expect(page.locator("main h1")).to_have_text(title)


def give(page: Page, theme: str, note: str = "") -> None:
    page.locator("#edit").click()
    page.locator("#theme-input").fill(theme)
    page.locator("#note-input").fill(note)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("#edit")).to_be_visible()


def shown(text: str) -> str:
    """How the page shows control characters."""
    plain = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda c: chr(0x2400 + ord(c[0])), text)
    return plain.replace("\x7f", "\u2421")


# --- themes and notes ---------------------------------------------------------------------------------------------


def test_a_named_component_is_found_after_the_server_was_killed(browser: Browser, run: Run) -> None:
    with explored(run) as (port, process):
        with watched(browser) as page:
            open_page(page, port, "#/d/npeff/c/3", "Component 3")
            page.keyboard.press("e")
            expect(page.locator("#theme-input")).to_be_focused()
            page.keyboard.type("dry humour")
            page.locator("#note-input").fill("most of them\ncompare a film with a meal")
            page.locator("#who-input").fill("Ada")
            page.keyboard.press("Control+Enter")
            expect(page.locator("#component-theme")).to_have_text("dry humour")
            expect(page.locator("#note")).to_have_text("most of them\ncompare a film with a meal")
            expect(page.locator(".said")).to_contain_text("Ada, 20")
            expect(page.locator("#edit")).to_be_focused()
            open_page(page, port, "#/d/npeff/c/1", "Component 1")
            page.locator("#edit").click()
            expect(page.locator("#who-input")).to_have_value("Ada")
        process.kill()
        process.wait()
    with serving(run) as port, watched(browser) as page:
        open_page(page, port, "", "6 components")
        rows = page.locator("#components tbody tr")
        page.locator("#filter").fill("HUMOUR")
        expect(rows).to_have_count(1)
        expect(rows.locator(".theme")).to_have_text("dry humour")
        page.locator("#filter").fill("meal")  # notes are searched too
        expect(rows).to_have_count(1)
        page.locator("#filter").fill("")
        page.locator("#kind").select_option("unthemed")
        expect(rows).to_have_count(5)
        page.locator("#kind").select_option("themed")
        expect(rows).to_have_count(1)
        page.locator("#kind").select_option("all")
        page.get_by_role("button", name="theme", exact=True).click()
        expect(rows.first.locator(".theme")).to_have_text("dry humour")
        rows.first.locator("a").first.click()
        expect(page.locator("#component-theme")).to_have_text("dry humour")
        give(page, "wet humour")
        page.locator(".said summary").click()
        expect(page.locator(".said li")).to_have_count(2)
        expect(page.locator(".said li").nth(1)).to_contain_text("dry humour")
        give(page, "")
        expect(page.locator("#component-theme")).to_have_text("")
    assert Themes(run, "npeff").current() == {}
    assert Themes(run, "npeff").history(3)[0].who == "Ada"


def test_an_edit_can_be_left_and_given_up(browser: Browser, run: Run) -> None:
    with serving(run) as port, watched(browser) as page:
        open_page(page, port, "#/d/npeff/c/2", "Component 2")
        page.locator("#edit").click()
        page.locator("#theme-input").fill("half a tho")
        page.get_by_role("link", name="3 →").click()
        expect(page.locator("main h1")).to_have_text("Component 3")
        expect(page.locator("#theme-input")).to_have_count(0)
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#theme-input")).to_have_value("half a tho")
        page.locator("#theme-input").press("Escape")
        expect(page.locator("#edit")).to_have_text("Give it a theme")
        page.locator("#edit").click()
        expect(page.locator("#theme-input")).to_have_value("")
        page.keyboard.type("arrows ← → u / e t stay in the box")
        expect(page.locator("main h1")).to_have_text("Component 2")
        page.get_by_role("button", name="Cancel").click()
    assert Themes(run, "npeff").history(2) == []


def test_hostile_themes_and_notes_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(40)])
    add_decomposition(run, "clusters", len(HOSTILE))
    for j, text in enumerate(HOSTILE):
        Themes(run, "clusters").add(j, text[:200], text, who=text[:100])
    with serving(run) as port, watched(browser) as page:
        open_page(page, port, "", f"{len(HOSTILE)} components")
        expect(page.locator("#components .theme")).to_have_count(len(HOSTILE))
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400
        for j, text in enumerate(HOSTILE):
            page.goto(f"http://127.0.0.1:{port}/#/d/clusters/c/{j}")
            expect(page.locator("main h1")).to_have_text(f"Component {j}")
            note = page.evaluate("document.getElementById('note').textContent")
            assert note == shown(text.strip())
            theme = page.evaluate("document.getElementById('component-theme').textContent")
            assert theme == shown(" ".join(text[:200].split()))
            assert page.locator("main script, main img, main iframe, main b, main svg[onload]").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth") <= 1400
            page.locator("#edit").click()
            assert page.locator("#note-input").input_value() == text.strip()
            page.get_by_role("button", name="Cancel").click()
        assert page.evaluate("window.ran") is None


def test_an_automatic_theme_says_so(browser: Browser, run: Run) -> None:
    Themes(run, "npeff").add(1, "a guess", source="judge:tiny")
    with serving(run) as port, watched(browser) as page:
        open_page(page, port, "#/d/npeff/c/1", "Component 1")
        expect(page.locator("#component-theme .automatic")).to_have_text("a guess")
        expect(page.locator(".said")).to_contain_text("automatic: judge:tiny")


def test_an_edit_that_fails_is_not_lost(browser: Browser, run: Run) -> None:
    context = browser.new_context()
    page = context.new_page()
    with serving(run) as port:
        open_page(page, port, "#/d/npeff/c/2", "Component 2")
        page.locator("#edit").click()
        page.locator("#theme-input").fill("precious")
        context.set_offline(True)
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.locator(".editor [role=status]")).to_contain_text("Not saved. Nobody answers.")
        expect(page.locator("#theme-input")).to_have_value("precious")
        context.set_offline(False)
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.locator("#component-theme")).to_have_text("precious")
    context.close()


def test_an_export_shows_themes_and_takes_none(browser: Browser, run: Run, tmp_path: Path) -> None:
    site = export(ExportConfig(str(run.path), str(tmp_path / "site"))).parent
    with watched(browser) as page:
        show(page, site, "#/d/npeff/c/4", "Component 4")
        expect(page.locator(".said")).to_have_count(0)
    Themes(run, "npeff").add(4, "<i>seen</i>", "a note", who="Ada")
    export(ExportConfig(str(run.path), str(site)))  # nothing else has changed, and the theme is there
    with watched(browser) as page:
        show(page, site, "", "6 components")
        expect(page.locator("#components .theme")).to_have_text("<i>seen</i>")
        expect(page.locator("#try-link")).to_be_hidden()
        expect(page.locator("footer .when-static")).to_be_visible()
        expect(page.locator("footer .when-served")).to_be_hidden()
        show(page, site, "#/d/npeff/c/4", "Component 4")
        expect(page.locator("#note")).to_have_text("a note")
        expect(page.locator("#edit")).to_have_count(0)
        show(page, site, "#/try", "Try your own text")
        expect(page.locator("main")).to_contain_text("npeff explore")
        expect(page.locator("main form")).to_have_count(0)


# --- texts to try -------------------------------------------------------------------------------------------------


def test_variants_of_a_text_side_by_side(browser: Browser, tiny_run: Run, tiny_port: int) -> None:
    Themes(tiny_run, NAME).add(0, "a theme")
    with watched(browser) as page:
        open_page(page, tiny_port, "", "5 components")
        page.keyboard.press("t")
        expect(page.locator("main h1")).to_have_text("Try your own text")
        page.get_by_label("Text A").fill("a film of great charm and wit")
        page.get_by_role("button", name="Add a variant").click()
        expect(page.get_by_label("Text B")).to_be_focused()
        expect(page.get_by_label("Text B")).to_have_value("a film of great charm and wit")
        page.get_by_label("Text B").fill("dull , flat and far too long")
        page.keyboard.press("Control+Enter")
        answers = page.locator("#tried-answers tbody tr")
        expect(answers).to_have_count(2, timeout=60_000)  # the model is loaded meanwhile
        cells = [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in answers.all()]
        assert [sum(float(row[n].rstrip("%")) for row in cells) for n in (0, 1)] == pytest.approx([100, 100], abs=0.2)
        expect(page.locator("#tried-answers .likeliest")).to_have_count(2)
        components = page.locator("#tried-components tbody tr")
        assert components.count() > 1
        expect(components.last).to_contain_text("left over")
        assert page.locator("#tried-components .more, #tried-components .less").count() > 0
        # back from a component everything is as it was
        link = components.first.locator("a")
        name = link.inner_text()
        link.click()
        expect(page.locator("main h1")).to_have_text(name)
        page.go_back()
        expect(page.get_by_label("Text B")).to_have_value("dull , flat and far too long")
        expect(page.locator("#tried-answers tbody tr")).to_have_count(2)
        page.get_by_role("button", name="Remove B").click()
        expect(page.get_by_label("Text B")).to_have_count(0)
        while page.get_by_role("button", name="Add a variant").is_enabled():
            page.get_by_role("button", name="Add a variant").click()
        expect(page.locator(".variant")).to_have_count(8)
        page.get_by_label("Text H").fill("")
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("form [role=status]")).to_have_text("Every variant needs a text.")


def test_an_example_is_the_start_of_variants(browser: Browser, tiny_run: Run, tiny_port: int) -> None:
    text = tiny_run.table["text"][3].as_py()
    with watched(browser) as page:
        open_page(page, tiny_port, f"#/d/{NAME}/e/3", "Example 3")
        page.get_by_role("link", name="Try variants of this text").click()
        expect(page.get_by_label("Text A")).to_have_value(text)
        page.get_by_label("Text B").fill("edited")
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("#tried-components")).to_be_visible(timeout=60_000)
        page.keyboard.press("Escape")
        page.reload()  # nothing typed is kept then, but the address is good
        expect(page.get_by_label("Text A")).to_have_value("")


def test_hostile_texts_can_be_tried(browser: Browser, tiny_port: int) -> None:
    chosen = [text for text in HOSTILE if len(text) < 100][:8]
    with watched(browser) as page:
        open_page(page, tiny_port, "#/try", "Try your own text")
        for n, text in enumerate(chosen):
            if n:
                page.get_by_role("button", name="Add a variant").click()
            page.locator(".variant textarea").nth(n).fill(text)
        page.get_by_role("button", name="Compare").click()
        heads = page.locator("#tried-components thead .variant-text")
        expect(heads).to_have_count(8, timeout=60_000)
        for n, text in enumerate(chosen):
            assert heads.nth(n).evaluate("node => node.textContent") == shown(text.replace("\r", "\n"))
        assert page.locator("main script, main img, main iframe, main svg[onload]").count() == 0
        assert page.evaluate("window.ran") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens(browser: Browser, tiny_port: int, scheme: str) -> None:
    with watched(browser, 400, scheme) as page:
        open_page(page, tiny_port, "#/try", "Try your own text")
        page.get_by_label("Text A").fill("w" * 90)
        page.get_by_role("button", name="Add a variant").click()
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("#tried-components")).to_be_visible(timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.goto(f"http://127.0.0.1:{tiny_port}/#/d/{NAME}/c/0")
        page.locator("#edit").click()
        expect(page.locator("#theme-input")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_the_model_is_gone(browser: Browser, run: Run) -> None:
    with serving(run) as port, watched(browser) as page:  # a made-up run: it has no model
        open_page(page, port, "#/try", "Try your own text")
        page.get_by_label("Text A").fill("anything")
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("form [role=status]")).not_to_have_text(re.compile("Computing|Loading|^$"))
        expect(page.get_by_role("button", name="Compare")).to_be_enabled()
