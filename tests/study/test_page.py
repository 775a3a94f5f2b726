"""The page in a real Chromium, opened from disk: filled in, downloaded, scored; with hostile texts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from npeff.study.config import ScoreConfig
from npeff.study.kit import Answer, Group, Kit, Sample, read_kit, read_sheet
from npeff.study.make import render
from npeff.study.score import score
from tests.browser import HOSTILE, watched


def show(page: Page, path: Path) -> None:
    page.goto(path.as_uri())
    expect(page.locator("#group-1, #group-11").first).to_be_visible()


def reload_until(page: Page, status: str) -> None:
    """Reload; once more where Chromium has not yet handed over what the page before had stored."""
    for _ in range(5):
        page.reload()
        if page.get_by_role("status").inner_text() == status:
            return
        page.wait_for_timeout(500)
    expect(page.get_by_role("status")).to_have_text(status)


def download(page: Page, folder: Path) -> Path:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download my answers").click()
    target = folder / waiting.value.suggested_filename
    waiting.value.save_as(target)
    return target


def test_filled_with_the_mouse_and_scored(browser: Browser, made: Path, tmp_path: Path) -> None:
    with watched(browser) as page:
        show(page, made / "form-1.html")
        expect(page.locator("section.sample")).to_have_count(2)
        expect(page.locator("main section:not(.sample)")).to_have_count(10)
        expect(page.get_by_role("status")).to_have_text("0 of 10 answered")
        page.get_by_role("button", name="Download my answers").click()
        expect(page.locator("#saved")).to_have_text("Please give your name first.")
        page.get_by_label("Your name").fill("Ada Lovelace / 1")
        first = page.locator("#group-1")
        first.get_by_label("yes", exact=True).check()
        first.get_by_label("Theme of group 1").fill("numbers <b>")
        page.locator("#group-2").get_by_label("no", exact=True).check()
        expect(page.locator("#group-2").get_by_label("Theme of group 2")).to_be_disabled()
        page.locator("#group-10").get_by_label("maybe").check()
        expect(page.get_by_role("status")).to_have_text("3 of 10 answered")
        file = download(page, tmp_path)
        expect(page.locator("#saved")).to_have_text("Downloaded; 7 not answered yet.")
    assert file.name == "answers-ada-lovelace-1-1.json"
    sheet = read_sheet(file, read_kit(made))
    assert sheet.who == "Ada Lovelace / 1"
    assert sheet.answers == {1: Answer("yes", "numbers <b>"), 2: Answer("no"), 10: Answer("maybe")}
    copied = shutil.copytree(made, tmp_path / "kit")
    assert (score(ScoreConfig(str(copied), (str(file),))) / "scores.md").is_file()


def test_filled_with_keys_alone_and_kept_over_a_reload(browser: Browser, made: Path, tmp_path: Path) -> None:
    with watched(browser) as page:
        show(page, made / "form-2.html")
        page.keyboard.press("y")
        page.keyboard.type("yes, numbers")  # letters of a theme are no answers
        page.keyboard.press("Enter")
        page.keyboard.press("n")
        page.keyboard.press("m")
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("k")
        page.keyboard.press("n")
        page.get_by_label("Your name").fill("Bob")
        expect(page.get_by_role("status")).to_have_text("4 of 10 answered")
        reload_until(page, "4 of 10 answered")
        expect(page.get_by_label("Your name")).to_have_value("Bob")
        file = download(page, tmp_path)
    assert read_sheet(file, read_kit(made)).answers == {
        11: Answer("yes", "yes, numbers"),
        12: Answer("no"),
        13: Answer("maybe"),
        14: Answer("no"),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_and_both_themes(browser: Browser, made: Path, scheme: str) -> None:
    with watched(browser, 380, scheme) as page:
        show(page, made / "form-1.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 384) == (scheme == "dark")
        page.get_by_role("button", name="Switch between light and dark").click()
        assert page.evaluate("document.documentElement.dataset.theme") != scheme


def test_hostile_texts_are_shown_as_text_and_run_nothing(browser: Browser, tmp_path: Path) -> None:
    texts = [*HOSTILE, "@SCRIPT@ @STYLE@", "<!-- <script>", "]]>"]
    groups = tuple(Group(n, 1, (text, f"plain {n}")) for n, text in enumerate(texts, 1))
    kit = Kit(
        ("<script>window.ran = 9</script>",), (Sample(tuple(texts[:5]), "yes", "<img src=x onerror=ran=1>"),), groups
    )
    (tmp_path / "form.html").write_text(render(kit, 1), encoding="ascii")
    with watched(browser) as page:
        show(page, tmp_path / "form.html")
        for n, text in enumerate(texts, 1):
            shown = page.evaluate(f"document.querySelector('#group-{n} li').textContent")
            plain = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda c: chr(0x2400 + ord(c[0])), text)
            assert shown == plain.replace("\x7f", "\u2421")
        assert page.evaluate("window.ran") is None
        assert page.locator("main img, main script, main iframe, main svg").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def test_what_the_browser_kept_may_be_anything(browser: Browser, made: Path) -> None:
    kit = read_kit(made)
    with watched(browser) as page:
        page.goto((made / "form-1.html").as_uri())
        for old in ("{", "null", '{"who": 3, "answers": {"1": {"theme": "<b>", "words": []}}}', '{"answers": 1}'):
            place = f"npeff-study:{kit.id}:1"
            # set as the page loads: what is set before a reload may not have reached the disk
            page.add_init_script(f"localStorage.setItem({json.dumps(place)}, {json.dumps(old)})")
            page.reload()
            expect(page.get_by_role("status")).to_have_text("0 of 10 answered")
            assert page.evaluate("(k) => localStorage.getItem(k)", place) == old  # only an answer writes


def test_the_page_is_one_file_that_asks_no_host(made: Path) -> None:
    text = (made / "form-1.html").read_text(encoding="ascii")
    data = re.search(r'<script type="application/json" id="kit">(.*?)</script>', text, re.DOTALL)
    assert data
    assert set(json.loads(data[1])) == {"format", "kit", "form", "forms", "preamble", "samples", "groups"}
    rest = text.replace(data[1], "")
    assert not re.search(
        r"https?:|src=|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", rest
    )
    assert "default-src 'none'" in rest
    assert "unsafe-inline" not in rest
