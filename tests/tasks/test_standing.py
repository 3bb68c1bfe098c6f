"""How a run's actors end: the policy's takes Ray's semaphores along."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray

from actors import names
from tasks.cluster import raylet
from tasks.standing import end
from tests.actors.policy.test_executors import Owner, Request, Toy
from tests.patience import WAIT_S


def semaphores() -> set[Path]:
    """Of this session's Ray."""
    return set(Path("/dev/shm").glob(f"sem.*{raylet()}-*"))


def is_there(name: str) -> bool:
    return any(one["name"] == name for one in ray.util.list_named_actors(all_namespaces=True))


class Frozen(Owner):
    """Never tears down."""

    def close(self) -> float:
        time.sleep(600)
        return 0.0


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("owner", [Owner, Frozen])
def test_what_a_compiled_graph_has_made_goes_with_its_owner(owner: type[Owner]) -> None:
    """And an owner that does not answer is ended all the same, within seconds."""
    before = semaphores()
    workers = [ray.remote(Toy).options(num_cpus=0).remote(rank) for rank in range(2)]
    options = {"name": "policy-that-ends", "namespace": "standing"}
    policy = ray.remote(owner).options(num_cpus=0, max_concurrency=2, **options).remote()
    ray.get(policy.build.remote("compiled", [{"a": workers[0], "b": workers[1]}], 60.0), timeout=WAIT_S)
    assert ray.get(policy.run.remote([Request("add", (1,))]), timeout=WAIT_S) == [[1, 2]]
    assert len(semaphores() - before) >= 20
    end({names.POLICY: policy})
    deadline = time.monotonic() + WAIT_S
    while is_there("policy-that-ends") or (owner is Owner and not semaphores() <= before):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ray.kill(ray.remote(owner).options(num_cpus=0, **options).remote())  # its name is free, although its handle is held
    for worker in workers:
        ray.kill(worker)
