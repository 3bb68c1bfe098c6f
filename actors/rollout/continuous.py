"""Generation without pause: prompt groups are begun as fast as the replay buffer admits them, and stored as they finish.

    ┌─► admit ── reserve ──► ReplayActor                   places with keys and version; what is in flight and too old: abort, fail
    │     └──── submit ───► EnginePool                     one request per response
    ├─► gather ◄─ collect ─ EnginePool                     responses, with the version of every token
    │     └──── begin ────► Scoring ─► EnvironmentActor
    └── store ◄─ written ── Scoring ─► DataPlane           rows under the reserved keys, then commit ──► ReplayActor

One thread does all of it. When it ends, for whatever reason, the replay buffer hears why (`abandon`), so that no trainer waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors import names
from actors.environments.scoring.verdict import Verdict
from actors.environments.scoring.verdict import metrics as scoring_metrics
from actors.generation.pool import EnginePool
from actors.generation.types import EngineDiedError, GenerationRequest
from actors.rollout.in_flight import InFlight, PromptGroup
from actors.rollout.prompts import DrawnPrompt, PromptStream
from actors.rollout.replay_actor import Places, Stored
from actors.rollout.samples import SLOWEST, Progress, Sample, SlowSample, StepReport, slowest
from actors.rollout.scoring import Scoring, Written, observe, shown
from actors.waiting import ActorTimeoutError, wait

_POLL_S = 0.1  # longest wait for one thing before a look at the others
_AHEAD = 16  # prompts that are asked for at once
_PLACE_S = 1.0  # longest wait of one question, inside the replay actor, for a place
_CALL_S = 60.0  # longest wait for an answer of the replay actor
_JOIN_S = 30.0


class Continuous:
    """Begins at once, and goes on until `stop`.

    Args:
        stream: of prompts; drawn from in the thread alone.
        requests: of a group.
        rows: responses per prompt.
        replay: handle of the replay actor.
        shown: most samples that a report holds.
    """

    def __init__(
        self,
        *,
        stream: PromptStream,
        requests: Callable[[PromptGroup], list[GenerationRequest]],
        rows: int,
        pool: EnginePool,
        scoring: Scoring,
        replay: Any,
        shown: int,
    ) -> None:
        self._stream, self._requests, self._rows = stream, requests, rows
        self._pool, self._scoring, self._replay = pool, scoring, replay
        self._flying = InFlight()
        self._drawn: deque[DrawnPrompt] = deque()
        self._prompt_metrics: dict[str, float] = {}
        self._asked: Any = None  # the question that the replay actor has not answered yet
        self._asked_at = 0.0
        self._known_dead: set[str] = set()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # of all that follows, which other threads read
        self._began = time.monotonic()
        self._groups = self._tokens = self._reported_tokens = 0
        self._idle_s, self._idle_since, self._reported_idle_s = 0.0, self._began, 0.0
        self._idle = True
        self._in_flight = 0
        self._samples: deque[Sample] = deque(maxlen=shown)
        self._verdicts: list[Verdict] = []
        self._slowest: tuple[SlowSample, ...] = ()
        self._log: list[str] = []
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="continuous", daemon=True)
        self._thread.start()

    def progress(self, wait_s: float) -> Progress:
        """Where it stands, after waiting for its end up to `wait_s` seconds."""
        self._ended.wait(wait_s)
        with self._lock:
            log, self._log = tuple(self._log), []
            seconds = time.monotonic() - self._began
            ended = self._ended.is_set()
            return Progress(
                groups=self._groups,
                tokens=self._tokens,
                seconds=seconds,
                in_flight=self._in_flight,
                log=log,
                ended=ended,
                error=self._error,
            )

    def report(self) -> StepReport:
        """What happened since the last report."""
        with self._lock:
            idle_s = self._idle_s + (time.monotonic() - self._idle_since if self._idle else 0.0)
            metrics = {
                "generated_tokens": float(self._tokens - self._reported_tokens),
                "idle/generator_s": idle_s - self._reported_idle_s,
                "engines/alive": float(len(self._pool.alive)),
            }
            self._reported_tokens, self._reported_idle_s = self._tokens, idle_s
            samples, slow, verdicts = tuple(self._samples), self._slowest, self._verdicts
            self._samples.clear()
            self._slowest, self._verdicts = (), []
        return StepReport(samples=samples, slowest=slow, metrics=metrics | scoring_metrics(verdicts) | self._prompt_metrics)

    def stop(self) -> None:
        """Abort what runs and end. Idempotent.

        Raises:
            TimeoutError: the thread is stuck in a call.
        """
        self._stopping.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise TimeoutError(f"generation did not stop within {_JOIN_S:.0f} s")

    # ---- the thread ----

    def _run(self) -> None:
        why = "it was stopped"
        try:
            while not self._stopping.is_set():
                self._admit()
                self._gather()
                self._store()
            self._pool.abort([lost for uid in self._flying.uids() for lost in self._flying.remove(uid)])
        except Exception as error:  # noqa: BLE001  (whatever it is, the trainer must hear of it)
            why = f"{type(error).__name__}: {error}"
            with self._lock:
                self._error = why
        finally:
            self._abandon(why)
            self._ended.set()

    def _admit(self) -> None:
        """Begin what there are places for. One question is always out, and waits in the replay actor: a full buffer costs no calls."""
        begun: list[PromptGroup] = []
        while (places := self._places(wait_s=0.0 if begun or self._flying or self._scoring else _POLL_S)) is not None:
            for uid in places.cancelled:
                if uid in self._flying.uids():  # else it is being scored: its commit will be refused
                    self._fail(uid, "too old")
            for place in places.given:
                drawn = self._drawn.popleft()
                begun.append(PromptGroup(drawn.problem, drawn.token_ids, place))
        if not begun:
            return
        for group in begun:
            self._flying.add(group)
        self._count()
        self._pool.submit([request for group in begun for request in self._requests(group)])

    def _places(self, wait_s: float) -> Places | None:
        """The answer to the question that is out, if it comes within `wait_s` seconds."""
        if self._asked is None:
            self._drawn += self._stream.draw_encoded(_AHEAD - len(self._drawn))
            self._asked = self._replay.reserve.remote([drawn.uid for drawn in self._drawn], self._rows, _PLACE_S)
            self._asked_at = time.monotonic()
        ready, _ = ray.wait([self._asked], timeout=wait_s)
        if not ready:
            if time.monotonic() > self._asked_at + _PLACE_S + _CALL_S:
                raise ActorTimeoutError(f"reserve: no answer from {names.REPLAY} within {_PLACE_S + _CALL_S:.0f} s")
            return None
        asked, self._asked = self._asked, None
        places: Places = wait(asked, who=names.REPLAY, what="reserve", timeout_s=_CALL_S)
        return places

    def _gather(self) -> None:
        try:
            results = self._pool.collect(_POLL_S if self._flying else 0.0, until=self._asked)
        except EngineDiedError as error:
            if not self._pool.alive:
                raise
            for uid in self._flying.groups_of(error.request_ids):  # no engine could finish them, and others live
                self._fail(uid, str(error))
            results = []
        for name in sorted(set(self._pool.dead) - self._known_dead):
            self._known_dead.add(name)
            self._say(f"{name} is gone; its requests go to {', '.join(self._pool.alive)}: {self._pool.dead[name]}")
        with self._lock:
            self._tokens += sum(len(result.token_ids) for result in results)
        self._scoring.begin(self._flying.finish(results))
        self._count()

    def _store(self) -> None:
        scored = self._scoring.written(0.0 if self._flying else _POLL_S)
        if not scored:
            return
        self._note(scored)
        for group in scored:
            if group.meta is None:
                self._ask("fail", group.group.uid, f"no reward: {next(v.error for v in group.verdicts if v.drop == 'group')}")
        written = [(group, group.meta) for group in scored if group.meta is not None]
        stored = []
        for group, meta in written:
            starts, ends = zip(*((tag["start_version"], tag["end_version"]) for tag in meta.tags), strict=True)
            stored.append(Stored(group.group.uid, meta, min(starts), max(ends)))
        wanted = self._ask("commit", stored) if stored else ()
        with self._lock:
            self._groups += sum(wanted)
            self._samples += [shown(group) for (group, _), kept in zip(written, wanted, strict=True) if kept]
        self._count()

    def _note(self, scored: Sequence[Written]) -> None:
        """What the next report says of the verdicts."""
        found = [SlowSample.of(group.group.problem.uid, verdict) for group in scored for verdict in group.verdicts]
        for group in scored:
            observe(self._stream, group)
        with self._lock:
            self._prompt_metrics = self._stream.metrics()
            self._verdicts += [verdict for group in scored for verdict in group.verdicts]
            self._slowest = slowest((*self._slowest, *found), SLOWEST)

    def _fail(self, uid: str, reason: str) -> None:
        self._pool.abort(self._flying.remove(uid))
        self._ask("fail", uid, reason)

    def _abandon(self, why: str) -> None:
        try:
            self._ask("abandon", why)
        except Exception as error:  # noqa: BLE001  (the replay actor is gone as well: its callers see that themselves)
            self._say(f"the replay buffer was not told that generation ended: {error}")

    def _ask(self, method: str, *arguments: Any) -> Any:
        return wait(getattr(self._replay, method).remote(*arguments), who=names.REPLAY, what=method, timeout_s=_CALL_S)

    def _count(self) -> None:
        """What others may read of the groups in flight; and since when no engine has anything to do."""
        now = time.monotonic()
        with self._lock:
            self._in_flight = len(self._flying) + len(self._scoring)
            idle = not self._flying
            if idle and not self._idle:
                self._idle_since = now
            elif self._idle and not idle:
                self._idle_s += now - self._idle_since
            self._idle = idle

    def _say(self, line: str) -> None:
        with self._lock:
            self._log.append(line)
