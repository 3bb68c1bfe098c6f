"""Rate limits: the bucket against exact arithmetic, the queue before it on a clock of its own, and waits before a retry."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.rewards.limits import RateLimits, TokenBucket, back_off_s, retry_after_s


class FakeTime:
    """A clock that goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds

    def limits(self, requests: int | None, tokens: int | None) -> RateLimits:
        return RateLimits(requests, tokens, lambda: self.now, self.sleep)


def served(limits: RateLimits, time: FakeTime, tokens: list[int], cancel: tuple[int, ...] = ()) -> list[tuple[int, float]]:
    """Callers that come at once, some of whom are cancelled while they wait: who was served, and when."""

    async def run() -> list[tuple[int, float]]:
        done: list[tuple[int, float]] = []

        async def caller(number: int) -> None:
            await limits.take(tokens[number])
            done.append((number, time.now - 1000))

        tasks = [asyncio.create_task(caller(number)) for number in range(len(tokens))]
        await asyncio.sleep(0)
        for number in cancel:
            tasks[number].cancel()
        await asyncio.wait(tasks)
        return done

    return asyncio.run(run())


def test_both_limits_hold_in_the_order_of_coming() -> None:
    time = FakeTime()
    limits = time.limits(120, 6000)  # 2 requests and 100 tokens a second, and as much in store
    found = served(limits, time, [1, 1, 1, 150, 1, 1])
    # Number 3 waits for a request, with the store of tokens full again; its debt of 50 keeps number 4 until 51 more have come.
    # That is 0.51 s later. By then the store of requests holds 1.02: number 5 waits for the rest of one.
    assert [number for number, _ in found] == list(range(6))
    assert [when for _, when in found] == pytest.approx([0, 0, 0.5, 1.0, 1.51, 2.0], abs=1e-6)
    assert limits.waited_s == pytest.approx(sum(when for _, when in found))


def test_who_is_cancelled_while_waiting_takes_nothing() -> None:
    time = FakeTime()
    found = served(time.limits(60, None), time, [1] * 6, cancel=(1, 3))  # number 1 has its turn, number 3 is in the queue
    assert [number for number, _ in found] == [0, 2, 4, 5]
    assert [when for _, when in found] == pytest.approx([0, 1, 2, 3], abs=1e-6)


def test_without_limits_nobody_waits() -> None:
    time = FakeTime()
    assert served(time.limits(None, None), time, [10**9] * 3) == [(0, 0), (1, 0), (2, 0)]


class ExactBucket:
    """The same in exact arithmetic."""

    def __init__(self, rate: Fraction, burst: Fraction) -> None:
        self.rate, self.burst, self.level, self.at = rate, burst, burst, Fraction(0)

    def wait(self, amount: Fraction, now: Fraction) -> Fraction:
        level = min(self.burst, self.level + self.rate * (now - self.at))
        return max(Fraction(0), (min(amount, self.burst) - level) / self.rate)

    def take(self, amount: Fraction, now: Fraction) -> None:
        self.level = min(self.burst, self.level + self.rate * (now - self.at)) - amount
        self.at = now


TICKS = st.integers(0, 2000).map(lambda ticks: Fraction(ticks, 64))


@given(
    rate=st.integers(1, 1000).map(lambda n: Fraction(n, 16)),
    burst=st.integers(1, 50).map(Fraction),
    calls=st.lists(st.tuples(TICKS, st.integers(1, 80)), min_size=1, max_size=40),
)
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate_and_no_less(
    rate: Fraction, burst: Fraction, calls: list[tuple[Fraction, int]]
) -> None:
    bucket, exact, now = TokenBucket(float(rate), float(burst), 0.0), ExactBucket(rate, burst), Fraction(0)
    grants: list[tuple[Fraction, int]] = []
    for pause, amount in calls:
        now += pause
        assert bucket.wait(amount, float(now)) == pytest.approx(float(exact.wait(Fraction(amount), now)), abs=1e-6)
        now += exact.wait(Fraction(amount), now)
        bucket.take(amount, float(now))
        exact.take(Fraction(amount), now)
        grants.append((now, amount))
    for first, last in itertools.combinations_with_replacement(range(len(grants)), 2):
        window = grants[last][0] - grants[first][0]
        amounts = [amount for _, amount in grants[first : last + 1]]
        assert sum(amounts) <= max(burst, Fraction(max(amounts))) + rate * window


@given(limit=st.integers(1, 100_000), callers=st.integers(1, 200))
def test_a_minute_has_its_limit_and_a_second_more(limit: int, callers: int) -> None:
    """Callers that always want more get exactly the rate."""
    bucket, now = TokenBucket.per_minute(limit, 100.0), 100.0
    amount = max(1, limit // callers)
    taken = 0
    while True:
        now += bucket.wait(amount, now)
        if now > 160.0:
            break
        bucket.take(amount, now)
        taken += amount
    assert limit - amount <= taken <= limit + max(1, limit / 60, amount) + 1e-6


def test_a_clock_that_steps_back_gives_nothing() -> None:
    bucket = TokenBucket(1.0, 1.0, 10.0)
    bucket.take(1, 10.0)
    assert bucket.wait(1, 5.0) == 1.0
    assert bucket.wait(1, 11.0) == 0.0


@given(attempt=st.integers(0, 10_000), chance=st.floats(0, 1, exclude_max=True))
def test_back_off_doubles_within_bounds(attempt: int, chance: float) -> None:
    whole = min(30.0, 0.5 * 2 ** min(attempt, 10))
    assert whole / 2 <= back_off_s(attempt, 0.5, chance) <= whole


NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("7", 7),
        (" 0.5 ", 0.5),
        ("-3", 0),
        ("soon", 0),
        ("inf", 0),
        ("1e9", 0),
        ("9" * 400, 0),
        ("Wed, 01 Jul 2026 12:00:30 GMT", 30),
        ("Wed, 01 Jul 2026 12:00:30 -0000", 30),
        ("Wed, 01 Jul 2026 11:00:00 GMT", 0),
        ("Wed, 99 Jul 99999 12:00:30 GMT", 0),
        (format_datetime(NOON + timedelta(hours=2)), 7200),
    ],
)
def test_retry_after(header: str | None, seconds: float) -> None:
    assert retry_after_s(header, NOON) == seconds


@given(st.text())
def test_retry_after_takes_any_text(header: str) -> None:
    assert retry_after_s(header, NOON) >= 0
