"""A tracker beside the run: it may be slow, away or wrong, and the run neither waits for it nor ends with it.

    put ──► queue ──► a thread of its own ──► tracker
                       ├─ raised: again after 1, 5, 15, 60, 60, ... s, with one line in the log; 20 times in a row: given up
                       └─ .trackers/<label>.json: its run's id, and the last step of each metric, written before it is sent

A run that goes on from a checkpoint sends what the place does not have yet: from its own files first, then as it goes. What was sent before
the run was cut is not sent again.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

from configs.redaction import redacted
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.base import About, Row, Status, Tracker

_WAITS_S = (1.0, 5.0, 15.0)
_LONGEST_WAIT_S = 60.0
_TRIES = 20
_MOST = 100_000  # calls that wait: what a tracker that is away may cost in memory


class Outbox:
    """Delivers to one tracker.

    Args:
        label: its name in messages and files. make: builds it. about: the run.
        say: takes a line for the person who follows the run.
    """

    def __init__(self, label: str, make: Callable[[], Tracker], about: About, say: Callable[[str], None]) -> None:
        self.label, self._make, self._about, self._say = label, make, about, say
        self._state = RunDirectory(about.root).trackers / f"{label}.json"
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._status: Status | None = None
        self._lost = False  # given up
        self._failures = self._missed = 0  # tries in a row; calls that never succeeded
        self._run: str | None = None
        self._before: dict[str, int] = {}  # last steps that were sent before this start
        self._sent: dict[str, int] = {}
        # In this context: the log's handler finds Prefect's settings in it.
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name=f"tracker {label}", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Returns at once."""
        self._put(partial(self._send_metrics, step, dict(values), time.time()))

    def samples(self, step: int, phase: str, rows: Sequence[Row]) -> None:
        """Returns at once."""
        self._put(partial(self._send_samples, step, phase, rows))

    def end(self, status: Status | None) -> None:
        """No more is to come; `wait` afterwards."""
        if not self._ending.is_set():
            self._status = status
            self._queue.put(None)
            self._ending.set()

    def wait(self, deadline: float) -> None:
        """Until everything is delivered or given up. Args: deadline: monotonic seconds; what is not there by then is left behind."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._lost = True  # the next start's outbox may be at work soon
            self._say(f"tracker {self.label}: does not answer; not all of the run is there, metrics.jsonl has everything")

    def _put(self, call: Callable[[], None]) -> None:
        if not self._lost and self._queue.qsize() < _MOST:
            self._queue.put(call)
        else:
            self._missed += 1

    # ---- in the thread ----

    def _work(self) -> None:
        if self._deliver(self._open):
            while (call := self._queue.get()) is not None:
                self._deliver(call)
        if self._run is not None:
            if self._lost:
                with suppress(Exception):
                    self._tracker.close(self._status)
            else:
                self._deliver(partial(self._tracker.close, self._status))
        if self._missed and not self._lost:  # else there was a line already
            self._say(f"tracker {self.label}: {self._missed} writes are missing there; metrics.jsonl and samples.jsonl have everything")

    def _deliver(self, call: Callable[[], None]) -> bool:
        """Whether it succeeded, in the end."""
        while not self._lost:
            try:
                call()
            except Exception as error:  # noqa: BLE001  (whatever it is, the run goes on)
                if not self._again(error):
                    break
            else:
                self._failures = 0
                return True
        self._missed += 1
        return False

    def _again(self, error: Exception) -> bool:
        """Whether to try once more, after a while."""
        self._failures += 1
        what = redacted(f"tracker {self.label}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if hasattr(self, "_tracker") and self._tracker.refuses(error):
            self._lost = self._run is None  # it is the run itself that is refused
            if self._missed == 0:
                self._say(f"{what}; left out, the run goes on")
            return False
        if self._failures >= _TRIES or self._ending.is_set():
            self._lost = True
            self._say(f"{what}; given up (try {self._failures}): the run goes on without it, a resumed run sends what is missing")
            return False
        if self._failures == 1:
            self._say(f"{what}; trying again, the run goes on")
        wait_s = _WAITS_S[self._failures - 1] if self._failures <= len(_WAITS_S) else _LONGEST_WAIT_S
        self._ending.wait(wait_s)
        return True

    def _open(self) -> None:
        self._tracker = tracker = self._make()
        kept = _read(self._state)
        before = kept.get("run")
        self._run = tracker.open(self._about, before)
        sent: dict[str, int] = kept.get("sent", {}) if self._run == before else {}
        if tracker.takes_back:
            sent = {name: min(step, self._about.step) for name, step in sent.items()}
        for name, step in tracker.reached().items():
            sent[name] = max(step, sent.get(name, step))
        self._before, self._sent = sent, dict(sent)
        self._keep()

    def _send_metrics(self, step: int, values: Mapping[str, float | None], at: float) -> None:
        fresh = {name: value for name, value in values.items() if value is not None and step > self._before.get(name, -1)}
        if fresh:
            self._mark(step, fresh)
            self._tracker.metrics(step, fresh, at)

    def _send_samples(self, step: int, phase: str, rows: Sequence[Row]) -> None:
        name = f"samples:{phase}"
        if rows and step > self._before.get(name, -1):
            self._mark(step, (name,))
            self._tracker.samples(step, phase, rows)

    def _mark(self, step: int, names: Mapping[str, Any] | Sequence[str]) -> None:
        """Before it is sent: a process that is killed in between leaves a gap there, and never a second point."""
        self._sent |= dict.fromkeys(names, step)
        self._keep()

    def _keep(self) -> None:
        self._state.parent.mkdir(exist_ok=True)
        fresh = self._state.with_suffix(".new")
        fresh.write_text(json.dumps({"run": self._run, "sent": self._sent}))
        fresh.replace(self._state)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
