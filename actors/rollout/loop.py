"""The one rollout path: prompt groups are begun as the ledger admits them, answered, scored, and stored as they finish.

    ┌─► admit ── reserve ──► Ledger                        places with keys and version; what is in flight and too old: abort, fail
    │     └──── submit ───► EnginePool                     one request per response
    ├─► gather ◄─ collect ─ EnginePool                     responses, with the version of every token
    │     └──── begin ────► Scoring ─► EnvironmentActor
    └── store ◄─ written ── Scoring ─► DataPlane           rows under the reserved keys, then commit ──► Ledger

When a synchronous step's groups are admitted, they are drawn and submitted together, and the next are drawn when all of them are stored:
so the engine and the curriculum see the same in every run. So are those that dynamic sampling asks for in the place of others. In an
asynchronous run prompts are drawn ahead, and it never pauses.

One thread does all of it. When it ends, for whatever reason, the ledger hears why (`abandon`), so that no trainer waits for it.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import ray

from actors import names
from actors.environments.scoring.verdict import Verdict
from actors.environments.scoring.verdict import metrics as scoring_metrics
from actors.generation.fleet import Change
from actors.generation.pool import EnginePool
from actors.generation.types import EngineDiedError
from actors.rollout.cut import RolloutState, Unreported
from actors.rollout.in_flight import InFlight, PromptGroup, group_requests
from actors.rollout.ledger_actor import Places
from actors.rollout.prompts import DrawnPrompt, PromptStream
from actors.rollout.samples import SLOWEST, Progress, Sample, SlowSample, StepReport, slowest
from actors.rollout.scoring import Finished, Scoring, observe
from actors.rollout.transitions import Admitted, Committed
from actors.waiting import ActorTimeoutError, wait
from configs.deadlines import LEDGER_CALL_S
from configs.rollout import RolloutConfig

_POLL_S = 0.1  # longest wait for one thing before a look at the others
_PLACE_S = 1.0  # longest wait of one `reserve`, inside the ledger
_JOIN_S = 30.0
_DOING = {"generate": "time/generate", "score": "time/score_and_store", "idle": "idle/generator_s"}  # and the metric of its seconds


class RolloutLoop:
    """Begins at once, and goes on until `stop`.

    Args:
        stream: source of prompts; only the loop's thread draws from it.
        seed: of the run.
        ledger: handle of the ledger's actor.
        at_once: number of prompts that places are asked for together.
        ahead: whether places are taken while other groups are in flight, and it goes on with the remaining engines when one dies.
        shown: largest number of samples in a report.
        resumed: what it goes on from; the ledger, the stream and the data plane are there already.
    """

    def __init__(
        self,
        *,
        stream: PromptStream,
        rollout: RolloutConfig,
        seed: int,
        pool: EnginePool,
        scoring: Scoring,
        ledger: Any,
        at_once: int,
        ahead: bool,
        shown: int,
        resumed: RolloutState | None = None,
    ) -> None:
        self._stream, self._rollout, self._seed = stream, rollout, seed
        self._pool, self._scoring, self._ledger = pool, scoring, ledger
        self._at_once, self._ahead = at_once, ahead
        self._flying = InFlight()
        self._drawn: deque[DrawnPrompt] = deque()
        self._begun: dict[str, Finished | None] = {}  # groups in the order of drawing, until those before them are noted
        self._prompt_metrics: dict[str, float] = {}
        self._asked: Any = None  # the pending call of `reserve`
        self._asked_at = 0.0
        self._changes: list[Change] = []
        self._resumed = resumed
        self._cuts: SimpleQueue[tuple[int, Future[RolloutState]]] = SimpleQueue()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # of all that follows, which other threads read
        self._began = time.monotonic()
        self._groups = self._tokens = self._reported_tokens = 0
        self._doing, self._since = "idle", self._began
        self._seconds: dict[str, float] = dict.fromkeys(_DOING, 0.0)  # since the last report
        self._in_flight = 0
        self._samples: list[Sample] = []
        self._shown = shown
        self._verdicts: list[Verdict] = []
        self._slowest: tuple[SlowSample, ...] = ()
        self._log: list[str] = []
        self._error: str | None = None
        self._cause: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    def progress(self, wait_s: float) -> Progress:
        """Where it stands, after waiting for its end up to `wait_s` seconds."""
        self._ended.wait(wait_s)
        with self._lock:
            log, self._log = tuple(self._log), []
            changes, self._changes = tuple(self._changes), []
            return Progress(
                groups=self._groups,
                tokens=self._tokens,
                seconds=time.monotonic() - self._began,
                in_flight=self._in_flight,
                log=log,
                engines=changes,
                ended=self._ended.is_set(),
                error=self._error,
            )

    def report(self) -> StepReport:
        """What happened since the last report."""
        with self._lock:
            self._now_doing(self._doing)
            metrics = {metric: self._seconds[doing] for doing, metric in _DOING.items()}
            metrics |= {"generated_tokens": float(self._tokens - self._reported_tokens)}
            metrics |= {"engines/alive": float(len(self._pool.alive)), "engines/restarts": float(self._pool.restarts)}
            self._seconds, self._reported_tokens = dict.fromkeys(_DOING, 0.0), self._tokens
            samples, slow, verdicts = tuple(self._samples), self._slowest, self._verdicts
            self._samples, self._slowest, self._verdicts = [], (), []
        return StepReport(samples=samples, slowest=slow, metrics=metrics | scoring_metrics(verdicts) | self._prompt_metrics)

    def cut(self, step: int, timeout_s: float) -> RolloutState:
        """Everything between a drawn prompt and its commit, as it stands between two turns. Engines go on meanwhile.

        Args:
            step: as `LedgerActor.cut`. timeout_s: longest wait for the end of a turn.

        Raises:
            Exception: what ended the loop. RuntimeError: it was stopped. ActorTimeoutError: the thread is stuck in a call.
        """
        wanted: Future[RolloutState] = Future()
        self._cuts.put((step, wanted))
        deadline = time.monotonic() + timeout_s
        while not self._ended.is_set() and time.monotonic() < deadline:
            with suppress(TimeoutError):
                return wanted.result(_POLL_S)
        if not self._ended.is_set():
            raise ActorTimeoutError(f"cut: generation did not come to the end of its turn within {timeout_s:.0f} s")
        raise self._cause or RuntimeError(f"cut: generation has ended: {self._error or 'it was stopped'}")

    def stop(self) -> None:
        """Abort what runs and end. Idempotent.

        Raises:
            ActorTimeoutError: the thread is stuck in a call.
        """
        self._stopping.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise ActorTimeoutError(f"generation did not stop within {_JOIN_S:.0f} s")

    # ---- the thread ----

    def _run(self) -> None:
        why, cause = "it was stopped", None
        try:
            self._ask("begin_writing")
            while not self._stopping.is_set():
                try:
                    self._go_on()
                    self._admit()
                    self._gather()
                except EngineDiedError as error:
                    self._do_without(error)
                self._store()
                self._hand_out_cuts()
            self._pool.abort([lost for uid in self._flying.uids() for lost in self._flying.remove(uid)])
        except Exception as error:  # noqa: BLE001  (whatever it is, the trainer must hear of it)
            why, cause = f"{type(error).__name__}: {error}", _portable(error)
            with self._lock:
                self._error, self._cause = why, cause
        finally:
            self._abandon(why, cause)
            self._ended.set()

    def _go_on(self) -> None:
        """Begin with what a checkpoint had, once."""
        if self._resumed is None:
            return
        state, self._resumed = self._resumed, None
        self._drawn += state.drawn
        self._begun |= state.begun
        self._scoring.begin(state.scoring)
        for group in state.flying:
            self._flying.add(group)
        last = state.unreported
        with self._lock:
            self._verdicts, self._samples, self._slowest = [*last.verdicts], [*last.samples], last.slowest
            self._reported_tokens -= last.tokens
        self._note()
        self._count()
        if state.flying:
            self._pool.submit([request for group in state.flying for request in group_requests(group, self._rollout, self._seed)])

    def _hand_out_cuts(self) -> None:
        while not self._cuts.empty():
            step, wanted = self._cuts.get()
            wanted.set_result(self._state(step))

    def _state(self, step: int) -> RolloutState:
        ledger = self._ask("cut", step)
        # The ledger may have given places that the pending `reserve` has not told yet.
        held = {group["uid"]: group for group in ledger["groups"]}
        given = [drawn for drawn in self._drawn if drawn.uid in held]
        unseen = [PromptGroup(drawn.problem, drawn.token_ids, _place(held[drawn.uid])) for drawn in given]
        with self._lock:
            unreported = Unreported(
                verdicts=tuple(self._verdicts),
                samples=tuple(self._samples),
                slowest=self._slowest,
                tokens=self._tokens - self._reported_tokens,
            )
        return RolloutState(
            ledger=ledger,
            stream=self._stream.state(),
            drawn=tuple(drawn for drawn in self._drawn if drawn.uid not in held),
            flying=(*(replace(group, results=dict(group.results)) for group in self._flying.groups()), *unseen),
            scoring=self._scoring.groups(),
            begun=self._begun | {group.uid: None for group in unseen},
            unreported=unreported,
        )

    def _admit(self) -> None:
        """Begin as many groups as there are places. The pending `reserve` waits inside the ledger, so waiting costs no further calls."""
        begun: list[PromptGroup] = []
        while (places := self._places(wait_s=0.0 if begun or self._flying or self._scoring else _POLL_S)) is not None:
            for uid in places.cancelled:
                if uid in self._flying.uids():  # else it is being scored: its commit will be refused
                    self._fail(uid, "too old")
            for place in places.given:
                drawn = self._drawn.popleft()
                begun.append(PromptGroup(drawn.problem, drawn.token_ids, place))
            if begun and not self._ahead:
                break  # the next are drawn when these are stored
        if not begun:
            return
        for group in begun:
            self._flying.add(group)
            self._begun[group.uid] = None
        self._count()
        self._pool.submit([request for group in begun for request in group_requests(group, self._rollout, self._seed)])

    def _places(self, wait_s: float) -> Places | None:
        """The result of the pending `reserve`, if it comes within `wait_s` seconds."""
        if self._asked is None:
            if not self._ahead and (self._flying or self._scoring):
                return None
            self._drawn += self._stream.draw_encoded(self._at_once - len(self._drawn))
            uids = [drawn.uid for drawn in self._drawn]
            self._asked = self._ledger.reserve.remote(uids, self._rollout.responses_per_prompt, _PLACE_S)
            self._asked_at = time.monotonic()
        ready, _ = ray.wait([self._asked], timeout=wait_s)
        if not ready:
            if time.monotonic() > self._asked_at + _PLACE_S + LEDGER_CALL_S:
                raise ActorTimeoutError(f"reserve: no answer from {names.LEDGER} within {_PLACE_S + LEDGER_CALL_S:.0f} s")
            return None
        asked, self._asked = self._asked, None
        places: Places = wait(asked, who=names.LEDGER, what="reserve", timeout_s=LEDGER_CALL_S)
        return places

    def _gather(self) -> None:
        results = self._pool.collect(_POLL_S if self._flying else 0.0, until=self._asked)
        changes, lines = self._pool.news()
        with self._lock:
            self._changes += changes
            self._log += [self._line(change) for change in changes] + lines
            self._tokens += sum(len(result.token_ids) for result in results)
        self._scoring.begin(self._flying.finish(results))
        self._count()

    def _do_without(self, error: EngineDiedError) -> None:
        """Groups that no engine could finish fail, and others are admitted in their place.

        Raises:
            EngineDiedError: the run does not go on without an engine.
        """
        if not self._ahead:
            raise error
        for uid in self._flying.groups_of(error.request_ids):
            self._fail(uid, str(error))
        self._count()

    def _line(self, change: Change) -> str:
        if change.standing == "healthy":
            return f"{change.engine} is back"
        heirs = ", ".join(self._pool.alive) or "the first that is back"
        what = f"is gone; its requests go to {heirs}" if change.standing == "dead" else "does not come back"
        return f"{change.engine} {what}: {change.reason}"

    def _store(self) -> None:
        scored = self._scoring.written(0.0 if self._flying else _POLL_S)
        if not scored:
            return
        for done in scored:
            self._begun[done.group.uid] = Finished.of(done)
        self._note()
        for done in scored:
            if done.meta is None:
                self._ask("fail", done.group.uid, f"no reward: {next(v.error for v in done.verdicts if v.drop == 'group')}")
        stored = [
            Committed(done.group.uid, meta, min(tag["start_version"] for tag in meta.tags), max(tag["end_version"] for tag in meta.tags))
            for done in scored
            if (meta := done.meta) is not None
        ]
        wanted = self._ask("commit", stored) if stored else ()
        with self._lock:
            self._groups += sum(wanted)
        self._count()

    def _note(self) -> None:
        """Pass finished groups to the curriculum and the next report, in the order of drawing."""
        noted: list[Finished] = []
        while self._begun and (done := self._begun[uid := next(iter(self._begun))]) is not None:
            del self._begun[uid]
            noted.append(done)
            observe(self._stream, done)
        found = [SlowSample.of(done.problem.uid, verdict) for done in noted for verdict in done.verdicts]
        with self._lock:
            self._prompt_metrics = self._stream.metrics()
            self._verdicts += [verdict for done in noted for verdict in done.verdicts]
            self._slowest = slowest((*self._slowest, *found), SLOWEST)
            room = self._shown - len(self._samples)
            self._samples += [done.sample for done in noted if done.sample is not None][:room]

    def _fail(self, uid: str, reason: str) -> None:
        self._pool.abort(self._flying.remove(uid))
        self._begun.pop(uid, None)
        self._ask("fail", uid, reason)
        self._note()

    def _abandon(self, why: str, cause: Exception | None) -> None:
        try:
            self._ask("abandon", why, cause)
        except Exception as error:  # noqa: BLE001  (the ledger is gone as well: its callers see that themselves)
            self._say(f"the ledger was not told that generation ended: {error}")

    def _ask(self, method: str, *arguments: Any) -> Any:
        return wait(getattr(self._ledger, method).remote(*arguments), who=names.LEDGER, what=method, timeout_s=LEDGER_CALL_S)

    def _count(self) -> None:
        """What others may read of the groups in flight, and of what is being done."""
        with self._lock:
            self._in_flight = len(self._flying) + len(self._scoring)
            self._now_doing("generate" if self._flying else "score" if self._scoring else "idle")

    def _now_doing(self, doing: str) -> None:
        now = time.monotonic()
        self._seconds[self._doing] += now - self._since
        self._doing, self._since = doing, now

    def _say(self, line: str) -> None:
        with self._lock:
            self._log.append(line)


def _place(group: Mapping[str, Any]) -> Admitted:
    return Admitted(group["uid"], tuple(group["keys"]), group["start_version"], group["target_version"])


def _portable(error: Exception) -> Exception | None:
    """The error, if it can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (its class may be a user's)
        return None
    return error
