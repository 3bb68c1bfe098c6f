"""The pool over real engine actors, living, killed and stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.generation import pool as pool_module
from actors.generation.engine import engine_actor_class
from actors.generation.pool import EnginePool
from actors.generation.types import EngineDiedError, NoEngineError, RequestError
from actors.refit.manifest import WeightMismatchError
from configs.rollout import GenerationConfig
from tests.actors.generation.conftest import EOS, NAMESPACE, PROMPTS, RunningEngine, build_model, request, update, weights_of
from tests.patience import WAIT_S


def test_pool_generates_and_refits(engine: RunningEngine) -> None:
    pool = EnginePool(NAMESPACE, [engine.name], timeout_s=60)
    taken = update(pool, ray.put(weights_of(engine.model(4))), 11)
    assert taken[engine.name].bytes > 0
    requests = [request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    results = pool.generate(requests)
    again = engine.generate(requests)
    # How many requests are in one pass of an asynchronous engine depends on when they come, and on that the last bits.
    assert [replace(r, logprobs=[]) for r in results] == [replace(r, logprobs=[]) for r in again]
    for one, other in zip(results, again, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert {r.weight_version_start for r in results} == {11}
    health = pool.health()[engine.name]
    assert (health.state, health.weight_version) == ("ready", 11)
    assert pool.generate([]) == []


def test_errors_of_a_living_engine_come_through_and_it_stays_in_the_pool(engine: RunningEngine) -> None:
    pool = EnginePool(NAMESPACE, [engine.name], timeout_s=60)
    with pytest.raises(RequestError):
        pool.generate([request("a", [])])
    with pytest.raises(WeightMismatchError):
        update(pool, ray.put({}), 12)
    assert pool.dead == {}
    assert len(pool.generate([request("a", PROMPTS[0])])) == 1


@pytest.fixture
def starting(ray_session: None, tmp_path: Path) -> Iterator[tuple[Any, int]]:
    """An engine that is busy with its start, so that calls wait behind it; with its process id."""
    build_model("qwen3", True, 0).save_pretrained(tmp_path)
    handle = (
        engine_actor_class()
        .options(name="engine-starting", namespace=NAMESPACE, num_cpus=1)
        .remote(GenerationConfig(), str(tmp_path), 0, EOS)
    )
    pid = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=WAIT_S)
    handle.ready.remote()
    yield handle, pid
    ray.kill(handle)


def test_a_killed_engine_is_named_at_once(starting: tuple[Any, int]) -> None:
    pool = EnginePool(NAMESPACE, ["engine-starting"], timeout_s=300)
    assert pool.health()["engine-starting"].state == "new"
    os.kill(starting[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDiedError, match="engine-starting") as caught:
        pool.generate([request("a", PROMPTS[0])])
    assert time.monotonic() - began < 30
    assert caught.value.engine == "engine-starting"
    with pytest.raises(NoEngineError, match="engine-starting"):
        pool.generate([request("a", PROMPTS[0])])


def test_a_silent_engine_is_named_at_the_deadline(starting: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE_S", 1.0)
    pool = EnginePool(NAMESPACE, ["engine-starting"], timeout_s=1)
    os.kill(starting[1], signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(EngineDiedError, match="no answer from engine-starting within 2 s"):
            pool.generate([request("a", PROMPTS[0])])
        assert time.monotonic() - began < 10
    finally:
        os.kill(starting[1], signal.SIGCONT)


def test_an_engine_that_was_never_there_is_named(ray_session: None) -> None:
    with pytest.raises(EngineDiedError, match="engine-none"):
        EnginePool(NAMESPACE, ["engine-none"], timeout_s=5).generate([request("a", PROMPTS[0])])


@pytest.fixture
def with_core(ray_session: None, tmp_path: Path) -> Iterator[tuple[int, list[psutil.Process]]]:
    """An engine with executor async: the actor's process id, and the processes that vLLM started for it, which are of its group."""
    build_model("qwen3", True, 0).save_pretrained(tmp_path)
    config = GenerationConfig(executor="async", kv_cache_gib=0.125)
    options = {"name": "engine-async", "namespace": NAMESPACE, "num_cpus": 1}
    handle = engine_actor_class().options(**options).remote(config, str(tmp_path), 0, EOS)
    ray.get(handle.ready.remote(), timeout=WAIT_S)
    pid = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=WAIT_S)
    yield pid, [process for process in psutil.process_iter() if process.pid != pid and group_of(process.pid) == pid]
    ray.kill(handle)


def group_of(pid: int) -> int | None:
    """The process's group; None when it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.slow
def test_a_killed_engine_core_fails_its_engine(with_core: tuple[int, list[psutil.Process]]) -> None:
    pool = EnginePool(NAMESPACE, ["engine-async"], timeout_s=300)
    assert len(pool.generate([request("a", PROMPTS[0])])) == 1
    max(with_core[1], key=lambda process: process.memory_info().rss).kill()
    began = time.monotonic()
    with pytest.raises(EngineDiedError, match=r"^engine-async: generate: vLLM raised EngineDeadError"):
        pool.generate([request("b", PROMPTS[0])])
    assert time.monotonic() - began < 30
    health = EnginePool(NAMESPACE, ["engine-async"], timeout_s=60).health()["engine-async"]
    assert health.state == "failed"
    assert "EngineDeadError" in health.failure


@pytest.mark.slow
def test_a_killed_actor_takes_its_engine_core_along(with_core: tuple[int, list[psutil.Process]]) -> None:
    os.kill(with_core[0], signal.SIGKILL)
    _, left = psutil.wait_procs(with_core[1], timeout=20)
    assert not left
