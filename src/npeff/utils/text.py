"""Words and quantities for people to read."""


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


def amount(size: float) -> str:
    """Bytes in the unit that people would use."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def percent(share: float, digits: int = 2) -> str:
    """A share as a percentage with so many significant digits, and never in scientific notation."""
    value = float(f"{100 * share:.{digits}g}")
    return f"{value:.0f}%" if value >= 10 ** (digits - 1) else f"{value:.10f}".rstrip("0").rstrip(".") + "%"


def shorten(text: str, length: int) -> str:
    """`text` on one line, cut to `length` characters."""
    return cut(" ".join(text.split()), length)


def cut(text: str, length: int) -> str:
    """`text`, shortened to `length` characters; line breaks are kept."""
    return text if len(text) <= length else text[: length - 1] + "…"


def short(value: float | None) -> float | None:
    """A number with six significant digits: what float32 holds, and half the JSON."""
    return None if value is None else float(f"{value:.6g}")


def rounded(values: list[float], digits: int = 5) -> list[float]:
    """Numbers with so many significant digits; float32 holds six."""
    return [float(f"{value:.{digits}g}") for value in values]


def is_text(value: object) -> bool:
    """Whether `value` is a string that UTF-8 can hold (half of a surrogate pair is not)."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
