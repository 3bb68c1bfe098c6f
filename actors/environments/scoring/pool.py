"""Scoring processes, started ahead; each one that hangs or dies is replaced within milliseconds.

    score(calls) ──► Dispatch ──chunks──► worker 0..n     one answer a call, in order
         ▲              │  ▲ ◄──answers──    │
         └── parts ─────┘  └── late, gone ───┘ ──► leash dropped: the keeper ends it and all that it started; another is forked

One thread of the pool does all of it; `score` may be called from several threads.
"""

from __future__ import annotations

import itertools
import json
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.dispatch import Batch, Dispatch
from actors.environments.scoring.verdict import Outcome, Part, ScoringError
from actors.environments.scoring.wire import Call, Lines, WireError, read_part
from actors.environments.scoring.zygote import SPAWN, Start
from configs import settings
from configs.base import ConfigError

_START_S = 120.0  # for the imports of the verifiers
_READY_S = 120.0  # for a user's constructor
_SEND_S = 10.0  # a worker that takes no calls for so long is lost
_END_S = 10.0
_MOST_PROCESSES = 16
_POLL_S = 1.0


class PoolClosedError(RuntimeError):
    """Calls were given to a pool that was closed, or closed meanwhile."""


@dataclass
class _Worker:
    """One process as the pool sees it. `leash` is shared with its keeper."""

    number: int
    line: socket.socket
    leash: socket.socket
    deadline: float | None  # until it is ready; None: it is
    lines: Lines = field(default_factory=Lines)


