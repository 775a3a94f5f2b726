"""The run of the tests of explanations serves here, too."""

from tests.explain.conftest import prepared, run  # noqa: F401
