"""When the next request to a rate-limited service may be sent: token buckets, the queue before them, and waits before a retry.

    take(tokens) ──► first come, first served ──► requests' bucket and tokens' bucket have enough ──► sent

Buckets are filled evenly and hold one second's worth, so that a minute never sees much more than its limit and requests are spread over it:
services count over shorter times than the minute that their limit is told for.
"""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

_SLACK = 1e-9  # of the burst: what rounding may cost
_LONGEST_BACK_OFF_S = 30.0


class TokenBucket:
    """A token bucket. Pure: times are seconds of one monotonic clock that the caller reads.

    In any time of t seconds at most `burst + rate * t` are taken. An amount above the burst is let through when the bucket is full, and
    leaves a debt that is worked off before the next: then at most `amount - burst` more.

    Args:
        rate: filled in per second. burst: the most that it holds, and what it starts with.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, now

    @classmethod
    def per_minute(cls, limit: int, now: float) -> TokenBucket:
        """For a limit that is told per minute; the burst is one second's worth, at least one."""
        return cls(limit / 60, max(1.0, limit / 60), now)

    def wait(self, amount: float, now: float) -> float:
        """Seconds until the amount can be taken; 0: now."""
        missing = min(amount, self._burst) - self._filled(now)
        return missing / self._rate if missing > _SLACK * self._burst else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take the amount, once `wait` is over."""
        self._level, self._at = self._filled(now) - amount, max(now, self._at)

    def _filled(self, now: float) -> float:
        return min(self._burst, self._level + self._rate * max(0.0, now - self._at))


class RateLimits:
    """Requests and tokens per minute, for the callers of one event loop, in the order in which they come.

    Args:
        requests_per_minute: None: no limit. tokens_per_minute: likewise.
        clock: monotonic, in seconds. sleep: until that clock is so much later.

    Attributes:
        waited_s: seconds that callers spent waiting, of all callers together.
    """

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._buckets = {what: TokenBucket.per_minute(limit, clock()) for what, limit in limits.items() if limit is not None}
        self._turn = asyncio.Lock()  # whoever waits longest gets it next; who is cancelled leaves without having taken anything
        self.waited_s = 0.0

    async def take(self, tokens: int) -> None:
        """Wait until one request of so many tokens may be sent."""
        began, amounts = self._clock(), {"requests": 1, "tokens": tokens}
        try:
            async with self._turn:
                now = self._clock()
                while wait := max((bucket.wait(amounts[what], now) for what, bucket in self._buckets.items()), default=0.0):
                    await self._sleep(wait)
                    now = self._clock()
                for what, bucket in self._buckets.items():
                    bucket.take(amounts[what], now)
        finally:
            self.waited_s += self._clock() - began


def back_off_s(attempt: int, first_s: float, chance: float) -> float:
    """Exponential back-off with jitter: seconds to wait after attempt number `attempt` (from 0) has failed.

    Args:
        chance: random, in [0, 1): the wait is between half and the whole of `first_s * 2 ** attempt`, which is 30 s at most.
    """
    return min(_LONGEST_BACK_OFF_S, first_s * 2.0 ** min(attempt, 30)) * (0.5 + 0.5 * chance)


def retry_after_s(header: str | None, now: datetime) -> float:
    """Seconds of a `Retry-After` header (RFC 9110, 10.2.3): a number or a date. 0: none, nonsense, or a date that has passed.

    Args:
        now: with a time zone.
    """
    text = (header or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):  # fractions are not in the RFC; some services send them
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, ((date if date.tzinfo else date.replace(tzinfo=UTC)) - now).total_seconds())