class ScoringPool:
    """Use as a context manager.

    Raises:
        ConfigError: a reward cannot be imported or constructed; says which error.
        ScoringError: the processes did not start in time.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        limits = {reward.label: reward.timeout_s for reward in start.rewards}
        self.processes = start.config.processes or min(_MOST_PROCESSES, settings.cpu_count())
        self._dispatch = Dispatch(limits.__getitem__, self.processes)
        self._numbers, self._names = itertools.count(), itertools.count()
        self._lock = threading.Lock()
        self._added: list[Batch] = []
        self._workers: dict[int, _Worker] = {}
        self._leaving: set[socket.socket] = set()  # leashes of keepers that have not ended yet
        self._closing = False
        self._end: BaseException = PoolClosedError("the scoring processes have ended: the run is over")
        self.replaced = 0
        self._zygote, self._control, self.namespaces = _start_zygote(start)
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._first_ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()
        try:
            self._first_ready.result(timeout=_READY_S + _SEND_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, calls: Sequence[tuple[str, Problem, Response]]) -> list[Part]:
        """One part per (label, problem, response), in order, within `scoring.batch_timeout_s` and a little.

        Raises:
            PoolClosedError. ScoringError: the pool has failed.
        """
        if not calls:
            return []
        numbered = [Call(next(self._numbers), *call) for call in calls]
        batch = Batch(numbered, time.monotonic() + self._start.config.batch_timeout_s)
        with self._lock:
            if self._closing:
                raise self._end
            self._added.append(batch)
        self._wake()
        return batch.future.result()

    def close(self) -> None:
        """End all processes and what they started. Waiting calls raise `PoolClosedError`. Idempotent."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(_END_S)
        self._control.close()
        try:
            self._zygote.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait(_END_S)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while len(self._workers) < self.processes:
                self._spawn()
            while not self._closing:
                self._take_added()
                self._assign()
                for key, _ in self._selector.select(self._patience()):
                    self._read(key.data)
                self._end_late()
        except BaseException as error:  # noqa: BLE001  (every caller hears of it)
            self._end = error
            if not self._first_ready.done():
                self._first_ready.set_exception(error)
        finally:
            self._end_all()

    def _take_added(self) -> None:
        with self._lock:
            added, self._added = self._added, []
        for batch in added:
            self._dispatch.add(batch)

    def _assign(self) -> None:
        for worker in list(self._workers.values()):
            if worker.deadline is None and (calls := self._dispatch.assign(worker.number, time.monotonic())):
                try:
                    worker.line.sendall(pickle.dumps(calls))
                except OSError:
                    self._replace(worker, "failed", "its process took no calls")

    def _patience(self) -> float:
        now = time.monotonic()
        times = [self._dispatch.next_deadline(), *(worker.deadline for worker in self._workers.values())]
        return max(0.0, min([at - now for at in times if at is not None], default=_POLL_S))

    def _read(self, worker: _Worker | None) -> None:
        if worker is None:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            return
        if self._workers.get(worker.number) is not worker:
            return  # replaced a moment ago
        try:
            data = worker.line.recv(1 << 16)
            if not data:
                raise WireError("its process ended")
            for values in worker.lines.feed(data):
                self._message(worker, values)
                if self._workers.get(worker.number) is not worker:
                    return
        except (WireError, OSError) as error:
            self._replace(worker, "failed", str(error))

    def _message(self, worker: _Worker, values: dict[str, object]) -> None:
        if "ready" in values:
            if not values["ready"]:
                raise ConfigError(f"rewards: {values.get('error')}")
            worker.deadline = None
            if not self._first_ready.done():
                self._first_ready.set_result(None)
        elif "rest" in values:
            self._dispatch.rested(worker.number)
            if values.get("dirty"):
                self._replace(worker, "failed", "")
        else:
            number = values.get("call")
            if not isinstance(number, int):
                raise WireError("a malformed answer")
            self._dispatch.answered(worker.number, number, read_part(values), time.monotonic())

    def _end_late(self) -> None:
        now = time.monotonic()
        for number, why in self._dispatch.late(now):
            self._replace(self._workers[number], "timed_out", why)
        self._dispatch.expire(now)
        for worker in list(self._workers.values()):
            if worker.deadline is not None and now > worker.deadline:
                raise ScoringError(f"rewards: a scoring process was not ready within {_READY_S:.0f} s: a constructor hangs")

    # ---- processes ----

    def _spawn(self) -> None:
        line, workers_end = socket.socketpair()
        leash, keepers_end = socket.socketpair()
        with workers_end, keepers_end:
            socket.send_fds(self._control, [SPAWN], [workers_end.fileno(), keepers_end.fileno()])
        line.settimeout(_SEND_S)
        worker = _Worker(next(self._names), line, leash, time.monotonic() + _READY_S)
        self._workers[worker.number] = worker
        self._selector.register(line, selectors.EVENT_READ, worker)

    def _replace(self, worker: _Worker, outcome: Outcome, error: str) -> None:
        """This worker is of no use any more."""
        was_ready = worker.deadline is None
        self._let_go(worker)
        self._dispatch.lost(worker.number, outcome, error, time.monotonic())
        if not was_ready:
            raise ScoringError(f"rewards: a scoring process ended before it was ready: {error}")
        self.replaced += 1
        self._spawn()

    def _let_go(self, worker: _Worker) -> None:
        del self._workers[worker.number]
        self._selector.unregister(worker.line)
        worker.line.close()
        with suppress(OSError):
            worker.leash.shutdown(socket.SHUT_WR)  # the keeper sees the end of its line, and ends the worker
        self._leaving.add(worker.leash)
        self._leaving -= {leash for leash in self._leaving if _has_ended(leash, 0.0)}

    def _end_all(self) -> None:
        with self._lock:
            self._closing = True
            waiting = [*self._dispatch.batches, *self._added]
        for worker in list(self._workers.values()):
            self._let_go(worker)
        for batch in waiting:
            batch.future.set_exception(self._end)
        deadline = time.monotonic() + _END_S
        for leash in self._leaving:
            _has_ended(leash, max(0.0, deadline - time.monotonic()))
        self._selector.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_up.send(b"!")


def _start_zygote(start: Start) -> tuple[subprocess.Popen[bytes], socket.socket, bool]:
    start = start.resolved()
    control, child = socket.socketpair()
    with child:
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.environments.scoring.zygote", str(child.fileno())],
            env=settings.bare_environment(start.variables, start.path),
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        control.settimeout(_START_S)
        control.sendall(pickle.dumps(start))
        answer = control.recv(1 << 16)
        if not answer:
            raise ScoringError(f"rewards: the scoring processes could not be started (exit code {process.wait(_END_S)})")
    except TimeoutError:
        process.kill()
        raise ScoringError(f"rewards: the scoring processes did not start within {_START_S:.0f} s") from None
    found = json.loads(answer)
    if not found["ready"]:
        kind, _, message = found["error"].partition(": ")
        raise ConfigError(message if kind == ConfigError.__name__ else f"rewards: {found['error']}")
    control.settimeout(_SEND_S)
    return process, control, bool(found["namespaces"])


def _has_ended(leash: socket.socket, wait_s: float) -> bool:
    """Whether the keeper at the other end is gone, after waiting for it; then the leash is closed."""
    leash.settimeout(wait_s or 0.000001)
    try:
        ended = not leash.recv(1)
    except TimeoutError:
        return False
    except OSError:
        ended = True
    leash.close()
    return ended
