"""Engines that die or hang come back with the run's weights, and not before: pools over actors that Ray starts again, without vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.generation import pool as pool_module
from actors.generation import supervision
from actors.generation.pool import EnginePool
from actors.generation.types import EngineNotReadyError, GenerationRequest, GenerationResult, NoEngineError, UpdateOptions
from tests.actors.generation.conftest import request
from tests.actors.generation.returning import NAMESPACE, WEIGHTS, Engines
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow
OPTIONS = UpdateOptions(recover=True)


@pytest.fixture
def engines(ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    monkeypatch.setattr(pool_module, "GRACE_S", 1.0)
    monkeypatch.setattr(supervision, "ENGINE_HEALTH_S", 3.0)
    made = Engines(tmp_path)
    yield made
    made.end()


def pool(names: list[str], timeout_s: float = WAIT_S, **more: Any) -> EnginePool:
    return EnginePool(NAMESPACE, names, timeout_s=timeout_s, recover=True, **({"restart_s": WAIT_S, "return_s": WAIT_S} | more))


def refit(trainer: EnginePool, version: int) -> set[str]:
    return set(trainer.end_update(trainer.begin_update(ray.put(WEIGHTS), version, OPTIONS), version))


def many(count: int, tokens: int = 4) -> list[GenerationRequest]:
    return [request(str(i), [1], max_new_tokens=tokens, seed=i) for i in range(count)]


def collect(client: EnginePool, count: int) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    deadline = time.monotonic() + WAIT_S
    while len(results) < count:
        assert time.monotonic() < deadline, (client.alive, client.returning)
        results += client.collect(0.5)
    return results


def wait_until(client: EnginePool, alive: list[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while client.alive != alive:
        assert time.monotonic() < deadline, (client.alive, client.returning)
        client.collect(0.1)
        time.sleep(0.05)


def stale(client: EnginePool, names: list[str]) -> None:
    """Wait until these are up, without weights."""
    deadline = time.monotonic() + WAIT_S
    assert client._supervisor is not None
    while client._supervisor.fleet.stale != names:
        assert time.monotonic() < deadline
        client.collect(0.1)
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_engine_s_requests_go_on_elsewhere_and_it_comes_back_with_weights(engines: Engines, how: signal.Signals) -> None:
    names = engines.start(2)
    client, trainer = pool(names, timeout_s=5.0), pool(names)  # of a busy machine: the other one answers in time
    assert refit(trainer, 1) == set(names)
    client.submit(many(20, tokens=10))
    os.kill(engines.pids()["engine-1"], how)
    results = collect(client, 20)
    assert sorted(int(r.request_id) for r in results) == list(range(20))
    assert {r.token_ids[0] for r in results} == {1}
    assert client.alive == ["engine-0"]

    stale(client, ["engine-1"])
    handle = ray.get_actor("engine-1", namespace=NAMESPACE)
    with pytest.raises(EngineNotReadyError, match="waits for the run's weights"):
        ray.get(handle.submit.remote("anyone", many(1)), timeout=WAIT_S)
    assert {r.token_ids[0] for r in client.generate(many(8))} == {1}
    assert client.alive == ["engine-0"]

    assert refit(trainer, 2) == set(names)
    wait_until(client, names)
    assert {r.token_ids[0] for r in client.generate(many(20))} == {2}
    changes, _ = client.news()
    assert [(change.engine, change.standing) for change in changes] == [("engine-1", "dead"), ("engine-1", "healthy")]
    assert client.restarts == 1


def test_an_engine_that_dies_while_it_loads_is_left_out_and_comes_back_with_the_next_weights(engines: Engines) -> None:
    names = engines.start(2)
    client, trainer = pool(names), pool(names)
    dies = engines.tell("engine-0", "dies")
    assert refit(trainer, 1) == {"engine-1"}
    dies.unlink()
    assert {r.token_ids[0] for r in client.generate(many(10))} == {1}  # the client finds out by its own calls
    stale(client, ["engine-0"])
    assert refit(trainer, 2) == set(names)
    wait_until(client, names)


def test_requests_wait_when_all_are_lost_until_the_policy_gives_weights(engines: Engines) -> None:
    names = engines.start(2)
    trainer = pool(names)
    remote: Any = ray.remote(num_cpus=0)
    asked = []

    def ask() -> Any:
        asked.append(trainer.begin_update(ray.put(WEIGHTS), 7, OPTIONS))
        return remote(lambda: None).remote()

    client = pool(names, refit=ask)
    refit(trainer, 6)
    client.submit(many(10, tokens=40))
    for pid in engines.pids().values():
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    client.submit([request("later", [1], max_new_tokens=1)])
    results = collect(client, 11)
    assert sorted(r.request_id for r in results) == sorted([*map(str, range(10)), "later"])
    assert {r.token_ids[0] for r in results} == {7}
    assert asked


def test_a_refit_waits_for_an_engine_that_is_starting(engines: Engines) -> None:
    names = engines.start(1)
    trainer = pool(names)
    assert refit(trainer, 1) == set(names)
    os.kill(engines.pids()["engine-0"], signal.SIGKILL)
    assert refit(trainer, 2) == set(names)
    assert pool(names).generate(many(1))[0].token_ids == [2]


def test_an_engine_out_of_restarts_is_given_up_by_name(engines: Engines) -> None:
    names = engines.start(2, restarts=0)
    client, trainer, pids = pool(names), pool(names), engines.pids()
    os.kill(pids["engine-1"], signal.SIGKILL)
    assert len(client.generate(many(8))) == 8
    assert refit(trainer, 1) == {"engine-0"}
    assert {change.standing: change.engine for change in client.news()[0]} == {"dead": "engine-1", "given_up": "engine-1"}
    os.kill(pids["engine-0"], signal.SIGKILL)
    with pytest.raises(NoEngineError, match=r"engine-1 died.*engine-0 died"):
        client.generate(many(2))
    with pytest.raises(NoEngineError, match="engine-1"):
        refit(trainer, 2)


def test_requests_wait_no_longer_than_told(engines: Engines) -> None:
    names = engines.start(1)
    client = pool(names, return_s=1.0)
    engines.tell("engine-0", "held")
    client.submit(many(2, tokens=1000))
    os.kill(engines.pids()["engine-0"], signal.SIGKILL)
    with pytest.raises(NoEngineError, match="engine-0"):
        collect(client, 2)


def test_an_engine_that_cannot_start_is_tried_again(engines: Engines) -> None:
    names = engines.start(2)
    client, trainer = pool(names), pool(names)
    broken = engines.tell("engine-1", "broken")
    os.kill(engines.pids()["engine-1"], signal.SIGKILL)
    assert len(client.generate(many(8))) == 8
    deadline = time.monotonic() + WAIT_S
    while client.restarts < 2:
        assert time.monotonic() < deadline
        client.collect(0.1)
        time.sleep(0.05)
    broken.unlink()
    stale(client, ["engine-1"])
    assert refit(trainer, 1) == set(names)
    wait_until(client, names)


def test_an_engine_that_restarted_unseen_has_lost_its_requests(engines: Engines) -> None:
    names = engines.start(1)
    client, trainer = pool(names), pool(names)
    refit(trainer, 1)
    client.submit(many(3, tokens=20))
    os.kill(engines.pids()["engine-0"], signal.SIGKILL)
    refit(trainer, 2)  # the client asks for nothing meanwhile
    client.submit([request("later", [1], max_new_tokens=1)])
    results = collect(client, 4)
    assert sorted(r.request_id for r in results) == ["0", "1", "2", "later"]
    assert {r.token_ids[0] for r in results} == {2}
