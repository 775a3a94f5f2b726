"""The estimate of a collection's cost."""

from npeff.collect.estimate import representative


def test_measured_batches_are_in_the_middle_of_equal_shares_of_the_tokens():
    assert representative([10] * 12, 3) == [1, 5, 9]  # tokens 20, 60 and 100 of 120
    assert representative([100, 1, 1, 1], 3) == [0]  # nearly everything is in one
    assert representative([1, 1, 1, 100], 3) == [3]
    assert representative([7], 3) == [0]
    assert representative([50, 50, 3], 3) == [0, 1]  # never what is left over
