"""A real Chromium, pages that are watched, and texts that try to break out of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, Playwright, expect

HOSTILE = [
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 2'>",
    '"><svg onload=window.ran=3>',
    "</script><script>window.ran = 4</script>",
    "<iframe src='javascript:parent.ran=5'></iframe>",
    "<a href='javascript:window.ran=6'>click</a> &amp; &lt;",
    "bell\x07 null\x00 escape\x1b[31m delete\x7f tab\t line\nbreak",
    "left \u202eoverride\u202c right \u2067isolated",
    "שלום עולם، مرحبا بالعالم",
    "emoji 👩‍👩‍👧 🇺🇳 and zalgo z̸̢̛̛a̵l̷g̸o",
    "w" * 3000,
    "line\u2028separator\u2029paragraph",
    "${window.ran = 7} `tick` {{7*7}} %3Cscript%3E",
    "__proto__",
]


def launch(driver: Playwright) -> Browser:
    """The Chromium of this machine."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "These tests drive a real browser and need Chromium: apt-get install chromium."
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    return driver.chromium.launch(executable_path=found, args=arguments)


@contextmanager
def watched(browser: Browser, width: int = 1400, scheme: str = "light") -> Iterator[Page]:
    """A page whose console must stay empty and which must not ask any other host."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(10_000)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
    page.on("dialog", lambda dialog: said.append("dialog"))
    page.on("request", lambda request: said.append(request.url) if not is_ours(request.url) else None)
    yield page
    context.close()
    assert said == []


def is_ours(url: str) -> bool:
    return bool(re.match(r"file://|data:,|http://127\.0\.0\.1:", url))


def show(page: Page, site: Path, route: str, title: str) -> None:
    page.goto(f"{site.as_uri()}/index.html{route}")
    expect(page.locator("main h1")).to_have_text(title)
