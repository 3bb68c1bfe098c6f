"""Both ways to call the workers give the same results and the same errors, and leave the workers usable."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.policy.executors import CompiledExecutor, PlainExecutor, Request, build_executor
from actors.waiting import ActorGoneError, ActorTimeoutError
from configs import settings
from configs.compiled_graph import CompiledGraphConfig
from tests.patience import WAIT_S

pytestmark = pytest.mark.usefixtures("ray_session")


class Toy:
    """A worker whose method is in the request."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def execute(self, packed: bytes) -> bytes:
        self.calls += 1
        return Request.answer(packed, self._run)

    def _run(self, request: Request) -> Any:
        match request.method:
            case "add":
                return self.rank + sum(request.arguments)
            case "fail":
                raise KeyError(f"rank {self.rank} has no column")
            case "sleep":
                time.sleep(request.arguments[0])
                return None
            case "late":  # rank 0 fails at once, the others work for as long as is said
                if self.rank == 0:
                    raise TimeoutError("the data plane is silent")
                time.sleep(request.arguments[0])
                return None
            case "die":
                if self.rank == request.arguments[0]:
                    os._exit(1)
                time.sleep(0.1)
        return None

    def ping(self) -> int:
        return self.calls

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def cpu_s(self) -> float:
        return time.process_time()


class Owner:
    """Holds an executor in a process of its own, as PolicyGroup does."""

    executor: Any = None

    def build(self, kind: str, replicas: list[dict[str, Any]], timeout_s: float) -> None:
        if kind == "plain":
            self.executor = PlainExecutor(replicas, timeout_s)
        else:
            self.executor = CompiledExecutor(replicas, timeout_s)

    def answer_within(self, timeout_s: float) -> None:
        self.executor._timeout_s = timeout_s

    def run(self, requests: list[Request]) -> Any:
        return self.executor.run(requests)

    def sleep_while_waiting(self) -> None:
        if self.executor.compiled:
            self.executor.wait_by(spinning=False)

    def close(self) -> float:
        started = time.monotonic()
        if self.executor is not None:
            self.executor.close()
            self.executor.close()
        return time.monotonic() - started

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def cpu_s(self) -> float:
        return time.process_time()


@pytest.fixture(scope="module")
def cast() -> Iterator[tuple[Any, list[Any]]]:
    """An owner and four workers for all tests: starting an actor takes longer than a test."""
    owner = ray.remote(num_cpus=0)(Owner).remote()
    toys = [ray.remote(num_cpus=0)(Toy).remote(rank) for rank in range(4)]
    ray.get([actor.__ray_ready__.remote() for actor in (owner, *toys)], timeout=WAIT_S)
    yield owner, toys
    for actor in (owner, *toys):
        ray.kill(actor)


@pytest.fixture(params=["plain", "compiled"])
def make(request: pytest.FixtureRequest, cast: tuple[Any, list[Any]]) -> Iterator[Any]:
    owner, toys = cast

    def build(replicas: int, ranks: int, last: Any = None) -> tuple[Any, list[dict[str, Any]]]:
        workers = [*toys[: replicas * ranks - 1], last or toys[replicas * ranks - 1]]
        layout = [{f"worker-{r}-{i}": workers[r * ranks + i] for i in range(ranks)} for r in range(replicas)]
        ray.get(owner.build.remote(request.param, layout, WAIT_S), timeout=WAIT_S)
        return owner, layout

    yield build
    ray.get(owner.close.remote(), timeout=WAIT_S)


def run(owner: Any, *requests: Request) -> Any:
    return ray.get(owner.run.remote(list(requests)), timeout=WAIT_S)


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (1, 3), (2, 2)])
def test_each_replica_gets_its_request_and_results_come_in_order(make: Any, replicas: int, ranks: int) -> None:
    owner, _ = make(replicas, ranks)
    for number in range(5):
        results = run(owner, *(Request("add", (number, 100 * r)) for r in range(replicas)))
        assert results == [[r * ranks + i + number + 100 * r for i in range(ranks)] for r in range(replicas)]


def test_a_workers_error_comes_through_as_it_was_and_the_next_call_works(make: Any) -> None:
    owner, _ = make(2, 1)
    for _ in range(2):
        with pytest.raises(KeyError, match="rank 1 has no column"):
            run(owner, Request("add", (1,)), Request("fail"))
        assert run(owner, Request("add", (1,)), Request("add", (1,))) == [[1], [2]]


