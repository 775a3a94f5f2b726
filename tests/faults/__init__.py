"""Faults, load and bad input. NPEFF_FAULTS=long (`make test-faults`) runs the same tests with many more cases."""

from __future__ import annotations

import os

LONG = os.environ.get("NPEFF_FAULTS") == "long"


def cases(short: int, long: int) -> int:
    """How many cases of a test to run."""
    return long if LONG else short
