"""Several engine actors as one: requests are spread, results come back in order, and a dead engine has a name.

generate(requests) ── Router ──► engine-0 ◄── part 0        wait for all, with a deadline
                           └───► engine-1 ◄── part 1        first failure: EngineDiedError("engine-1 ...")
refit(ref, version) ───────────► every living engine at once
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from actors.generation.routing import Router
from actors.generation.types import EngineDiedError, EngineFailedError, EngineHealth, GenerationRequest, GenerationResult
from actors.waiting import ActorGoneError, ActorTimeoutError, find, wait

_GRACE_S = 10.0  # beyond `timeout_s`: an engine notices its own deadline first, aborts its requests, and stays usable
_FETCH_S = 10.0  # for an answer that is there


class EnginePool:
    """A client of named engine actors; it owns none of them."""

    def __init__(self, namespace: str, engines: Sequence[str], *, timeout_s: float) -> None:
        """
        Args:
            engines: names of actors in the Ray namespace; looked up when first used.
            timeout_s: longest wait for one call.
        """
        self._namespace, self._timeout_s = namespace, timeout_s
        self._router = Router(engines)
        self._handles: dict[str, Any] = {}

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One result per request, in order.

        Raises:
            EngineDiedError: an engine is dead, silent beyond `timeout_s`, or failed. RequestError: as the engine raised it.
            NoEngineError: none is left.
        """
        costs = [len(request.prompt_token_ids) + request.max_new_tokens for request in requests]
        parts: dict[str, list[int]] = {}
        for row, name in enumerate(self._router.assign(costs)):
            parts.setdefault(name, []).append(row)
        try:
            refs = {name: self._handle(name).generate.remote([requests[row] for row in rows]) for name, rows in parts.items()}
            answers = self._wait(refs, f"generate {len(requests)} responses", self._timeout_s + _GRACE_S)
        finally:
            for name, rows in parts.items():
                self._router.release(name, sum(costs[row] for row in rows))
        by_row = {row: result for name, rows in parts.items() for row, result in zip(rows, answers[name], strict=True)}
        return [by_row[row] for row in range(len(requests))]

    def refit(self, weights: Any, version: int) -> dict[str, int]:
        """Give all living engines the weights behind an ObjectRef. Returns the bytes that each took over.

        Raises:
            EngineDiedError. WeightMismatchError: the weights fit none of the engines, and all keep what they had.
        """
        refs = {name: self._handle(name).update_weights.remote(weights, version) for name in self._router.alive}
        updates = self._wait(refs, f"refit to weight version {version}", self._timeout_s + _GRACE_S)
        return {name: update.bytes for name, update in updates.items()}

    def health(self, timeout_s: float = 10.0) -> dict[str, EngineHealth]:
        """What each living engine says of itself.

        Raises:
            EngineDiedError: one is dead, or did not answer within `timeout_s`.
        """
        return self._wait({name: self._handle(name).health.remote() for name in self._router.alive}, "health", timeout_s)

    @property
    def dead(self) -> dict[str, str]:
        """Engines found dead, with the reason."""
        return self._router.dead

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            try:
                self._handles[name] = find(name, self._namespace)
            except ActorGoneError as error:
                raise self._died(name, error) from error
        return self._handles[name]

    def _wait(self, refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        names = {ref: name for name, ref in refs.items()}
        pending, deadline = list(names), time.monotonic() + timeout_s
        answers: dict[str, Any] = {}
        while pending:
            # One at a time as they finish: the first failure must not wait for the slowest engine.
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                name = names[pending[0]]
                raise self._died(name, ActorTimeoutError(f"{what}: no answer from {name} within {timeout_s:.0f} s"))
            for ref in done:
                name = names[ref]
                try:
                    answers[name] = wait(ref, who=name, what=what, timeout_s=_FETCH_S)
                except (ActorGoneError, ActorTimeoutError, EngineFailedError) as error:
                    raise self._died(name, error) from error
        return answers

    def _died(self, name: str, error: Exception) -> EngineDiedError:
        # Errors of waiting name the actor themselves; what the engine raised does not know its name.
        message = f"{name}: {error}" if isinstance(error, EngineFailedError) else str(error)
        self._router.mark_dead(name, message)
        return EngineDiedError(name, message)
