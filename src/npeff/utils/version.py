"""The version of npeff."""

__version__ = "0.1.0"
