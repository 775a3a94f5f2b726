"""The version of npeff."""

__version__ = "0.2.0"
