"""The ledger as an actor, for the collector and the trainer of a run. One lock, rows cleared inside it, every wait with a deadline.

    Collector ── reserve (waits for a place) ──► ┌─────────────────────┐ ◄── claim (waits for groups) ── rollout task
              ── commit, fail, abandon ────────► │ lock {Ledger} │ ◄── trained, drop, release, set_version ── other tasks
                                                 └──────────┬──────────┘
                                                 clear(keys), in the lock ──► data plane

Every change wakes up both waits. A waiting claim says every `stall_report_every_s` what it waits for, and gives up with an error when
the collector is dead or has given up, or when no group was committed for `stall_timeout_s`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate

import ray

from actors.checkpoints.manifest import manifest_name
from actors.data_plane.interface import DataPlane
from actors.data_plane.meta import KVBatchMeta
from actors.heap import freeze_heap
from actors.rollout.journal import Began, Finished, Journal, Opening
from actors.rollout.ledger import Ledger
from actors.rollout.ledger_types import Claim, LedgerError
from actors.rollout.staleness import Refusal, build
from actors.rollout.transitions import Admitted, Committed
from actors.waiting import ActorGoneError
from configs.staleness import AsyncConfig

_LOOK_AT_WRITER_S = 1.0


class LedgerStalledError(LedgerError):
    """The groups that a claim waits for will not come. The message says why, and what the buffer holds."""


class LedgerClosedError(LedgerError):
    """The run has ended its replay buffer."""


@dataclass(frozen=True)
class ClaimReply:
    """Result of `LedgerActor.claim`.

    Attributes:
        claim: the groups; None when the wait ended without enough of them, and the caller may ask again.
        log: lines for the run's log, one for each `stall_report_every_s` of the wait.
        metrics: as `LedgerActor.metrics`, at the end of the wait.
    """

    claim: Claim | None
    log: tuple[str, ...]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Places:
    """Result of `LedgerActor.reserve`.

    Attributes:
        given: places for the first prompts of the request.
        cancelled: uids of cancelled groups.
    """

    given: tuple[Admitted, ...]
    cancelled: tuple[str, ...]


def _locked[**P, R](method: Callable[Concatenate[Ledger, P], R]) -> Callable[Concatenate[LedgerActor, P], R]:
    """A change of the ledger as a method of its actor."""

    @wraps(method)
    def locked(self: LedgerActor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._change():
            return method(self._buffer, *args, **kwargs)

    return locked


class LedgerActor:
    """Wrapped by `ledger_actor_class`, for Ray. Safe to call from several threads.

    Args:
        groups_per_step: prompt groups that one training step takes.
        version: of the weights that the first step trains.
        partition_id: of the rows in the data plane.
        connect: opens this process's client of the data plane.
        find_writer: raises ActorGoneError when the collector is gone.
        journal: where each change is written down; None: nowhere.

    Raises:
        ConfigError: no such sampler, or a buffer that is too small for it. JournalError. Also of every change: it was not written down.
    """

    def __init__(
        self,
        config: AsyncConfig,
        groups_per_step: int,
        version: int,
        partition_id: str,
        connect: Callable[[], DataPlane],
        find_writer: Callable[[], object],
        journal: Opening | None = None,
    ) -> None:
        sampler, capacity = build(config, groups_per_step), config.capacity(groups_per_step)
        self._config, self._partition_id, self._find_writer = config, partition_id, find_writer
        self._plane = connect()
        self._changed = threading.Condition()
        self._journal: Journal | None = None
        if journal is not None:
            self._journal = Journal.open(journal.path)
            age = config.max_trajectory_age_steps
            self._journal.begin(journal, Began(journal.run, journal.config, config.sampler, age, groups_per_step, version))
        self._cut_line: tuple[int, str] | None = None
        self._buffer = Ledger(
            sampler,
            capacity=capacity,
            max_in_flight=config.max_inflight_prompts or capacity,
            version=version,
            clear=self._clear_rows,
            clock=time.monotonic,
            journal=None if self._journal is None else self._journal.record,
        )
        self._closed = False
        self._writer_gave_up = ""
        self._writer_error: Exception | None = None
        self._told: set[str] = set()  # of which groups the collector knows that they are too old
        self._claims = 0
        self._waiting_since: float | None = None
        self._waited_s = 0.0

    def ready(self) -> str:
        """A line for the log, once the actor can work."""
        freeze_heap()
        cut_off = 0 if self._journal is None else self._journal.torn
        torn = f"; {cut_off} bytes of an unfinished line cut off the journal" if cut_off else ""
        return f"sampler {self._config.sampler}, max_trajectory_age_steps {self._config.max_trajectory_age_steps}{torn}"

    # ---- the collector's side ----

    def reserve(self, uids: Sequence[str], rows: int, wait_s: float) -> Places:
        """As `Ledger.reserve` for each uid until one is refused, after waiting for a first place up to `wait_s` seconds.

        It waits no longer when a group has become too old since the call before, and gives nothing once the collector has given up.

        Raises:
            LedgerClosedError, GroupStateError.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                self._open()
                if self._writer_gave_up:  # a question that was under way when it did: nobody would write the rows
                    return Places((), ())
                given = self._reserve(uids, rows)
                cancelled = self._buffer.cancelled()
                left = deadline - time.monotonic()
                if given or left <= 0 or not self._told >= set(cancelled):
                    self._told = set(cancelled)
                    return Places(given, cancelled)
                self._changed.wait(left)

    def begin_writing(self) -> None:
        """There is a collector, after `abandon` again."""
        with self._change():
            self._writer_gave_up, self._writer_error = "", None

    def commit(self, groups: Sequence[Committed]) -> tuple[bool, ...]:
        """As `Ledger.commit`, of each."""
        with self._change():
            return tuple(self._buffer.commit(group.uid, group.meta, group.start_version, group.end_version) for group in groups)

    def abandon(self, reason: str, error: Exception | None = None) -> tuple[str, ...]:
        """The collector gives up, for this reason: everything in flight fails, and so does a claim that needs more than is stored.

        Until `begin_writing` no place is given. Returns the uids that failed.

        Args:
            error: what ended the collector's loop; such a claim raises it.
        """
        with self._change():
            self._writer_gave_up, self._writer_error = reason, error
            return self._buffer.abandon(reason)

    # ---- checkpoints ----

    def cut(self, step: int) -> dict[str, Any]:
        """As `Ledger.state`, for the checkpoint of this step. The journal has the cut, on the disk."""
        with self._changed:
            self._open()
            state = self._buffer.state()
            if self._journal is not None:
                self._cut_line = self._journal.cut(step, manifest_name(step), state["version"])
            return state

    def cut_line(self) -> tuple[int, str] | None:
        """Number and hash of the journal's line of the last `cut`, for the checkpoint's manifest. None: there is no journal, or no cut."""
        with self._changed:
            return self._cut_line

    def segment(self, since: int) -> bytes:
        """As `Journal.segment`; empty without a journal."""
        with self._changed:
            return b"" if self._journal is None else self._journal.segment(since)

    def restore(self, state: Mapping[str, Any], kept: Mapping[str, int]) -> tuple[Admitted, ...]:
        """As `Ledger.restore`, and then `Ledger.reissue`."""
        with self._change():
            self._buffer.restore(state)
            self._told = set()
            return self._buffer.reissue(kept)

    # ---- the trainer's side ----

    def claim(self, count: int, wait_s: float) -> ClaimReply:
        """As `Ledger.claim`, after waiting for `count` groups up to `wait_s` seconds. A newer call ends an older one's wait.

        It also waits until the groups of the step before are settled, which is under way: else the metrics would depend on who is quicker.

        Raises:
            LedgerStalledError: the groups will not come. LedgerClosedError. Exception: what ended the collector's loop.
        """
        deadline = time.monotonic() + wait_s
        log: list[str] = []
        with self._changed:
            self._claims += 1
            ticket = self._claims
            self._changed.notify_all()
        next_look = 0.0
        while True:
            with self._changed:
                self._open()
                claim = self._buffer.claim(count) if ticket == self._claims and not self._buffer.unsettled() else None
                now = time.monotonic()
                if claim is not None:
                    self._wait_ends(now)
                left = deadline - now
                if claim is not None or ticket != self._claims or left <= 0:
                    return ClaimReply(claim, tuple(log), self.metrics())
                log += self._watch(count, now)
                self._changed.wait(min(left, _LOOK_AT_WRITER_S, self._next_report - now))
            if time.monotonic() >= next_look:
                self._look_at_writer(count)  # without the lock: it asks Ray
                next_look = time.monotonic() + _LOOK_AT_WRITER_S

    # ---- both ----

    fail = _locked(Ledger.fail)
    release = _locked(Ledger.release)
    trained = _locked(Ledger.trained)
    drop = _locked(Ledger.drop)
    set_version = _locked(Ledger.set_version)

    def metrics(self) -> dict[str, float]:
        """As `Ledger.metrics`, and the seconds that claims have waited in all."""
        with self._changed:
            return self._buffer.metrics() | {"replay/claim_wait_s": self._waited_s}

    def close(self) -> None:
        """Clear every row that the buffer knows of, and end all waits. Idempotent."""
        with self._changed:
            if not self._closed:
                self._buffer.clear()
                if self._journal is not None:
                    self._journal.append(Finished())
                    self._journal.close()
                self._closed = True
                self._changed.notify_all()
                self._plane.close()

    # ---- inside ----

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._changed:
            self._open()
            yield
            self._changed.notify_all()

    def _reserve(self, uids: Sequence[str], rows: int) -> tuple[Admitted, ...]:
        given: list[Admitted] = []
        for uid in uids:
            place = self._buffer.reserve(uid, rows)
            if isinstance(place, Refusal):
                break
            given.append(place)
        return tuple(given)

    def _open(self) -> None:
        if self._closed:
            raise LedgerClosedError("the replay buffer is closed: the run has ended")

    def _clear_rows(self, keys: Sequence[str]) -> None:
        self._plane.clear(KVBatchMeta(partition_id=self._partition_id, task_name="replay", keys=tuple(keys)))

    def _watch(self, count: int, now: float) -> list[str]:
        """The lines to log at this point of a wait.

        Raises:
            LedgerStalledError. Exception: what ended the collector's loop.
        """
        if self._waiting_since is None:
            self._waiting_since, self._next_report = now, now + self._config.stall_report_every_s
        waited = now - self._waiting_since
        if self._writer_error is not None:
            self._wait_ends(now)
            raise self._writer_error
        if self._writer_gave_up:
            raise self._stalled(count, f"the collector has given up ({self._writer_gave_up})")
        if (silent := min(waited, self._buffer.since_commit())) >= self._config.stall_timeout_s:
            raise self._stalled(count, f"no group was committed for {silent:.1f} s (stall_timeout_s = {self._config.stall_timeout_s:g})")
        if now < self._next_report:
            return []
        self._next_report = now + self._config.stall_report_every_s
        return [f"replay: waited {waited:.0f} s: {self._buffer.waiting_for(count)}"]

    def _look_at_writer(self, count: int) -> None:
        try:
            self._find_writer()
        except ActorGoneError as error:
            with self._changed:
                raise self._stalled(count, f"the collector is gone ({error})") from error

    def _stalled(self, count: int, why: str) -> LedgerStalledError:
        self._wait_ends(time.monotonic())
        return LedgerStalledError(f"claim of {count} groups: {why}. {self._buffer.waiting_for(count)}")

    def _wait_ends(self, now: float) -> None:
        if self._waiting_since is not None:
            self._waited_s += now - self._waiting_since
            self._waiting_since = None


def ledger_actor_class() -> Any:
    """`LedgerActor` for Ray: `.options(name=..., namespace=..., num_cpus=0).remote(...)` with its arguments.

    Eight threads: one may wait in `reserve` and one in `claim` while the other calls go through.
    """
    remote: Any = ray.remote  # Ray's stubs do not know max_concurrency on classes
    return remote(max_concurrency=8)(LedgerActor)
