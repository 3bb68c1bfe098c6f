"""One refit over a GPU's memory or over NCCL, seen from the policy group: workers send while engines take.

Sender.send ──send_weights──► policy workers ══ weights (actors/refit/transports.py) ══► vLLM workers
            └─begin_update──► engines: pause ─────────────── load ───────────────────────► go on
waits for both; whoever is silent at the deadline is named, with what the engines say that they are doing
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NoReturn

import ray

from actors.generation.pool import EnginePool
from actors.generation.types import RefitPlan, UpdateOptions, WeightUpdate
from actors.refit.handover import Manifest
from actors.refit.transports import NotDeliveredError, Transfer
from actors.waiting import ActorTimeoutError, wait, wait_all

_LAST_WORD_S = 5.0  # for an engine to say why the policy could not send to it
_FETCH_S = 10.0


class Sender:
    """Built at the first refit. Call from one thread."""

    def __init__(self, plan: RefitPlan, workers: Mapping[str, Any], engines: EnginePool, timeout_s: float) -> None:
        """
        Args:
            workers: all policy workers by name, rank 0 first.
        """
        self._plan, self._workers, self._engines, self._timeout_s = plan, workers, engines, timeout_s
        refs = {name: worker.call.remote("manifest") for name, worker in workers.items()}
        self._manifest: Manifest = next(iter(wait_all(refs, what="refit: list the weights", timeout_s=timeout_s).values()))
        self._joined: list[str] = []

    def send(self, version: int, options: UpdateOptions) -> dict[str, WeightUpdate]:
        """Give the present weights to all living engines. What it took, by engine.

        Raises:
            As `EnginePool.update_weights`. ActorGoneError, ActorTimeoutError: a worker is lost, or a side is stuck; named.
        """
        if self._plan.transport == "nccl":
            self._join()
        transfer = Transfer(self._plan.transport, self._manifest, self._plan.buffer_bytes)
        alive = self._engines.alive
        sends = {
            name: worker.send_weights.remote(transfer, self._engines.namespace, alive, self._timeout_s)
            for name, worker in self._workers.items()
        }
        updates = self._engines.begin_update(transfer, version, options.mode, options.recompute_kv_cache)
        self._await(sends, updates, version)
        return self._engines.end_update(updates, version)

    def _join(self) -> None:
        """Build the communicator, when there is none or engines have died since."""
        if self._joined == self._engines.alive:
            return
        name, first = next(iter(self._workers.items()))
        address, port = wait(first.rendezvous.remote(), who=name, what="refit: find a port", timeout_s=self._timeout_s)
        engines = self._engines.begin_join(address, port, self._plan.ranks_per_engine)
        world_size = 1 + len(engines) * self._plan.ranks_per_engine
        refs = {name: first.join_broadcast.remote(address, port, world_size), **engines}
        wait_all(refs, what="refit: join the broadcast", timeout_s=self._timeout_s)
        self._joined = list(engines)

    def _await(self, sends: Mapping[str, Any], updates: Mapping[str, Any], version: int) -> None:
        """Until all has been sent, or the first failure."""
        names = {ref: name for name, ref in (*sends.items(), *updates.items())}
        pending, deadline = list(names), time.monotonic() + self._timeout_s
        while any(ref in pending for ref in sends.values()):
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                self._stuck([names[ref] for ref in pending], version)
            for ref in done:
                try:
                    wait(ref, who=names[ref], what="refit: send the weights", timeout_s=_FETCH_S)
                except Exception as error:
                    if names[ref] in updates and self._plan.transport == "ipc":
                        continue  # the policy goes on with the engines that are left, or fails itself
                    if isinstance(error, NotDeliveredError):
                        continue  # rank 0 fails, too
                    self._blame_engine(updates, version)
                    if isinstance(error, ActorTimeoutError):  # the policy's own wait for an engine may end before this one
                        self._stuck([names[ref] for ref in pending] or [names[ref]], version)
                    raise

    def _blame_engine(self, updates: Mapping[str, Any], version: int) -> None:
        """Raise what an engine raised, if one did: it is the cause of the policy's failure, and says more."""
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
