"""Which requests are out at which engine, and what becomes of those of a dead one. Pure: no Ray, no clock.

assign ──► at an engine ──finish, withdraw──► forgotten
              │    ▲
  engine dead │    │ reassign: to a living one, from the prompt on, with the same seed
              ▼    │
             lost ─┘ ──► given up: `MOST_ENGINES` have died under it, or none lives
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.generation.routing import Router
from actors.generation.types import GenerationRequest, RequestError

MOST_ENGINES = 3  # that a request is given to; one that kills each engine must not kill them all
Parts = dict[str, list[GenerationRequest]]  # by engine


@dataclass
class _Entry:
    request: GenerationRequest
    engine: str
    engines: int = 1  # given to so far


def cost(request: GenerationRequest) -> int:
    """Tokens at most: prompt and response. What the router balances."""
    return len(request.prompt_token_ids) + request.max_new_tokens


class Outstanding:
    """Invariant: every request that was assigned ends exactly once, by `finish`, `withdraw` or as given up."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._entries: dict[str, _Entry] = {}
        self._unwanted: set[tuple[str, str]] = set()  # engine and id of results that come although their request was withdrawn

    def at(self, engine: str) -> tuple[str, ...]:
        """Ids of the requests that the engine has."""
        return tuple(request_id for request_id, entry in self._entries.items() if entry.engine == engine)

    def engines(self) -> set[str]:
        """Engines that have a request, dead ones included."""
        return {entry.engine for entry in self._entries.values()}

    def assign(self, requests: Sequence[GenerationRequest]) -> Parts:
        """Spread the requests over the living engines.

        Raises:
            RequestError: an id is out already, or occurs twice. NoEngineError: none lives. Nothing is assigned then.
        """
        seen = set(self._entries)
        for request in requests:
            if request.request_id in seen:
                raise RequestError(f"request {request.request_id!r} occurs twice, or is running already")
            seen.add(request.request_id)
        parts: Parts = {}
        for request, engine in zip(requests, self._router.assign([cost(request) for request in requests]), strict=True):
            self._entries[request.request_id] = _Entry(request, engine)
            parts.setdefault(engine, []).append(request)
        return parts

    def finish(self, engine: str, request_id: str) -> bool:
        """A result has come from the engine. False if it is not the one that has the request: the result is none of ours."""
        if (engine, request_id) in self._unwanted:  # it ended before a request of this id that was submitted since
            self._unwanted.remove((engine, request_id))
            return False
        entry = self._entries.get(request_id)
        if entry is None or entry.engine != engine:
            return False
        self._forget(request_id)
        return True

    def withdraw(self, request_ids: Sequence[str]) -> dict[str, list[str]]:
        """Forget requests; those that are out, by engine."""
        found: dict[str, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._entries:
                found.setdefault(self._forget(request_id).engine, []).append(request_id)
        return found

    def ended_before(self, engine: str, request_ids: Sequence[str]) -> None:
        """The engine could not stop these withdrawn requests: they had ended, and their results are still to come."""
        self._unwanted.update((engine, request_id) for request_id in request_ids)

    def reassign(self) -> tuple[Parts, dict[str, list[str]]]:
        """Give the requests of dead engines to living ones.

        Returns:
            What to submit where; and the ids that are given up, by their last engine.
        """
        parts: Parts = {}
        given_up: dict[str, list[str]] = {}
        lost = [(request_id, entry) for request_id, entry in self._entries.items() if entry.engine in self._router.dead]
        for request_id, entry in lost:
            if entry.engines == MOST_ENGINES or not self._router.alive:
                given_up.setdefault(self._forget(request_id).engine, []).append(request_id)
            else:
                (entry.engine,) = self._router.assign([cost(entry.request)])
                entry.engines += 1
                parts.setdefault(entry.engine, []).append(entry.request)
        return parts, given_up

    def _forget(self, request_id: str) -> _Entry:
        entry = self._entries.pop(request_id)
        self._router.release(entry.engine, cost(entry.request))
        return entry
