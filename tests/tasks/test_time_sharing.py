"""A GPU that engines and policy share: engines sleep before the policy warms up, and wake when it has given back what its passes cached."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from prefect.logging import disable_run_logger

from actors import names
from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.meta import KVBatchMeta
from actors.generation.types import UpdateOptions, WeightUpdate
from actors.node import own_id
from actors.policy import group
from actors.policy.executors import Request
from actors.refit.transport import RefitPlan
from actors.rollout.collector import Collector
from configs.loader import load
from configs.policy import PolicyConfig
from tasks.launch import _Starting
from tasks.warm_start import warm_start
from tests.patience import WAIT_S


class Recording:
    """A worker, an engine or a group that only says what was asked of it, and when."""

    def __init__(self, *_: Any) -> None:
        self._said: list[tuple[str, float]] = []

    def said(self) -> list[tuple[str, float]]:
        return self._said

    def execute(self, packed: bytes) -> bytes:
        def run(request: Request) -> None:
            self._note(request.method)

        return Request.answer(packed, run)

    def node_id(self) -> str:
        return own_id()

    def announce(self) -> str:
        return "nobody meets"

    def setup(self, place: str) -> dict[str, Any]:
        self._note("setup")
        return {"device": "stub", "parameters": 0, "optimizer": "stub", "cuda_graphs": place}

    def release_memory(self) -> None:
        self._note("release_memory")

    def ready(self) -> None:
        self._note("ready")

    def sleep(self, keep_weights: bool) -> None:
        self._note(f"sleep, weights kept: {keep_weights}")
        time.sleep(0.05)

    def warm_up(self) -> str:
        self._note("warm_up")
        return "warm-up: train 1.0 s"

    def sleep_engines(self) -> None:
        self._note("sleep_engines")

    def supervised(self, step: int) -> KVBatchMeta:
        self._note(f"batch {step}")
        return KVBatchMeta(partition_id="sft", keys=(), sequence_lengths=(), tags=())

    def clear(self, _: KVBatchMeta) -> None:
        self._note("clear")

    def train(self, _: KVBatchMeta, objective: str) -> dict[str, float]:
        return {"loss": 1.0}

    def _note(self, what: str) -> None:
        self._said.append((what, time.monotonic()))


class Sync:
    """Sends nothing."""

    def __init__(self) -> None:
        self.began = 0.0

    def send(self, version: int, options: UpdateOptions) -> dict[str, WeightUpdate]:
        self.began = time.monotonic()
        return {"engine": WeightUpdate(bytes=0, pause_s=0.0)}


class OpenPlane(MemoryPlane):
    def close(self) -> None:
        """Nothing is open."""


def made_group(monkeypatch: pytest.MonkeyPatch, namespace: str, *, engines_sleep: bool) -> group.PolicyGroup:
    monkeypatch.setattr(group, "PolicyWorkerActor", Recording)
    monkeypatch.setattr(group, "connect", lambda *_, **__: OpenPlane())
    config = PolicyConfig(device="cpu", compiled_graph={"enabled": False}, batching={"micro_batch_size": 2})
    plan, nowhere = RefitPlan(engines_sleep=engines_sleep), cast("Any", None)
    return group.PolicyGroup(config, "model", namespace, nowhere, 30.0, 0, 1.0, [{"num_cpus": 0}], 16, plan)


@pytest.mark.usefixtures("ray_session")
def test_a_policy_beside_engines_that_sleep_waits_with_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made_group(monkeypatch, "time-sharing", engines_sleep=True)
    (worker,) = one._workers.values()

    def said() -> list[str]:
        return [what for what, _ in ray.get(worker.said.remote(), timeout=WAIT_S)]

    assert "warm-up" not in one.ready()
    assert said() == ["setup"]
    assert one.warm_up().startswith("warm-up: train ")
    assert said() == ["setup", "warm_up", "release_memory", "ready"]
    one._weight_sync = sync = Sync()  # type: ignore[assignment]
    one.refit(["engine"], UpdateOptions())
    what, when = ray.get(worker.said.remote(), timeout=WAIT_S)[-1]
    assert (what, when < sync.began) == ("release_memory", True)
    ray.kill(worker)


@pytest.mark.usefixtures("ray_session")
def test_a_policy_beside_engines_that_stay_awake_keeps_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made_group(monkeypatch, "time-apart", engines_sleep=False)
    (worker,) = one._workers.values()
    assert "; warm-up: train " in one.ready()
    one._weight_sync = Sync()  # type: ignore[assignment]
    one.refit(["engine"], UpdateOptions())
    said = [what for what, _ in ray.get(worker.said.remote(), timeout=WAIT_S)]
    assert said == ["setup", "warm_up", "release_memory", "ready"]
    ray.kill(worker)


@pytest.mark.usefixtures("ray_session")
def test_engines_are_asleep_when_the_policy_warms_up() -> None:
    config = load("arithmetic-cpu", ["placement=colocated", "generation.sleep_level=2", "generation.num_engines=2"])
    starting = _Starting("launching", config, {})
    remote = ray.remote(num_cpus=0)(Recording)
    starting.handles = {name: remote.remote() for name in (*names.engines(2), names.ENVIRONMENT, names.POLICY)}
    starting.ready = {names.POLICY: "2 workers"}
    starting.warm_up()
    assert starting.ready == {names.POLICY: "2 workers; warm-up: train 1.0 s"}
    said = {name: ray.get(handle.said.remote(), timeout=WAIT_S) for name, handle in starting.handles.items()}
    assert said[names.ENVIRONMENT] == []
    ((_, began),) = said[names.POLICY]
    for name in names.engines(2):
        ((what, when),) = said[name]
        assert what == "sleep, weights kept: True"
        assert when + 0.05 <= began
    for handle in starting.handles.values():
        ray.kill(handle)


@pytest.mark.usefixtures("ray_session")
def test_engines_sleep_through_the_supervised_steps_before_grpo() -> None:
    remote = ray.remote(num_cpus=0)(Recording)
    collector, policy = (remote.options(name=name, namespace="warming").remote() for name in (names.COLLECTOR, names.POLICY))
    with disable_run_logger():
        assert warm_start.fn("warming", 3, 4, WAIT_S) == [{"loss": 1.0}] * 2
    said = [what for what, _ in ray.get(collector.said.remote(), timeout=WAIT_S)]
    assert said == ["sleep_engines", "batch 3", "clear", "batch 4", "clear"]
    for handle in (collector, policy):
        ray.kill(handle)


@pytest.mark.parametrize(("level", "said"), [(0, []), (1, ["sleep"]), (2, ["sleep"])])
def test_only_engines_that_may_sleep_are_asked_to(level: int, said: list[str]) -> None:
    asked: list[str] = []
    config = load("arithmetic-cpu", ["placement=colocated", f"generation.sleep_level={level}"])
    collector = SimpleNamespace(_config=config, _pool=SimpleNamespace(sleep=lambda: asked.append("sleep")))
    Collector.sleep_engines(cast("Any", collector))
    assert asked == said
