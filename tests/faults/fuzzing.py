"""Random and malformed input, and what is expected of whoever meets it."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from npeff import cli
from npeff.utils.errors import UserError

HANG = 60.0
"""Seconds after which a single case counts as a hang; the slowest takes a fraction of one."""


def seeded() -> random.Random:
    """A generator whose seed is printed, so that a failure can be had again."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    return random.Random(seed)


def many(count: int) -> settings:
    """Settings of a property test with so many cases."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """Fail if the block does not end."""

    def stop(*_: object) -> None:
        raise AssertionError(f"no answer in {HANG} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def only_user_errors() -> Iterator[None]:
    """The block may refuse what it is given, in words; nothing else may go wrong."""
    with no_hang(), contextlib.suppress(UserError):
        yield


def run_command(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of a command in this process; any other end than by an exit code is an error."""
    said = io.StringIO()
    with no_hang(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code: Any = cli.main(arguments)
        except SystemExit as error:
            code = error.code
    assert code in (0, 2), (arguments, code, said.getvalue()[-2000:])
    assert "Traceback" not in said.getvalue(), (arguments, said.getvalue()[-2000:])
    return code, said.getvalue()


# --- values ---------------------------------------------------------------------------------------------------------

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"), True, False),
)
TEXTS = (
    *("", " ", "\x00", "\n", "../../etc/passwd", "/etc/passwd", "C:\\x", "a" * 5000, "\ud800", "\u202e\u200b", "é😀"),
    *(
        "{text}",
        "{",
        "}}",
        "{text!r}",
        "{0}",
        "null",
        "true",
        "~",
        "-1",
        "nan",
        "*a",
        "&a",
        "<<",
        "!!python/name:os.system",
    ),
)
ODD_VALUES = st.recursive(
    st.none() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
"""For property tests, whose failures come out small; `odd_value` is ten times quicker."""


def odd_value(random: random.Random, depth: int = 0) -> Any:
    """A JSON value that nobody expects."""
    kind = random.randrange(6 if depth < 2 else 4)
    if kind == 0:
        return random.choice((None, True, False))
    if kind == 1:
        return random.choice(NUMBERS)
    if kind == 2:
        return random.choice(TEXTS)
    if kind == 3:
        return "".join(chr(random.choice((random.randrange(128), random.randrange(0x11000)))) for _ in range(5))
    count = random.randrange(4)
    if kind == 4:
        return [odd_value(random, depth + 1) for _ in range(count)]
    return {str(random.choice(TEXTS))[:9]: odd_value(random, depth + 1) for _ in range(count)}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all entries in nested dictionaries and lists."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def changed(value: Any, path: tuple[Any, ...], new: Any, remove: bool = False) -> Any:
    """A copy of nested dictionaries and lists with one entry replaced or removed."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and remove:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], new, remove)
    return copy


# --- bytes ----------------------------------------------------------------------------------------------------------

PIECES = (
    *(
        b"\x00",
        b"\xff",
        b"\xfe\xff",
        b"\xef\xbb\xbf",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"\t",
        b'"',
        b"'",
        b",",
        b":",
        b"{",
        b"}",
    ),
    *(b"[", b"]", b"- ", b"? ", b"|", b">", b"&a ", b"*a", b"!!python/object:os.system ", b"!!binary x", b"<<: ", b"#"),
    *(b"\\ud800", b"NaN", b"1e999", b"-Infinity", b"null", b"2026-99-99", b"0x", b"1_0", b"\x1b[2J", b"\xc3\x28"),
    *(
        "é".encode("latin-1"),
        "né 😀".encode("utf-16"),
        "\u2028\u202e".encode(),
        b"[" * 3000,
        b"a" * 20_000,
        b'{"a":' * 2000,
    ),
)


def mutated(content: bytes, random: random.Random) -> bytes:
    """Some bytes changed, inserted, removed, repeated or cut off."""
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        start = random.randrange(len(content) + 1)
        stop = min(len(content), start + random.choice((0, 1, 1, 2, 8, 64)))
        kind = random.randrange(6)
        if kind == 0:
            content = content[:start] + random.choice(PIECES) + content[start:]
        elif kind == 1:
            content = content[:start] + random.choice(PIECES) + content[stop:]
        elif kind == 2:
            content = content[:start] + content[stop:]
        elif kind == 3:
            content = content[:stop] + content[start:stop] * random.choice((1, 2, 50)) + content[stop:]
        elif kind == 4 and content:
            place = random.randrange(len(content))
            content = content[:place] + bytes([content[place] ^ (1 << random.randrange(8))]) + content[place + 1 :]
        else:
            content = content[:start]
    return content
