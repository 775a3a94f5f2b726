"""The form as a page: one file that opens from disk, asks no other host and keeps answers in the browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from importlib import resources

from npeff.study.kit import FORMAT, Kit


def render(kit: Kit, form: int) -> str:
    """The page of one form, ASCII only."""
    style, script = _asset("form.css"), _asset("form.js")
    data = {
        "format": FORMAT,
        "kit": kit.id,
        "form": form,
        "forms": len(kit.forms),
        "preamble": kit.preamble,
        "samples": [dataclasses.asdict(sample) for sample in kit.samples],
        "groups": [{"number": group.number, "texts": group.texts} for group in kit.of_form(form)],
    }
    # without "<" no text can end the element that the data stand in
    body = json.dumps(data).replace("<", "\\u003c")
    parts = {
        "@STYLE_HASH@": _hash(style),
        "@SCRIPT_HASH@": _hash(script),
        "@STYLE@": style,
        "@SCRIPT@": script,
        "@DATA@": body,  # last: nothing is replaced in the data
    }
    page = _asset("form.html")
    for mark, value in parts.items():
        page = page.replace(mark, value)
    return page


def _asset(name: str) -> str:
    return (resources.files("npeff") / "study" / "form" / name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    """As the page's policy wants it: only this very script and style may run."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
