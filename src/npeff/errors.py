"""The one exception a user's mistake raises."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave is wrong; the message says what, and what to do about it.

    The command line prints the message without a traceback and exits with code 2.
    """
