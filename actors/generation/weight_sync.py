"""One weight sync, as the policy group sees it: workers send while engines load.

transport.offer ─► policy workers ══ weights (actors/refit/) ══► vLLM's workers
pool.begin_update ─► engines: pause ──────────── load ─────────► go on

The group waits for both ends. Whoever is silent at the deadline is named, with what the engines say that they are doing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import ray

from actors.generation.pool import EnginePool
from actors.generation.types import NoEngineError, UpdateOptions, WeightUpdate
from actors.refit.transport import NotDeliveredError, RefitPlan
from actors.refit.transports import TRANSPORTS
from actors.waiting import ActorTimeoutError, outcomes

_LAST_WORD_S = 5.0  # for an engine to say why the policy could not send to it


class WeightSync:
    """Built at the first refit. Call from one thread."""

    def __init__(self, plan: RefitPlan, workers: Mapping[str, Any], engines: EnginePool, timeout_s: float) -> None:
        """
        Args:
            workers: handles of all policy workers by name, rank 0 first.
            timeout_s: longest wait for the workers.
        """
        self._plan, self._workers, self._engines, self._timeout_s = plan, workers, engines, timeout_s
        self._transport = TRANSPORTS[plan.transport](timeout_s)

    def send(self, version: int, options: UpdateOptions) -> dict[str, WeightUpdate]:
        """Give the present weights to all living engines, and to those that were started again. Returns what it took, by engine.

        When all of them die of it, or meanwhile, but may come back, it is done once more.

        Raises:
            As `EnginePool.members`, `end_update`. ActorGoneError, ActorTimeoutError: a worker is lost, or an end is stuck; named.
        """
        try:
            return self._send(version, options)
        except NoEngineError:
            if not self._engines.returning:
                raise
        return self._send(version, options)

    def _send(self, version: int, options: UpdateOptions) -> dict[str, WeightUpdate]:
        members = self._engines.members()
        offered, sends = self._transport.offer(self._plan, self._workers, self._engines.namespace, members)
        updates = self._engines.begin_update(offered, version, options, members)
        self._await(sends, updates, version)
        return self._engines.end_update(updates, version)

    def _await(self, sends: Mapping[str, Any], updates: Mapping[str, Any], version: int) -> None:
        """Wait until all workers have sent, or for the first failure."""
        sending, silent = set(sends), [*sends, *updates]
        if not sending:
            return
        for name, _, error in outcomes({**sends, **updates}, what="refit: send the weights", timeout_s=self._timeout_s):
            if not isinstance(error, ActorTimeoutError):
                silent.remove(name)
            # The policy goes on with the engines that are left; and rank 0 fails with the cause of a NotDeliveredError.
            left_out = name in updates and self._transport.engines_may_fail
            if error is not None and not left_out and not isinstance(error, NotDeliveredError):
                self._blame_engine(updates, version)
                if isinstance(error, ActorTimeoutError):
                    self._stuck(silent, version)
                raise error
            sending.discard(name)
            if not sending:
                return

    def _blame_engine(self, updates: Mapping[str, Any], version: int) -> None:
        """Raise what an engine raised, if one did: that is the cause of the policy's failure."""
        done, _ = ray.wait(list(updates.values()), num_returns=len(updates), timeout=_LAST_WORD_S)
        if done:
            self._engines.end_update({name: ref for name, ref in updates.items() if ref in done}, version)

    def _stuck(self, silent: list[str], version: int) -> NoReturn:
        try:
            said = {name: health.updating or "not updating" for name, health in self._engines.health().items()}
        except Exception as error:  # noqa: BLE001  (the silence is the error to report)
            said = {"engines": f"no answer ({error})"}
        doing = "; ".join(f"{name}: {what}" for name, what in said.items())
        raise ActorTimeoutError(
            f"refit to weight version {version}: no answer from {', '.join(silent)} within {self._timeout_s:.0f} s ({doing})"
        )
