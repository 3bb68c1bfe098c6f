"""Brings lost engines back: asks them for their health, has Ray restart those that hang, and asks for the weights that they lack.

    lost ──► Fleet ◄── health ── engine          ray.kill(no_restart=False): its process ends, however stuck, and Ray starts another
               └── restart, end ──► ray.kill
    all engines that are left are stale ──► refit: no step would come to one, since steps wait for responses

Nothing here waits, but for `members`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors.generation.fleet import Fleet, Verdict
from actors.generation.types import EngineHealth, EngineNotReadyError
from actors.waiting import ActorGoneError, ActorTimeoutError, ActorUnreachableError, outcomes
from configs.deadlines import ENGINE_HEALTH_S

_COMING_S = 1.0  # for that of an engine whose process may be starting, while others wait
_ASK_AGAIN_S = 5.0  # after a refit that failed
_NO_ANSWER = "health: no answer within {:.0f} s"


class Supervisor:
    """Call from one thread.

    Attributes:
        fleet: how the engines stand.
        log: lines since it was emptied.
    """

    def __init__(self, engines: Sequence[str], restart_s: float, handle: Callable[[str], Any], refit: Callable[[], Any] | None) -> None:
        """
        Args:
            handle: of an engine; raises ActorGoneError.
            refit: asks the policy for a refit of all engines; returns the reference of its result.
        """
        self.fleet = Fleet(engines, restart_s)
        self.log: list[str] = []
        self._engines, self._handle, self._refit = engines, handle, refit
        self._questions: dict[Any, tuple[str, float]] = {}  # reference of a call of `health` to its engine and the time of the call
        self._refitting: Any = None
        self._next_refit = 0.0

    def lost(self, name: str, message: str, error: Exception) -> None:
        """A call of the engine failed with the error."""
        gone, ended = isinstance(error, ActorGoneError), isinstance(error, (ActorUnreachableError, EngineNotReadyError))
        self.fleet.lost(name, message, gone=gone, hangs=not gone and not ended)

    def look(self) -> list[Any]:
        """Take the answers that are there, and ask again who is due. Returns references whose arrival is worth another look."""
        arrived, _ = ray.wait(list(self._questions), num_returns=len(self._questions), timeout=0) if self._questions else ([], [])
        for ref in arrived:
            self._take(ref, self._questions.pop(ref)[0])
        now = time.monotonic()
        for ref, (name, since) in list(self._questions.items()):
            if now - since > ENGINE_HEALTH_S:
                del self._questions[ref]
                self._no_answer(name, ActorTimeoutError(_NO_ANSWER.format(ENGINE_HEALTH_S)))
        asked = {name for name, _ in self._questions.values()}
        for name in set(self.fleet.due()) - asked:
            self._ask(name)
        self._ask_for_weights(now)
        return [*self._questions, *([self._refitting] if self._refitting is not None else [])]

    def members(self) -> dict[str, str]:
        """Engines whose vLLM is up, stale ones included, with their incarnations: asked now, all at once. One that hangs is ended, since
        it will lack the weights that the others get.
        """
        up, coming = dict[str, Any](), dict[str, Any]()
        for name in self._engines:
            standing = self.fleet.standing(name)
            if standing != "given_up":
                try:
                    (up if standing in ("healthy", "stale") else coming)[name] = self._handle(name).health.remote()
                except ActorGoneError as error:
                    self.lost(name, str(error), error)
        ready: dict[str, str] = {}
        for refs, timeout_s in ((up, ENGINE_HEALTH_S), (coming, _COMING_S)):
            for name, health, failure in outcomes(refs, what="health", timeout_s=timeout_s):
                if failure is None:
                    self._report(name, health)
                    if self.fleet.standing(name) in ("healthy", "stale"):
                        ready[name] = health.incarnation
                elif name in up or not isinstance(failure, ActorTimeoutError) or isinstance(failure, ActorUnreachableError):
                    if self.fleet.standing(name) == "healthy":
                        self.lost(name, str(failure), failure)
                    self._no_answer(name, failure)
        return {name: ready[name] for name in self._engines if name in ready}

    def _ask(self, name: str) -> None:
        try:
            self._questions[self._handle(name).health.remote()] = name, time.monotonic()
        except ActorGoneError as error:
            self._no_answer(name, error)

    def _take(self, ref: Any, name: str) -> None:
        for _, health, error in outcomes({name: ref}, what="health", timeout_s=ENGINE_HEALTH_S):
            if error is not None:
                self._no_answer(name, error)
            else:
                self._report(name, health)

    def _report(self, name: str, health: EngineHealth) -> None:
        if self.fleet.standing(name) == "healthy":
            if health.state == "ready" and self.fleet.seen(name, health.incarnation):
                return
            reason = health.failure or f"it was started again, and is {health.state}"
            self.fleet.lost(name, f"{name}: {reason}", hangs=health.state == "failed")
        self._end(name, self.fleet.answered(name, health))

    def _no_answer(self, name: str, error: Exception) -> None:
        gone = isinstance(error, ActorGoneError)
        self._end(name, self.fleet.unanswered(name, ended=isinstance(error, ActorUnreachableError), gone=gone))

    def _end(self, name: str, verdict: Verdict) -> None:
        if verdict:
            self.log.append(f"{name} is ended" + (", to start again" if verdict == "restart" else " for good"))
            ray.kill(self._handle(name), no_restart=verdict == "end")

    def _ask_for_weights(self, now: float) -> None:
        if self._refitting is not None:
            if not ray.wait([self._refitting], timeout=0)[0]:
                return
            for _, _, error in outcomes({"policy": self._refitting}, what="refit of restarted engines", timeout_s=ENGINE_HEALTH_S):
                if error is not None:
                    self._next_refit = now + _ASK_AGAIN_S
                    self.log.append(f"no weights for {', '.join(self.fleet.stale)}: {error}")
            self._refitting = None
        served = any(self.fleet.standing(name) == "healthy" for name in self._engines)
        if self._refit is None or served or not self.fleet.stale or now < self._next_refit:
            return
        self._next_refit = now + _ASK_AGAIN_S
        try:
            self._refitting = self._refit()
        except ActorGoneError as error:
            self.log.append(f"no weights for {', '.join(self.fleet.stale)}: {error}")
