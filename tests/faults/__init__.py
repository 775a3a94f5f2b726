"""Faults, load and bad input.

NPEFF_FAULTS=long (`make test-faults`) runs the same tests with many more cases, NPEFF_FAULTS=smoke with a tenth.
"""

from __future__ import annotations

import os

MODE = os.environ.get("NPEFF_FAULTS", "short")


def cases(short: int, long: int) -> int:
    """How many cases of a test to run."""
    return {"long": long, "smoke": max(1, short // 10)}.get(MODE, short)
