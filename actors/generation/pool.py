"""Several engine actors as one: requests are spread, a dead engine has a name, and what it was asked can go on elsewhere.

submit(requests) ── Outstanding ──► engines              generate(requests): both, for one batch
collect(timeout_s) ◄── one waiting call per engine
begin_update, end_update ──► every living engine at once

With `recover` all of them go on without an engine that dies, as long as one lives: its requests start again at the others. With
`restart_s`, too, an engine that Ray starts again is taken back once it has weights (fleet.py), and requests wait while none serves.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from actors.generation.fleet import Change
from actors.generation.outstanding import Outstanding, Parts
from actors.generation.supervision import Supervisor
from actors.generation.types import (
    EngineDiedError,
    EngineFailedError,
    EngineHealth,
    EngineNotReadyError,
    GenerationRequest,
    GenerationResult,
    GenerationTimeoutError,
    UpdateOptions,
    WeightUpdate,
)
from actors.waiting import ActorGoneError, ActorTimeoutError, find, outcomes
from configs.deadlines import GRACE_S

_LOOK_S = 0.1  # between looks after dead engines while requests wait for one
_POLL_S = 1.0  # for which an engine lets `collect` wait: long against a call's cost, short against a deadline
_LOST = ActorGoneError, ActorTimeoutError, EngineFailedError, EngineNotReadyError  # such an engine counts as dead


class EnginePool:
    """A client of named engine actors; it owns none of them. Two pools never see each other's results. Call from one thread."""

    def __init__(
        self,
        namespace: str,
        engines: Sequence[str],
        *,
        timeout_s: float,
        recover: bool = False,
        restart_s: float = 0.0,
        return_s: float = 0.0,
        refit: Callable[[], Any] | None = None,
    ) -> None:
        """
        Args:
            engines: names of actors in the Ray namespace; looked up when first used.
            timeout_s: longest wait for one call; an engine that is silent for longer counts as dead.
            recover: go on with the engines that are left, when one dies; otherwise the first death is an error.
            restart_s: with `recover`, how long an engine may take to start again; 0: one that dies does not come back.
            return_s: how long no engine may serve, while one may still come back.
            refit: asks the policy to give all engines its weights, and returns the reference of the result; called when only stale ones
                are left.
        """
        self.namespace, self._timeout_s, self._recover = namespace, timeout_s, recover
        self._handles: dict[str, Any] = {}
        self._client = uuid.uuid4().hex
        self._outstanding = Outstanding(engines)
        self._polls: dict[Any, tuple[str, float]] = {}  # reference of a waiting `collect` to its engine and the time of the call
        self._ready: list[GenerationResult] = []
        self._supervisor = Supervisor(engines, restart_s, self._handle, refit) if recover and restart_s else None
        self._return_s = return_s
        self._none_since: float | None = None  # no engine has served since
        self._updating: dict[str, str] = {}  # members of the present update, with their incarnations

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One result per request, in order. No other requests may be out at this pool.

        Raises:
            EngineDiedError: an engine is dead, silent beyond `timeout_s`, or failed. With `recover`, see `collect`.
            GenerationTimeoutError: over `timeout_s`. RequestError: as the engine raised it. NoEngineError: none is left.
            After each of them, none of the requests runs.
        """
        ids, results = [request.request_id for request in requests], dict[str, GenerationResult]()
        deadline = time.monotonic() + self._timeout_s
        try:
            self.submit(requests)
            while len(results) < len(ids) and (left := deadline - time.monotonic()) > 0:
                if self._waiting:
                    deadline = time.monotonic() + self._timeout_s  # they begin when an engine is back; `return_s` bounds this
                results |= {result.request_id: result for result in self.collect(min(left, _POLL_S))}
        except Exception:
            self.abort(ids)
            raise
        if len(results) < len(ids):
            before = self._outstanding.alive
            self.abort(ids)
            if silent := [name for name in before if name in self._outstanding.dead]:
                raise EngineDiedError(silent[0], self._outstanding.dead[silent[0]])
            raise GenerationTimeoutError(f"{len(ids) - len(results)} of {len(ids)} responses unfinished after {self._timeout_s:.0f} s")
        return [results[request_id] for request_id in ids]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Let the requests join those that run, each at the engine with the least load. All or none.

        Raises:
            RequestError: as the engine raised it, or an id is out already. EngineDiedError, NoEngineError: as `collect`.
        """
        self._send(self._outstanding.assign(requests, hold=self._may_wait()))
        self._reissue()

    def collect(self, timeout_s: float, until: Any = None) -> list[GenerationResult]:
        """Finished results of any engine, each once.

        Args:
            until: a reference of Ray's whose arrival ends the wait, too.

        Returns:
            As soon as there is one; none at the deadline, or at once if nothing is out.

        Raises:
            EngineDiedError: its `request_ids` are given up; with `recover`, since `MOST_ENGINES` engines have died under them.
            NoEngineError: with `recover`: none is left, or none came back within `return_s`; all `request_ids` are given up.
            After each of them, what has finished comes with the next call.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            others = self._look()
            self._reissue()
            self._poll()
            left = max(0.0, deadline - time.monotonic())
            came = False
            if not self._ready and (self._polls or self._waiting):
                came = self._gather(min(left, _POLL_S), until, others)
            if self._ready or came or not (self._polls or self._waiting) or left == 0.0:
                ready, self._ready = self._ready, []
                return ready

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; none of them has a result any more, and their ids may be used again."""
        withdrawn = self._outstanding.withdraw(request_ids)
        refs = {
            name: self._handle(name).abort.remote(self._client, ids) for name, ids in withdrawn.items() if name in self._outstanding.alive
        }
        stopped, _ = self._answers(refs, f"abort {len(request_ids)} requests")
        for name, ids in stopped.items():
            self._outstanding.ended_before(name, sorted(set(withdrawn[name]) - set(ids)))

    def members(self) -> dict[str, str]:
        """Engines that an update can reach, and their incarnations. With `restart_s` all are asked, and stale ones belong to them: so
        they come back; while there is none, but one may come back, this waits for it, up to `return_s`.

        Raises:
            NoEngineError: none is left, or came back.
        """
        if self._supervisor is None:
            return dict.fromkeys(self._outstanding.alive, "")
        deadline = time.monotonic() + self._return_s
        while not (found := self._supervisor.members()):
            self._take_over()
            if not self._supervisor.fleet.returning or time.monotonic() > deadline:
                raise self._outstanding.none_alive()
            time.sleep(_POLL_S)
        self._take_over()
        return found

    def begin_update(self, weights: Any, version: int, options: UpdateOptions, members: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Give engines what a transport offers (`Transport.offer`), without waiting. References by engine, for `end_update`.

        Args:
            members: as `members` said; default: it is asked.

        Raises:
            EngineDiedError: an engine is gone (with `recover`: the last one). NoEngineError.
        """
        refs = {}
        self._updating = dict(self.members() if members is None else members)
        for name in self._updating:
            try:
                refs[name] = self._handle(name).update_weights.remote(weights, version, options)
            except EngineDiedError:
                if not (self._recover and self._outstanding.alive):
                    raise
        return refs

    def end_update(self, refs: Mapping[str, Any], version: int) -> dict[str, WeightUpdate]:
        """Wait for what `begin_update` began. What it took, by engine.

        Raises:
            EngineDiedError, NoEngineError: as `generate`. WeightMismatchError: the weights fit none of the engines, and all keep what
            they had. GenerationTimeoutError: mode "wait", and an engine's requests did not end in time.
        """
        what, timeout_s = f"refit to weight version {version}", self._timeout_s + GRACE_S
        if not self._recover:
            return self._wait(refs, what, timeout_s)
        taken, refused = self._answers(refs, what)
        if self._supervisor is not None:
            for name in taken:
                self._supervisor.fleet.refitted(name, self._updating[name])
            if len(taken) + len(refused) < len(refs):
                self._supervisor.members()  # one that lives without these weights is ended now
            self._take_over()
        if refused:
            raise next(iter(refused.values()))
        if not taken:
            raise self._outstanding.none_alive(())
        return taken

    def sleep(self) -> None:
        """Let all living engines free their GPU memory until the next refit (`Engine.sleep`).

        Raises:
            EngineDiedError: as `generate`.
        """
        self._wait({name: self._handle(name).sleep.remote() for name in self._outstanding.alive}, "sleep", self._timeout_s)

    def health(self, timeout_s: float = 10.0) -> dict[str, EngineHealth]:
        """What each living engine says of itself.

        Raises:
            EngineDiedError: one is dead, or did not answer within `timeout_s`.
        """
        return self._wait({name: self._handle(name).health.remote() for name in self._outstanding.alive}, "health", timeout_s)

    @property
    def alive(self) -> list[str]:
        """Engines not found dead so far."""
        return self._outstanding.alive

    @property
    def dead(self) -> dict[str, str]:
        """Engines found dead, with the reason."""
        return dict(self._outstanding.dead)

    @property
    def returning(self) -> list[str]:
        """Engines found dead that may come back."""
        return self._supervisor.fleet.returning if self._supervisor is not None else []

    @property
    def restarts(self) -> int:
        """How often a dead engine was seen in a new process."""
        return self._supervisor.fleet.restarts if self._supervisor is not None else 0

    def news(self) -> tuple[list[Change], list[str]]:
        """Engines lost, back and given up, and lines for a log, since the last call. None without `restart_s`."""
        if self._supervisor is None:
            return [], []
        lines, self._supervisor.log = self._supervisor.log, []
        return self._supervisor.fleet.changes(), lines

    def _send(self, parts: Parts) -> None:
        refs = {}
        for name, part in parts.items():
            with contextlib.suppress(EngineDiedError):  # marked dead: `_reissue` has its requests next
                refs[name] = self._handle(name).submit.remote(self._client, part)
        taken, refused = self._answers(refs, "submit requests")
        for name, incarnation in taken.items():
            if self._supervisor is not None and not self._supervisor.fleet.seen(name, incarnation):
                self._handle(name).abort.remote(self._client, [request.request_id for request in parts[name]])
                self._died(name, EngineNotReadyError("it was started again, and has lost its requests"))
        if refused:
            for name in refused:  # a refused part never ran, so there is nothing to stop
                self._outstanding.withdraw([request.request_id for request in parts[name]])
            self.abort([request.request_id for part in parts.values() for request in part])
            raise next(iter(refused.values()))

    def _answers(self, refs: Mapping[str, Any], what: str) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Answers of the living engines, and the errors that living engines raised; an engine that does not live is marked dead."""
        answers: dict[str, Any] = {}
        refused: dict[str, Exception] = {}
        for name, answer, error in outcomes(refs, what=what, timeout_s=self._timeout_s + GRACE_S):
            if isinstance(error, _LOST):
                self._died(name, error)
            elif error is not None:  # the caller raises it once it has put things in order
                refused[name] = error
            else:
                answers[name] = answer
        return answers, refused

    def _reissue(self) -> None:
        while lost_engines := sorted(set(self._outstanding.lost().values())):
            if not self._recover:
                name, ids = lost_engines[0], self._outstanding.at(lost_engines[0])
                self._outstanding.withdraw(ids)
                raise EngineDiedError(name, self._outstanding.dead[name], ids)
            parts, given_up = self._outstanding.reassign(hold=self._may_wait())
            self._send(parts)
            if not given_up and not parts:
                return  # they wait for an engine
            if not given_up:
                continue
            ids = tuple(request_id for lost in given_up.values() for request_id in lost)
            if not self._outstanding.alive:
                raise self._outstanding.none_alive(ids)
            name = next(iter(given_up))
            raise EngineDiedError(
                name, f"{self._outstanding.dead[name]}; {len(ids)} requests lost their last engine: {', '.join(ids)}", ids
            )

    def _poll(self) -> None:
        waiting = {name for name, _ in self._polls.values()}
        for name in sorted(self._outstanding.engines() - waiting - set(self._outstanding.dead)):
            incarnation = self._supervisor.fleet.incarnation(name) if self._supervisor is not None else ""
            self._polls[self._handle(name).collect.remote(self._client, _POLL_S, incarnation)] = (name, time.monotonic())

    def _may_wait(self) -> bool:
        """Whether requests may wait for an engine to come back; true, too, when some serve."""
        if self._outstanding.alive:
            return True
        now = time.monotonic()
        self._none_since = now if self._none_since is None else self._none_since
        return bool(self.returning) and now - self._none_since <= self._return_s

    @property
    def _waiting(self) -> bool:
        """Whether requests wait for an engine to come back."""
        return not self._outstanding.alive and bool(self._outstanding.lost())

    def _look(self) -> list[Any]:
        """After dead engines. Returns references whose arrival is worth another look."""
        if self._supervisor is None or not self._outstanding.dead:
            return []
        refs = self._supervisor.look()
        self._take_over()
        return refs

    def _take_over(self) -> None:
        """What the supervisor knows of the engines."""
        assert self._supervisor is not None
        fleet = self._supervisor.fleet
        for name in self._outstanding.load:
            if fleet.standing(name) == "healthy":
                self._outstanding.mark_alive(name)
            else:
                self._outstanding.mark_dead(name, fleet.reason(name))
        if self._outstanding.alive:
            self._none_since = None

    def _gather(self, timeout_s: float, until: Any, others: Sequence[Any]) -> bool:
        """Take what the waiting calls have brought, waiting for the first, for one of `others`, or for `until`: whether that has come."""
        waiting = [*self._polls, *others, *([] if until is None else [until])]
        if not waiting:
            time.sleep(min(timeout_s, _LOOK_S))
            return False
        done, _ = ray.wait(waiting, timeout=min(timeout_s, _LOOK_S) if self._waiting else timeout_s)
        came = until in done
        if done and self._polls:
            done, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0)
        arrived = {self._polls.pop(ref)[0]: ref for ref in done if ref in self._polls}
        answers, refused = self._answers(arrived, "collect")
        for name, results in answers.items():
            self._ready += [result for result in results if self._outstanding.finish(name, result.request_id)]
        if refused:
            raise next(iter(refused.values()))
        longest = _POLL_S + self._timeout_s + GRACE_S
        for ref, (name, since) in list(self._polls.items()):
            if time.monotonic() - since > longest:
                del self._polls[ref]
                self._died(name, ActorTimeoutError(f"collect: no answer from {name} within {longest:.0f} s"))
        return came

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            try:
                self._handles[name] = find(name, self.namespace)
            except ActorGoneError as error:
                raise self._died(name, error) from error
        return self._handles[name]

    def _wait(self, refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        """Answers of all engines. The first failure ends the wait, which does not go on for the slowest engine."""
        answers: dict[str, Any] = {}
        for name, answer, error in outcomes(refs, what=what, timeout_s=timeout_s):
            if isinstance(error, _LOST):
                raise self._died(name, error) from error
            if error is not None:
                raise error
            answers[name] = answer
        return answers

    def _died(self, name: str, error: Exception) -> EngineDiedError:
        # Errors of waiting name the actor themselves; what the engine raised does not know its name.
        message = f"{name}: {error}" if isinstance(error, (EngineFailedError, EngineNotReadyError)) else str(error)
        self._outstanding.mark_dead(name, message)
        self._polls = {ref: poll for ref, poll in self._polls.items() if poll[0] != name}
        if self._supervisor is not None:
            self._supervisor.lost(name, message, error)
        return EngineDiedError(name, message, self._outstanding.at(name))
