"""A weight sync by ipc, as the policy group sees it: real `WeightSync`, `Delivery` and `Engine`; vLLM and the GPU have stand-ins."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.generation.engine import Engine, engine_actor_class
from actors.generation.pool import EnginePool
from actors.generation.types import EngineDiedError, UpdateOptions, WeightUpdate
from actors.generation.weight_sync import WeightSync
from actors.refit.ipc import Delivery
from actors.refit.manifest import Manifest, WeightMismatchError
from actors.refit.transport import RefitPlan, Transfer
from actors.waiting import ActorGoneError, ActorTimeoutError
from tests.actors.refit.test_receive import MANIFEST, engine
from tests.patience import WAIT_S, kill

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
NAMESPACE = "test-weight-sync"
TIMEOUT_S = 60.0


class StandInEngine(Engine):
    """An engine that loads nothing, or never gets to it."""

    def __init__(self, stuck: bool) -> None:
        ready, self._loads = engine()
        vars(self).update(vars(ready))
        if stuck:
            self._loads.updating = "waiting for running requests to end"
            self._loads.load = self._sleep  # type: ignore[method-assign]

    def _sleep(self, *_: Any) -> float:
        time.sleep(2 * WAIT_S)
        return 0.0

    def loaded(self) -> list[dict[str, Any]]:
        return self._loads.loaded


class StandInWorker:
    """Sends names without tensors."""

    def __init__(self, manifest: Manifest, does: str, timeout_s: float) -> None:
        self._manifest, self._does, self._timeout_s = manifest, does, timeout_s

    def call(self, method: str) -> Manifest:
        assert method == "manifest"
        return self._manifest

    def transport(self, method: str, transfer: Transfer, namespace: str, engines: list[str]) -> None:
        assert method == "send"
        delivery = Delivery(namespace, engines, transfer, self._timeout_s)
        delivery({"names": list(self._manifest.names[:1])})
        if self._does == "fail":
            delivery.abandon("the policy could not send its weights: out of memory")
            raise MemoryError("out of memory")
        if self._does == "die":
            os._exit(1)
        delivery({"names": list(self._manifest.names[1:])})


class Parts:
    """Starts stand-ins, and ends them."""

    def __init__(self) -> None:
        self.handles: dict[str, Any] = {}

    def engines(self, *stuck: bool) -> list[str]:
        for index, one in enumerate(stuck):
            options = {"name": f"engine-{index}", "namespace": NAMESPACE, "num_cpus": 0}
            self.handles[f"engine-{index}"] = engine_actor_class(StandInEngine).options(**options).remote(one)
        return list(self.handles)

    def sender(
        self, engines: list[str], does: str = "", manifest: Manifest = MANIFEST, recover: bool = False, timeout_s: float = TIMEOUT_S
    ) -> WeightSync:
        worker = ray.remote(num_cpus=0)(StandInWorker).remote(manifest, does, timeout_s)
        self.handles["policy-worker-0"] = worker
        ray.get([handle.__ray_ready__.remote() for handle in self.handles.values()], timeout=WAIT_S)
        pool = EnginePool(NAMESPACE, engines, timeout_s=timeout_s, recover=recover)
        return WeightSync(RefitPlan("ipc"), {"policy-worker-0": worker}, pool, timeout_s)


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    for handle in made.handles.values():
        ray.kill(handle)


def test_every_engine_loads_every_piece_once(parts: Parts) -> None:
    engines = parts.engines(False, False)
    sender = parts.sender(engines)
    for version in (1, 2):
        taken = sender.send(version, UpdateOptions())
        assert taken == dict.fromkeys(engines, WeightUpdate(MANIFEST.bytes, 0.25))
    for name in engines:
        assert ray.get(parts.handles[name].loaded.remote(), timeout=WAIT_S) == [{"names": ["a"]}, {"names": ["b", "c"]}] * 2


def test_an_engine_that_refuses_says_why(parts: Parts) -> None:
    manifest = Manifest(MANIFEST.names, MANIFEST.dtypes, ((2, 2), *MANIFEST.shapes[1:]))
    with pytest.raises(WeightMismatchError, match="weight 'a' has shape"):
        parts.sender(parts.engines(False), manifest=manifest).send(1, UpdateOptions())


def test_a_policy_that_fails_ends_the_refit_at_once(parts: Parts) -> None:
    sender, started = parts.sender(parts.engines(False), "fail"), time.monotonic()
    with pytest.raises(EngineDiedError, match="out of memory"):
        sender.send(1, UpdateOptions())
    assert time.monotonic() - started < TIMEOUT_S


def test_a_policy_worker_that_dies_is_named(parts: Parts) -> None:
    with pytest.raises((ActorGoneError, EngineDiedError), match="policy"):
        parts.sender(parts.engines(False), "die").send(1, UpdateOptions())


def test_a_stuck_engine_is_named_with_what_it_does(parts: Parts) -> None:
    with pytest.raises(ActorTimeoutError, match=r"engine-0.*waiting for running requests to end"):
        parts.sender(parts.engines(True), timeout_s=3.0).send(1, UpdateOptions())


def test_others_get_their_weights_when_an_engine_is_dead(parts: Parts) -> None:
    engines = parts.engines(False, False)
    sender = parts.sender(engines, recover=True)
    ray.get(parts.handles["engine-0"].health.remote(), timeout=WAIT_S)
    kill(parts.handles["engine-0"])
    assert set(sender.send(1, UpdateOptions(recover=True))) == {"engine-1"}