def test_a_replica_that_fails_alone_leaves_the_graphs_to_the_next_try(make: Any) -> None:
    """The other works on for longer than what is granted where replicas wait for each other."""
    owner, _ = make(2, 1)
    with pytest.raises(TimeoutError, match="the data plane is silent"):
        run(owner, *[Request("late", (6.0,), apart=True)] * 2)
    assert run(owner, *[Request("add", (10,), apart=True)] * 2) == [[10], [11]]


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 2), (2, 1)])
def test_a_death_in_a_call_is_named_and_the_others_live(make: Any, replicas: int, ranks: int) -> None:
    mortal = ray.remote(num_cpus=0)(Toy).remote(1)
    ray.get(mortal.ping.remote(), timeout=WAIT_S)
    owner, layout = make(replicas, ranks, last=mortal)
    run(owner, *[Request("add", (1,))] * replicas)
    started = time.monotonic()
    with pytest.raises(ActorGoneError, match=f"worker-{replicas - 1}-{ranks - 1} died"):
        run(owner, *[Request("die", (1,))] * replicas)
    assert time.monotonic() - started < 30
    assert ray.get(layout[0]["worker-0-0"].ping.remote(), timeout=WAIT_S) > 0
    with pytest.raises(ActorGoneError):
        run(owner, *[Request("add", (1,))] * replicas)


def test_a_silent_worker_is_named_after_the_deadline(make: Any) -> None:
    owner, _ = make(1, 1)
    ray.get(owner.answer_within.remote(1.0), timeout=WAIT_S)  # to build it may take longer on a busy machine
    with pytest.raises(ActorTimeoutError, match=r"sleep: no answer from worker-0-0 within 1 s"):
        run(owner, Request("sleep", (2.0,)))


def test_closing_twice_is_quick_and_the_workers_take_ordinary_calls(make: Any) -> None:
    owner, layout = make(2, 2)
    run(owner, Request("add"), Request("add"))
    assert ray.get(owner.close.remote(), timeout=WAIT_S) < 10
    for workers in layout:
        assert all(ray.get([worker.ping.remote() for worker in workers.values()], timeout=WAIT_S))


def test_a_hundred_calls_leave_no_file_open(make: Any) -> None:
    owner, layout = make(1, 2)
    for number in range(10):
        run(owner, Request("add", (number,)))
    watched = [owner, *layout[0].values()]
    before = ray.get([actor.open_files.remote() for actor in watched])
    for number in range(100):
        run(owner, Request("add", (number,)))
        ray.get(layout[0]["worker-0-1"].ping.remote())
    after = ray.get([actor.open_files.remote() for actor in watched])
    assert all(b <= a * 1.05 + 2 for a, b in zip(before, after, strict=True)), (before, after)


class Uncompilable:
    """No `execute`: a graph cannot be built over it."""


def test_the_fall_back_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ray.remote(num_cpus=0)(Uncompilable).remote()
    executor, line = build_executor([{"worker-0-0": worker}], WAIT_S, CompiledGraphConfig())
    assert not executor.compiled
    assert line.startswith("WARNING: plain actor calls, compiling the graph failed: AttributeError")
    executor, line = build_executor([{"worker-0-0": worker}], WAIT_S, CompiledGraphConfig(enabled=False))
    assert not executor.compiled
    assert "policy.compiled_graph.enabled is false" in line
    for cores, begins in (
        (7, "plain actor calls (between nodes a compiled graph takes a core per process, and there are 7)"),
        (8, "WARNING"),
    ):
        monkeypatch.setattr(settings, "cpu_count", lambda cores=cores: cores)
        executor, line = build_executor([{"worker-0-0": worker}], WAIT_S, CompiledGraphConfig(), one_node=False)
        assert not executor.compiled
        assert line.startswith(begins)
    ray.kill(worker)


def test_who_waits_leaves_the_cores_to_others(make: Any) -> None:
    owner, layout = make(1, 1)
    worker = layout[0]["worker-0-0"]
    ray.get(owner.sleep_while_waiting.remote(), timeout=WAIT_S)  # whatever the cores of this machine
    run(owner, Request("add"))

    def cpu() -> list[float]:
        return ray.get([owner.cpu_s.remote(), worker.cpu_s.remote()], timeout=WAIT_S)

    before = cpu()
    run(owner, Request("sleep", (2.0,)))  # the owner waits
    between = cpu()
    time.sleep(2.0)  # the worker waits
    after = cpu()
    assert between[0] - before[0] < 1.0  # Ray's own loop takes 2.0
    assert after[1] - between[1] < 1.0
