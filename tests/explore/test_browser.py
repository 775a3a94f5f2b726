"""The page in a real Chromium: from disk and from the server, with friendly and with hostile texts."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from npeff.explore.config import ExportConfig
from npeff.explore.export import export
from npeff.explore.server import make_server
from npeff.store.run import Run
from tests.browser import HOSTILE, show, watched
from tests.explore.test_export import data
from tests.synthetic import add_decomposition, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    texts = [f"an ordinary review number {i}" for i in range(300)]
    texts[290] = "a needle in the hay"
    run = make_run(tmp_path_factory.mktemp("browser") / "run", texts, aside=[7])
    for method in ("npeff", "svd-gradients", "clusters"):
        add_decomposition(run, method, 12)
    return run


@pytest.fixture(scope="module")
def site(run: Run) -> Path:
    return export(ExportConfig(str(run.path), str(run.path / "site"))).parent


def test_overview_sort_filter_and_search_in_the_table(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "", "12 components")
        rows = page.locator("#components tbody tr")
        expect(rows).to_have_count(12)

        def numbers() -> list[int]:
            return [int(text) for text in rows.locator("td:first-child").all_inner_texts()]

        page.get_by_role("button", name="component", exact=True).click()
        assert numbers() == list(range(12))
        expect(page.locator("th[data-name=number]")).to_have_attribute("aria-sort", "ascending")
        page.get_by_role("button", name="component", exact=True).press("Enter")
        assert numbers() == list(range(11, -1, -1))
        page.get_by_role("button", name="energy", exact=True).click()
        energies = [float(x.strip().rstrip("%")) for x in rows.locator("td:nth-child(3)").all_inner_texts()]
        assert energies == sorted(energies, reverse=True)
        page.locator("#filter").fill("nothing like this")
        expect(rows).to_have_count(0)
        first = page.locator("#filter")
        first.fill("")
        page.locator("#kind").select_option("prediction")
        tuned = rows.count()
        assert 0 < tuned < 12
        expect(rows.locator(".badge.prediction")).to_have_count(tuned)
        expect(page.locator("svg .curve")).to_have_count(1)
        expect(page.locator("#methods tbody tr")).to_have_count(3)
        expect(page.locator("#map circle")).to_have_count(12)
        page.locator("#map a").nth(5).click()
        expect(page.locator("main h1")).to_have_text("Component 5")


def test_words_are_explained_where_they_stand(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "#/d/npeff", "12 components")
        button = page.get_by_role("button", name="What does this mean: energy?")
        assert "squared coefficients" in (button.get_attribute("title") or "")
        button.focus()  # by keyboard; a finger clicks
        page.keyboard.press("Enter")
        expect(page.locator("#meaning")).to_contain_text("squared coefficients")
        page.keyboard.press("Escape")
        expect(page.locator("#meaning")).to_be_empty()
        expect(button).to_be_focused()
        page.locator("footer").get_by_role("link", name="all words").click()
        expect(page.locator("main h1")).to_have_text("Words")
        assert page.locator("#words dt").count() == page.locator("#words dd").count() > 20


def test_the_overview_says_where_to_start(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "#/d/npeff", "12 components")
        names = [f"Component {j}" for j in data(site, "0/components")["highlights"]]
        assert names
        expect(page.locator("#starts a")).to_have_text(names)
        page.locator("#starts a").first.click()
        expect(page.locator("main h1")).to_have_text(names[0])


def test_component_page_and_keys(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "#/d/npeff/c/3", "Component 3")
        assert page.locator("main ol.list").count() > 1  # the top and bands below it
        expect(page.locator("main ol.list").first.locator("li").first).to_contain_text("coefficient")
        expect(page.locator("main ol.list").first.locator("li").first).to_contain_text("share")
        expect(page.locator("table.cross")).to_contain_text("Positive")
        assert page.locator("svg .column").count() == 24
        page.keyboard.press("ArrowRight")
        expect(page.locator("main h1")).to_have_text("Component 4")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("main h1")).to_have_text("Component 3")
        related = page.locator("aside li a").first
        name = related.inner_text()
        related.click()
        expect(page.locator("main h1")).to_have_text(name)
        page.keyboard.press("u")
        expect(page.locator("main h1")).to_have_text("12 components")
        page.go_back()
        expect(page.locator("main h1")).to_have_text(name)


def test_signed_components_have_three_orderings(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "#/d/svd-gradients/c/1", "Component 1")
        first = page.locator("main ol.list li a.text").first
        positive = first.inner_text()
        page.get_by_role("button", name="negative").click()
        assert first.inner_text() != positive
        expect(page.get_by_role("button", name="negative")).to_have_attribute("aria-pressed", "true")


def test_example_page_and_other_decompositions(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "#/d/npeff/e/290", "Example 290")
        expect(page.locator("#example-text")).to_have_text("a needle in the hay")
        expect(page.locator("main")).to_contain_text("left over")
        assert page.locator(".stack a").count() == page.locator("main ul.list li").count() > 0
        show(page, site, "#/d/npeff/e/7", "Example 7")
        expect(page.locator("main")).to_contain_text("Set aside: not finite")
        page.locator("#pick").select_option(label="clusters")
        expect(page.locator("main")).to_contain_text("method clusters")
        show(page, site, "#/d/clusters/e/290", "Example 290")
        expect(page.locator("main ul.list li")).to_have_count(1)


def test_search(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        show(page, site, "", "12 components")
        page.keyboard.press("/")
        page.keyboard.type("NEEDLE hay")
        page.keyboard.press("Enter")
        expect(page.locator("#hits li")).to_have_count(1)
        expect(page.get_by_role("status")).to_have_text("1 of 300 examples contain every word.")
        used = page.locator("#hits .facts a")  # the components that the hit uses most
        expect(used).to_have_count(3)
        used.first.click()
        expect(page.locator("main h1")).to_have_text(f"Component {data(site, '0/examples/1')['components'][34][0]}")
        page.go_back()
        page.locator("#hits a.text").click()
        expect(page.locator("main h1")).to_have_text("Example 290")
        page.locator("#query").fill("12")
        page.locator("#query").press("Enter")
        expect(page.locator("main h1")).to_have_text("Example 12")
        page.locator("#query").fill("ordinary")
        page.locator("#query").press("Enter")
        expect(page.locator("#hits li")).to_have_count(200)


def test_only_what_is_looked_at_is_loaded(browser: Browser, site: Path) -> None:
    with watched(browser) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.split("/site/")[-1]))
        show(page, site, "", "12 components")
        assert [name for name in asked if name.startswith("data/")] == [
            "data/run.js",
            "data/0/components.js",
            "data/0/themes.js",
        ]
        show(page, site, "#/d/npeff/c/2", "Component 2")
        assert [name for name in asked if name.startswith("data/")][3:] == ["data/0/component/2.js"]


@pytest.mark.parametrize(
    "route", ["#/d/npeff/c/99", "#/d/npeff/c/x", "#/d/npeff/e/-1", "#/nowhere", "#/d/absent", "#/%E0%A4%A"]
)
def test_unknown_addresses(browser: Browser, site: Path, route: str) -> None:
    with watched(browser) as page:
        show(page, site, route, "Not found")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "route", ["#/", "#/d/npeff/c/0", "#/d/svd-gradients/c/0", "#/d/npeff/e/3", "#/d/npeff/search/review"]
)
def test_narrow_screens_and_both_themes(browser: Browser, site: Path, route: str, scheme: str) -> None:
    with watched(browser, 400, scheme) as page:
        page.goto(f"{site.as_uri()}/index.html{route}")
        expect(page.locator("main h1")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        back, text = page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        dark = [sum(map(int, re.findall(r"\d+", colour)[:3])) < 384 for colour in (back, text)]
        assert dark == ([True, False] if scheme == "dark" else [False, True])
        page.locator("#scheme").click()
        assert page.evaluate("document.documentElement.dataset.scheme") != scheme


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [HOSTILE[i % len(HOSTILE)] + f" {i}" for i in range(70)]
    labels = ["<b>Negative</b>", "</script><script>window.ran=8</script>"]
    run = make_run(tmp_path_factory.mktemp("hostile") / "run", texts, task_labels=labels)
    add_decomposition(run, "npeff", 4, name="a b#c?d%e<i>")
    return export(ExportConfig(str(run.path), str(run.path / "site"))).parent


def test_hostile_texts_are_shown_as_text_and_run_nothing(browser: Browser, hostile: Path) -> None:
    with watched(browser) as page:
        show(page, hostile, "", "4 components")
        for j in range(4):
            page.locator("#components td:first-child a", has_text=re.compile(f"^{j}$")).click()
            expect(page.locator("main h1")).to_have_text(f"Component {j}")
            assert page.locator("main script, main img, main iframe, main b, main svg[onload]").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth") <= 1400
            page.keyboard.press("u")
            expect(page.locator("main h1")).to_have_text("4 components")
        base = page.url.split("#")[0]
        name = "a%20b%23c%3Fd%25e%3Ci%3E"
        for i, text in enumerate(HOSTILE):
            page.goto(f"{base}#/d/{name}/e/{i}")
            expect(page.locator("main h1")).to_have_text(f"Example {i}")
            shown = page.evaluate("document.getElementById('example-text').textContent")
            plain = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda c: chr(0x2400 + ord(c[0])), f"{text} {i}")
            assert shown == plain.replace("\x7f", "\u2421")
            assert page.evaluate("document.documentElement.scrollWidth") <= 1400
        page.goto(f"{base}#/d/{name}/search/%3Cscript%3E")
        expect(page.locator("#hits li").first).to_contain_text("<script>window.ran")
        assert page.evaluate("window.ran") is None
        assert page.evaluate("Object.prototype.polluted") is None


def test_the_policy_forbids_other_hosts_and_inline_scripts(browser: Browser, site: Path) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{site.as_uri()}/index.html")
    expect(page.locator("main h1")).to_be_visible()
    blocked: list[str] = page.evaluate(
        """async () => {
            const found = [];
            document.addEventListener("securitypolicyviolation", (e) => found.push(e.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.ran = 1";
            document.head.append(script);
            const image = document.createElement("img");
            image.src = "http://192.0.2.1/x.png";
            document.body.append(image);
            await fetch("http://192.0.2.1/").catch(() => 0);
            await new Promise((done) => setTimeout(done, 200));
            return found;
        }"""
    )
    assert {"script-src-elem", "img-src", "connect-src"} <= set(blocked)
    assert page.evaluate("window.ran") is None
    context.close()


def test_the_same_page_from_the_server(browser: Browser, site: Path) -> None:
    server = make_server(site)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with watched(browser) as page:
            page.goto(f"http://127.0.0.1:{server.server_port}/#/d/npeff/c/1")
            expect(page.locator("main h1")).to_have_text("Component 1")
            page.locator("main ol.list a").first.click()
            expect(page.locator("main h1")).to_contain_text("Example")
        # a page of another origin cannot read the data, though they are scripts
        context = browser.new_context()
        page = context.new_page()
        page.goto("data:text/html,<title>elsewhere</title>")
        got = page.evaluate(
            """async (url) => {
                window.npeffData = () => { window.leaked = true; };
                const script = document.createElement("script");
                script.src = url;
                const ended = new Promise((done) => {
                    script.onload = () => done("load");
                    script.onerror = () => done("error");
                });
                document.head.append(script);
                return [await ended, window.leaked || false];
            }""",
            f"http://127.0.0.1:{server.server_port}/data/run.js",
        )
        assert got == ["error", False]
        context.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
