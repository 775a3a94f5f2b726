"""Benchmarks: `python -m bench`, see __main__.py."""

from __future__ import annotations

import operator
from typing import Any

COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


def entry(name: str, value: float, bar: str, holds: bool = True) -> dict[str, Any]:
    """A result: it holds if `value` is on the right side of `bar` (as "<= 1.15") and `holds`, what else it needs.

    A value that is only "reported" has no bar.
    """
    sign, _, limit = bar.partition(" ")
    return {
        "name": name,
        "value": float(value),
        "bar": bar,
        "holds": bool(holds and (not limit or COMPARE[sign](value, float(limit)))),
    }
