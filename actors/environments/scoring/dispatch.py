"""Which worker computes which calls, and what a deadline or a death means for them. Pure: no processes, no clock.

    add ──► waiting ──assign──► with a worker ──answered──► done
               ▲                  │      │
               └───── rest ───────┘      └── the first of them when the worker is lost, or is late: failed or timed_out
                                             (the others wait again, before all that wait)

A worker has at most one chunk of calls, and answers them in order; a call's time begins when the one before it was answered.
Every call comes to exactly one `Part`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from actors.environments.scoring.verdict import Outcome, Part
from actors.environments.scoring.wire import Call, WireError

_LARGEST_CHUNK = 64


@dataclass(eq=False)
class Batch:
    """Calls that are added together, at least one, and what they came to.

    Attributes:
        deadline: when those that are left count as timed out.
        parts: of those that are done, by number. future: of all, in order.
    """

    calls: Sequence[Call]
    deadline: float
    parts: dict[int, Part] = field(default_factory=dict)
    future: Future[list[Part]] = field(default_factory=Future)


@dataclass
class _Busy:
    calls: deque[Call]
    since: float  # when the first of them began


class Dispatch:
    """See the module's picture. Times are seconds of one monotonic clock.

    Args:
        timeout_s: longest time of one call with this label.

    Attributes:
        batches: those that are not complete.
    """

    def __init__(self, timeout_s: Callable[[str], float], workers: int) -> None:
        self._timeout_s, self._workers = timeout_s, workers
        self._waiting: deque[Call] = deque()
        self._busy: dict[int, _Busy] = {}
        self._batch_of: dict[int, Batch] = {}  # of calls that are not done
        self.batches: list[Batch] = []

    def add(self, batch: Batch) -> None:
        """Calls to be computed until the batch's deadline."""
        self._waiting.extend(batch.calls)
        self._batch_of |= {call.number: batch for call in batch.calls}
        self.batches.append(batch)

    def assign(self, worker: int, now: float) -> list[Call]:
        """The next calls for a worker; empty when none waits, or the worker has not rested from others."""
        if worker in self._busy:
            return []
        size = min(_LARGEST_CHUNK, max(1, len(self._waiting) // (2 * self._workers)))
        chunk: list[Call] = []
        while self._waiting and len(chunk) < size:
            call = self._waiting.popleft()
            if call.number in self._batch_of:  # else its batch is over
                chunk.append(call)
        if chunk:
            self._busy[worker] = _Busy(deque(chunk), now)
        return chunk

    def answered(self, worker: int, number: int, part: Part, now: float) -> None:
        """An answer came.

        Raises:
            WireError: it is no answer to what this worker computes at present.
        """
        busy = self._busy.get(worker)
        if busy is None or not busy.calls or busy.calls[0].number != number:
            raise WireError("an answer to another call")
        busy.calls.popleft()
        busy.since = now
        self._done(number, part)

    def rested(self, worker: int) -> None:
        """The worker says that it has answered all of its calls.

        Raises:
            WireError: it has not.
        """
        if worker not in self._busy or self._busy[worker].calls:
            raise WireError("calls are left unanswered")
        del self._busy[worker]

    def lost(self, worker: int, outcome: Outcome, error: str, now: float) -> None:
        """The worker is gone: its first call has this outcome, the others wait again."""
        busy = self._busy.pop(worker, None)
        if busy is None or not busy.calls:
            return
        first = busy.calls.popleft()
        self._waiting.extendleft(reversed(busy.calls))
        self._done(first.number, Part(None, outcome, max(0.0, now - busy.since), error))

    def late(self, now: float) -> list[tuple[int, str]]:
        """Workers whose call takes too long, with the message for it."""
        found = []
        for worker, busy in self._busy.items():
            if busy.calls and now >= self._due(busy):
                limit = self._timeout_s(busy.calls[0].label)
                batch = self._batch_of.get(busy.calls[0].number)
                over = batch is None or (batch.deadline <= now < busy.since + limit)
                found.append((worker, "the batch's time was over" if over else f"no value within {limit:g} s"))
        return found

    def expire(self, now: float) -> None:
        """Calls that wait count as timed out when the deadline of their batch has passed; the late workers are in `late`."""
        running = {busy.calls[0].number for busy in self._busy.values() if busy.calls}
        for batch in [batch for batch in self.batches if batch.deadline <= now]:
            for call in batch.calls:
                if call.number not in batch.parts and call.number not in running:
                    self._done(call.number, Part(None, "timed_out", 0.0, "not begun before the batch's time was over"))

    def next_deadline(self) -> float | None:
        """When `late` or `expire` have something new; None: nothing is out."""
        times = [self._due(busy) for busy in self._busy.values() if busy.calls]
        times += [batch.deadline for batch in self.batches]
        return min(times, default=None)

    def _due(self, busy: _Busy) -> float:
        call = busy.calls[0]
        due = busy.since + self._timeout_s(call.label)
        batch = self._batch_of.get(call.number)
        return due if batch is None else min(due, batch.deadline)

    def _done(self, number: int, part: Part) -> None:
        batch = self._batch_of.pop(number, None)
        if batch is None:
            return
        batch.parts[number] = part
        if len(batch.parts) == len(batch.calls):
            self.batches.remove(batch)
            batch.future.set_result([batch.parts[call.number] for call in batch.calls])
