"""Which engine gets which request, which requests are out, and what becomes of those of a dead engine. Pure: no Ray, no clock.

assign ──► at the engine with the least load ──finish, withdraw──► forgotten
              │    ▲
  engine dead │    │ reassign: to a living one, from the prompt on, with the same seed
              ▼    │
             lost ─┘ ──► given up: `MOST_ENGINES` have died under it, or none lives
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.generation.types import GenerationRequest, NoEngineError, RequestError

MOST_ENGINES = 3  # that a request is given to; one that kills each engine must not kill them all
Parts = dict[str, list[GenerationRequest]]  # by engine


@dataclass
class _Entry:
    request: GenerationRequest
    engine: str
    engines: int = 1  # given to so far
    lost: bool = False  # its engine has died since, or there was none


def cost(request: GenerationRequest) -> int:
    """Tokens at most: prompt and response."""
    return len(request.prompt_token_ids) + request.max_new_tokens


class Outstanding:
    """Invariant: every request that was assigned ends exactly once, by `finish`, `withdraw` or as given up.

    Attributes:
        load: tokens at most of the requests that each engine has. A request goes to the engine with the least, the first of equals.
        dead: engines that get no requests, with the reason.
    """

    def __init__(self, engines: Sequence[str]) -> None:
        """Raises: ValueError (no names, or one twice)."""
        if not engines or len(set(engines)) != len(engines):
            raise ValueError(f"engine names must be unique and at least one, got {list(engines)}")
        self.load = dict.fromkeys(engines, 0)
        self.dead: dict[str, str] = {}
        self._entries: dict[str, _Entry] = {}
        self._unwanted: set[tuple[str, str]] = set()  # engine and id of results that come although their request was withdrawn

    @property
    def alive(self) -> list[str]:
        """Engines that get requests, in the order given."""
        return [name for name in self.load if name not in self.dead]

    def mark_dead(self, engine: str, reason: str) -> None:
        """Assign nothing to this engine, and what it has to others (`reassign`). The first reason stays."""
        self.dead.setdefault(engine, reason)
        for entry in self._entries.values():
            entry.lost |= entry.engine == engine

    def mark_alive(self, engine: str) -> None:
        """The engine serves again, in a process that knows of no requests."""
        if self.dead.pop(engine, None) is not None:
            self._unwanted = {unwanted for unwanted in self._unwanted if unwanted[0] != engine}

    def none_alive(self, request_ids: tuple[str, ...] = ()) -> NoEngineError:
        """The error to raise when no engine is left."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.dead.items())
        return NoEngineError(", ".join(self.dead), f"no engine is alive: {reasons}", request_ids)

    def at(self, engine: str) -> tuple[str, ...]:
        """Ids of the requests that the engine has."""
        return tuple(request_id for request_id, entry in self._entries.items() if entry.engine == engine)

    def engines(self) -> set[str]:
        """Engines that have a request, dead ones included."""
        return {entry.engine for entry in self._entries.values()}

    def lost(self) -> dict[str, str]:
        """Requests for `reassign`: id to the engine that had it."""
        return {request_id: entry.engine for request_id, entry in self._entries.items() if entry.lost}

    def assign(self, requests: Sequence[GenerationRequest], *, hold: bool = False) -> Parts:
        """Spread the requests over the living engines.

        Args:
            hold: when none lives, keep them for `reassign`.

        Raises:
            RequestError: an id is out already, or occurs twice. NoEngineError: none lives. Nothing is assigned then.
        """
        seen = set(self._entries)
        for request in requests:
            if request.request_id in seen:
                raise RequestError(f"request {request.request_id!r} occurs twice, or is running already")
            seen.add(request.request_id)
        if not self.alive and hold:
            for request in requests:
                self._entries[request.request_id] = _Entry(request, next(iter(self.load)), engines=0, lost=True)
                self.load[next(iter(self.load))] += cost(request)
            return {}
        if not self.alive:
            raise self.none_alive()
        parts: Parts = {}
        for request in requests:
            entry = self._entries[request.request_id] = _Entry(request, self._take(request))
            parts.setdefault(entry.engine, []).append(request)
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

    def reassign(self, *, hold: bool = False) -> tuple[Parts, dict[str, list[str]]]:
        """Give the requests of dead engines to living ones.

        Args:
            hold: when none lives, keep them.

        Returns:
            What to submit where; and the ids that are given up, by their last engine.
        """
        parts: Parts = {}
        given_up: dict[str, list[str]] = {}
        if hold and not self.alive:
            return {}, {}
        lost = [(request_id, entry) for request_id, entry in self._entries.items() if entry.lost]
        for request_id, entry in lost:
            if entry.engines == MOST_ENGINES or not self.alive:
                given_up.setdefault(self._forget(request_id).engine, []).append(request_id)
            else:
                self.load[entry.engine] -= cost(entry.request)
                entry.engine = self._take(entry.request)
                entry.engines, entry.lost = entry.engines + 1, False
                parts.setdefault(entry.engine, []).append(entry.request)
        return parts, given_up

    def _take(self, request: GenerationRequest) -> str:
        engine = min(self.alive, key=self.load.__getitem__)  # min keeps the first of equals
        self.load[engine] += cost(request)
        return engine

    def _forget(self, request_id: str) -> _Entry:
        entry = self._entries.pop(request_id)
        self.load[entry.engine] -= cost(entry.request)
        return entry
