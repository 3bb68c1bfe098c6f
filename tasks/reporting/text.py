"""Numbers as a person reads them: the one place that decides digits, units and what an absent value looks like."""

from __future__ import annotations

import math
import re

ABSENT = "–"
# Control characters but for tab and line ends, and marks that turn the direction of the text around them.
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def ascii_absent(text: str) -> str:
    """The text with an ASCII dash for ABSENT: for streams that may be ASCII only."""
    return text.replace(ABSENT, "-")


def shown(value: float | None, spec: str) -> str:
    """The value in a format of Python's; ABSENT for None and for values that are not finite."""
    return ABSENT if value is None or not math.isfinite(value) else format(value, spec)


def number(value: float | None) -> str:
    """About four significant digits: 0.5312, 12.35, 1,234, 4.20e-05. ABSENT for None and for values that are not finite."""
    if value is None or not math.isfinite(value):
        return ABSENT
    size = abs(value)
    if value == int(value) and size < 1e9:
        return f"{int(value):,}"
    if size >= 1000:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.2e}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 10:
        return f"{value:.2f}"
    if size >= 1:
        return f"{value:.3f}"
    return f"{value:.4f}" if size >= 0.001 else f"{value:.2e}"


def short(value: float) -> str:
    """For chart labels: three significant digits (two beside an exponent), no trailing zeros: 0.2, 0.894, 6.1e-5, 12.3k, 2.1M."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 9.995e-4:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    for power, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= power:
            unit = 1e3 if suffix == "k" else power
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def score(value: float | None) -> str:
    """A reward or an accuracy: three decimals, so that a column of them lines up."""
    return shown(value, ".3f")


def estimate(value: float | None, low: float | None, high: float | None) -> str:
    """A score with its interval: 0.365 [0.30, 0.43]; without one, the score alone."""
    return score(value) + interval(low, high)


def change(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A difference of scores: +0.494 [0.41, 0.58]."""
    return shown(value, "+.3f") + interval(low, high)


def interval(low: float | None, high: float | None) -> str:
    """What stands after a value: " [0.30, 0.43]", or nothing."""
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def share(value: float | None) -> str:
    """A fraction: 1.2%."""
    return shown(value, ".1%")


def visible(text: str) -> str:
    """What a model or a reward said, with its control characters written out: they would be lost, or change the text around them."""
    return _UNSEEN.sub(lambda found: f"\\x{ord(found[0]):02x}" if ord(found[0]) < 256 else f"\\u{ord(found[0]):04x}", text)


def duration(seconds: float | None) -> str:
    """4.2 s, 3 min 05 s, 2 h 07 min."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def clock(seconds: float) -> str:
    """A countdown: 0:07, 12:30, 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
