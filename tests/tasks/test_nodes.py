"""Which actors of a run must be on one node, and what is said when they are not. A run over several nodes: tests/e2e/test_nodes.py."""

from __future__ import annotations

import pytest

from tasks import nodes

ENGINE, WORKER = {"num_cpus": 1, "num_gpus": 0.6}, {"num_cpus": 1, "num_gpus": 0.4}


def test_each_tensor_parallel_group_and_each_engine_is_a_bundle() -> None:
    engine, worker = {"num_cpus": 1, "num_gpus": 4.0}, {"num_cpus": 1, "num_gpus": 1.0}
    found = nodes.bundles(2, engine, 8, worker, 4, together=False)
    assert found.needs == [{"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 4}, {"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 4}]
    assert (found.engines, found.workers) == ([2, 3], [0, 0, 0, 0, 1, 1, 1, 1])


def test_colocated_engines_are_in_the_bundle_of_the_workers_that_share_their_gpus() -> None:
    found = nodes.bundles(4, ENGINE, 4, WORKER, 2, together=True)
    assert found.needs == [{"CPU": 4, "GPU": 2}, {"CPU": 4, "GPU": 2}]
    assert (found.engines, found.workers) == ([0, 0, 1, 1], [0, 0, 1, 1])


@pytest.mark.parametrize("engines", [1, 3, 7])
def test_several_engines_on_one_gpu_are_one_bundle_of_one_gpu(engines: int) -> None:
    found = nodes.bundles(engines, ENGINE | {"num_gpus": 0.6 / engines}, 1, WORKER, 1, together=True)
    assert found.needs == [{"CPU": engines + 1, "GPU": pytest.approx(1, abs=1e-3)}]
    assert found.needs[0]["GPU"] <= 1


def test_without_gpus_and_without_engines() -> None:
    assert nodes.bundles(0, {}, 2, {"num_cpus": 1, "num_gpus": 0.0}, 1, together=False).needs == [{"CPU": 1}, {"CPU": 1}]


def test_on_one_node_nothing_is_asked_for(ray_session: None) -> None:
    found = nodes.reserve("test-one-node", "SPREAD", 1, ENGINE, 2, WORKER, 1, together=True)
    assert found == ([ENGINE], [WORKER, WORKER])
    assert nodes.beside_driver() == {}
    assert nodes.cpus_here() is None


def test_who_is_on_a_gpu_without_a_partner() -> None:
    assert nodes.apart({"engine-0": ["GPU-a"], "engine-1": ["GPU-b"]}, {"policy-worker-0": ["GPU-b"], "policy-worker-1": ["GPU-a"]}) == ""
    alone = nodes.apart({"engine-0": ["GPU-a"], "engine-1": ["GPU-a"]}, {"policy-worker-0": ["GPU-a"], "policy-worker-1": ["GPU-b"]})
    assert alone == "policy-worker-1 is on GPU-b"
    assert nodes.apart({"engine-0": []}, {"policy-worker-0": []}) == "engine-0 is on no GPU, policy-worker-0 is on no GPU"
