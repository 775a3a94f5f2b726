"""The form as a page: one file that opens from disk, asks no other host and keeps answers in the browser."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources

from npeff.study.kit import Kit
from npeff.utils.configs import replace, to_dict


def render(kit: Kit, form: int) -> str:
    """The page of one form.

    Args:
        kit: The kit.
        form: Number of the form.

    Returns:
        HTML, ASCII only.
    """
    shown = replace(kit, kit=kit.id, groups=tuple(kit.of_form(form)))
    # without "<" no text can end the element that the data stand in
    data = json.dumps({**to_dict(shown), "form": form, "forms": len(kit.forms)}).replace("<", "\\u003c")
    page, style, script = map(_asset, ("form.html", "form.css", "form.js"))
    page = page.replace("@STYLE_HASH@", _hash(style)).replace("@SCRIPT_HASH@", _hash(script))
    # the data come last: nothing is replaced in them
    return page.replace("@STYLE@", style).replace("@SCRIPT@", script).replace("@DATA@", data)


def _asset(name: str) -> str:
    return (resources.files("npeff") / "study" / "form" / name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    """As the page's policy wants it: only this very script and style may run."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
