"""The pool without end: requests in, results out, over two real engines of which one is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.generation.engine import engine_actor_class
from actors.generation.pool import EnginePool
from actors.generation.types import EngineDiedError, GenerationRequest, GenerationResult, NoEngineError, RequestError
from configs.rollout import GenerationConfig
from tests.actors.generation.conftest import EOS, KINDS, NAMESPACE, PROMPTS, RunningEngine, build_model, request, update, weights_of
from tests.patience import WAIT_S


def many(count: int, max_new_tokens: int = 40) -> list[GenerationRequest]:
    return [request(str(i), PROMPTS[i % 3], temperature=1.0, seed=i, max_new_tokens=max_new_tokens) for i in range(count)]


def collect(pool: EnginePool, count: int) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    deadline = time.monotonic() + 60
    while len(results) < count and time.monotonic() < deadline:
        results += pool.collect(1.0)
    return results


def test_results_come_as_they_finish_beside_updates_in_flight(engine: RunningEngine) -> None:
    pool, requests = EnginePool(NAMESPACE, [engine.name], timeout_s=60), many(100)
    trainer = EnginePool(NAMESPACE, [engine.name], timeout_s=60)
    weights = [ray.put(weights_of(engine.model(seed))) for seed in (3, 4)]
    assert pool.collect(60.0) == []  # nothing is out
    version, met, deadline = 100, False, time.monotonic() + WAIT_S
    while not met:  # a busy machine may answer all before an update comes
        assert time.monotonic() < deadline
        first = version
        pool.submit(requests[:50])
        results: list[GenerationResult] = []
        while len(results) < 100:
            version += 1
            assert update(trainer, weights[version % 2], version, "in_flight", recompute=False)[engine.name].bytes > 0
            if version == first + 2:
                pool.submit(requests[50:])
            results += pool.collect(0.01)
        assert sorted(r.request_id for r in results) == sorted(r.request_id for r in requests)
        assert pool.collect(0.0) == []
        met = any(len(r.weight_segments) > 1 for r in results)


def test_a_refused_submission_leaves_nothing_running(engine: RunningEngine) -> None:
    pool = EnginePool(NAMESPACE, [engine.name], timeout_s=60)
    with pytest.raises(RequestError, match="'bad': the prompt is empty"):
        pool.submit([*many(4), request("bad", [])])
    assert pool.collect(1.0) == []
    pool.submit(many(4, max_new_tokens=3))
    with pytest.raises(RequestError, match="'0' occurs twice, or is running"):
        pool.submit(many(1))
    assert len(collect(pool, 4)) == 4


def test_an_id_may_be_used_again_after_an_abort(engine: RunningEngine) -> None:
    pool = EnginePool(NAMESPACE, [engine.name], timeout_s=60)
    for wait_s in (0.0, 0.05, 0.3):  # while they run, and when they have ended and their results are on their way
        pool.submit([request(str(i), PROMPTS[0], max_new_tokens=1 + i % 40) for i in range(40)])
        time.sleep(wait_s)
        pool.abort([str(i) for i in range(40)])
        assert pool.collect(0.0) == []
        pool.submit([request(str(i), PROMPTS[1], max_new_tokens=1) for i in range(40)])
        results = collect(pool, 40)
        assert sorted(int(r.request_id) for r in results) == list(range(40))
        assert {len(r.token_ids) for r in results} == {1}
        assert {r.token_ids[0] for r in results} == {results[0].token_ids[0]}


@pytest.fixture
def second(engine: RunningEngine, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """An engine beside the session's, with its process id."""
    build_model("qwen3", True, 0).save_pretrained(tmp_path)
    config = GenerationConfig(kv_cache_gib=0.125, max_num_seqs=8)
    handle: Any = engine_actor_class().options(name="engine-second", namespace=NAMESPACE, num_cpus=1).remote(config, str(tmp_path), 0, EOS)
    ray.get(handle.ready.remote(), timeout=WAIT_S)
    yield "engine-second", ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=WAIT_S)
    ray.kill(handle)


@pytest.mark.parametrize("engine", KINDS[:1], indirect=True)  # one pair of engines is enough
def test_a_killed_engine_s_requests_start_again_at_the_living_one(engine: RunningEngine, second: tuple[str, int]) -> None:
    name, pid = second
    pool, requests = EnginePool(NAMESPACE, [engine.name, name], timeout_s=60, recover=True), many(200)
    trainer = EnginePool(NAMESPACE, [engine.name, name], timeout_s=60, recover=True)
    weights = ray.put(weights_of(engine.model(3)))
    assert set(update(trainer, weights, 1)) == {engine.name, name}
    expected = {r.request_id: r.token_ids for r in engine.generate(requests)}
    pool.submit(requests)
    results = pool.collect(5.0)
    os.kill(pid, signal.SIGKILL)
    results += collect(pool, len(requests) - len(results))
    assert sorted(r.request_id for r in results) == sorted(expected)
    assert {r.request_id: r.token_ids for r in results} == expected  # the seed is the request's own, so the answer does not change
    assert set(pool.dead) == {name}
    assert "engine-second died" in pool.dead[name]

    # Those who have not heard of it yet go on without it, too.
    assert set(update(trainer, weights, 2)) == {engine.name}
    fresh = EnginePool(NAMESPACE, [name, engine.name], timeout_s=60, recover=True)
    assert [r.token_ids for r in fresh.generate(requests[:8])] == [expected[str(i)] for i in range(8)]

    alone = EnginePool(NAMESPACE, [name], timeout_s=60, recover=True)
    with pytest.raises(NoEngineError, match="no engine is alive: engine-second") as caught:
        alone.submit(requests[:2])
    assert caught.value.request_ids == ("0", "1")
    strict = EnginePool(NAMESPACE, [engine.name, name], timeout_s=60)
    with pytest.raises(EngineDiedError, match="engine-second") as died:
        strict.submit(requests[:2])
    assert died.value.request_ids == ("1",)
    assert [r.request_id for r in collect(strict, 1)] == ["0"]
