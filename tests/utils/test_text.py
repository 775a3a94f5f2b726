"""Quantities in words."""

import pytest

from npeff.utils.text import amount, duration, percent


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [(1, 2, "100%"), (0.9999, 3, "100%"), (0.5, 2, "50%"), (0.0512, 2, "5.1%"), (2e-7, 2, "0.00002%"), (0, 2, "0%")],
)
def test_percentages_are_never_in_scientific_notation(share, digits, text):
    assert percent(share, digits) == text


def test_units():
    assert (amount(999), amount(1.5e9), duration(90), duration(7200)) == (
        "999 bytes",
        "1.5 GB",
        "1.5 minutes",
        "2.0 hours",
    )
