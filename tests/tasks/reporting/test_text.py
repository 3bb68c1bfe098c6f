import math

import pytest

from tasks.reporting.text import ascii_absent, change, clock, duration, estimate, number, score, share, short, visible


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.53124, "0.5312"),
        (-0.5, "-0.5000"),
        (12.3456, "12.35"),
        (672.94, "672.9"),
        (1234.5, "1,234"),
        (65.0, "65"),
        (3_150_000, "3,150,000"),
        (2.5e12, "2.50e+12"),
        (4.2e-5, "4.20e-05"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.2 * 3, "0.6"), (0.8941, "0.894"), (1000, "1000"), (12345, "12.3k"), (2.1e6, "2.1M"), (1e-4, "1e-4"), (6.06e-5, "6.1e-5")],
)
def test_short(value: float, shown: str) -> None:
    assert short(value) == shown


def test_score_and_times() -> None:
    assert [score(0.5), score(None), score(math.nan)] == ["0.500", "–", "–"]
    assert [duration(s) for s in (0.04, 59.94, 59.96, 185, 7620)] == ["0.0 s", "59.9 s", "1 min 00 s", "3 min 05 s", "2 h 07 min"]
    assert [clock(s) for s in (-3, 7, 750, 3723)] == ["0:00", "0:07", "12:30", "1:02:03"]


def test_scores_with_intervals() -> None:
    assert estimate(0.365, 0.2999, 0.4312) == "0.365 [0.30, 0.43]"
    assert [estimate(0.5, None, None), ascii_absent(estimate(None, None, None))] == ["0.500", "-"]
    assert [change(0.494, 0.41, 0.58), change(-0.1), change(None)] == ["+0.494 [0.41, 0.58]", "-0.100", "–"]
    assert [share(0.0123), share(0), share(None)] == ["1.2%", "0.0%", "–"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\tb\r\nc é 答 <b>", "a\tb\r\nc é 答 <b>"),
        ("\x00\x1b[31m\x7f\x9b", "\\x00\\x1b[31m\\x7f\\x9b"),
        ("safe\u202egnp.exe\u2066", "safe\\u202egnp.exe\\u2066"),
    ],
)
def test_control_characters_are_written_out(said: str, shown: str) -> None:
    assert visible(said) == shown
