"""Which engine serves which request. Pure: no Ray, no clock.

assign(costs) ──► engine with the fewest outstanding tokens, first name on a tie
     └── outstanding += cost, until release(engine, cost)
"""

from __future__ import annotations

from collections.abc import Sequence


class NoEngineError(RuntimeError):
    """Every engine is dead. The message lists them with their reasons.

    Attributes:
        request_ids: of submitted requests that end with this.
    """

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message, request_ids)
        self.request_ids, self._message = request_ids, message

    def __str__(self) -> str:
        return self._message


class Router:
    """Load and liveness of the engines. Invariant: a dead engine has no outstanding tokens and is never assigned."""

    def __init__(self, names: Sequence[str]) -> None:
        """
        Raises:
            ValueError: no names, or one twice.
        """
        if not names or len(set(names)) != len(names):
            raise ValueError(f"engine names must be unique and at least one, got {list(names)}")
        self._outstanding = dict.fromkeys(names, 0)
        self._dead: dict[str, str] = {}

    @property
    def alive(self) -> list[str]:
        """Names that may be assigned, in the order given."""
        return [name for name in self._outstanding if name not in self._dead]

    @property
    def dead(self) -> dict[str, str]:
        """Name to reason."""
        return dict(self._dead)

    def outstanding(self, name: str) -> int:
        """Tokens assigned and not yet released."""
        return self._outstanding[name]

    def assign(self, costs: Sequence[int]) -> list[str]:
        """An engine per request, greedily in the order given.

        Args:
            costs: tokens of each request at most (prompt and response).

        Raises:
            NoEngineError: none is alive.
        """
        if not self.alive:
            raise self.none_alive()
        chosen = []
        for cost in costs:
            name = min(self.alive, key=self._outstanding.__getitem__)  # min keeps the first of equals
            self._outstanding[name] += cost
            chosen.append(name)
        return chosen

    def none_alive(self, request_ids: tuple[str, ...] = ()) -> NoEngineError:
        """The error to raise when no engine is left."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self._dead.items())
        return NoEngineError(f"no engine is alive: {reasons}", request_ids)

    def release(self, name: str, cost: int) -> None:
        """Requests of that many tokens are done, or given up. A dead engine has already lost its load."""
        if name not in self._dead:
            self._outstanding[name] -= cost

    def mark_dead(self, name: str, reason: str) -> None:
        """Never assign this engine again. The first reason stays."""
        self._outstanding[name] = 0
        self._dead.setdefault(name, reason)
