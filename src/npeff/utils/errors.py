"""The one exception a user's mistake raises, and how to tell what nobody can help."""

import errno


class UserError(Exception):
    """Something the user gave is wrong; the message says what, and what to do about it.

    The command line prints the message without a traceback and exits with code 2.
    """


# how torch, Arrow, safetensors, the loader of shared libraries and the system say that memory is used up, other than by
# an exception of its own
_NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "annot allocate memory", "bad_alloc", "start new thread"),
    "failed to map segment",
)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that there is not enough memory; then no file is to blame.

    Args:
        error: What was raised, if anything.

    Returns:
        Whether it is that.
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, Exception) and any(sign in str(error) for sign in _NO_MEMORY))
    )


def first_line(error: BaseException) -> str:
    """What an error says, in one line without a full stop: other packages write paragraphs."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    told = next((n for n, line in enumerate(lines) if not line.rstrip(".").endswith(":")), len(lines) - 1)
    return " ".join(lines[: told + 1]).rstrip(".")
