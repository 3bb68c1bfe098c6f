"""Who gets which GPUs, and how weights travel between them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from configs import settings
from configs.base import ConfigError
from configs.evaluate import EvaluateConfig
from configs.loader import load
from configs.run import RunConfig
from configs.sft import SftConfig
from tasks.placement import place, place_engines, place_policy
from tests.patience import WAIT_S

GIB = 2**30


def config(*overrides: str, recipe: str = "arithmetic-cpu") -> RunConfig:
    return load(recipe, list(overrides))


@pytest.mark.parametrize(
    ("gpus", "kind", "transport", "needed"),
    [(0, "cpu", "host", 0), (1, "colocated", "ipc", 1), (2, "separate", "nccl", 2), (8, "separate", "nccl", 2)],
)
def test_auto_takes_what_is_there(gpus: int, kind: str, transport: str, needed: int) -> None:
    placement = place(config(), gpus)
    assert (placement.kind, placement.refit.transport, placement.gpus) == (kind, transport, needed)
    assert transport in placement.describe()


def test_colocated_puts_one_engine_and_one_worker_on_each_gpu() -> None:
    placement = place(config("placement=colocated", "generation.num_engines=2", "policy.parallel.data=2"), 4)
    assert placement.gpus == 2
    assert placement.engine + placement.worker == 1
    assert placement.engine > 0.5  # two engines do not fit on one GPU
    assert placement.engine + 2 * placement.worker > 1  # nor two workers beside an engine


def test_several_engines_may_share_a_single_gpu_with_the_worker() -> None:
    placement = place(config("placement=colocated", "generation.num_engines=3"), 8)
    assert (placement.kind, placement.gpus, placement.refit.transport) == ("colocated", 1, "ipc")
    assert 0.99 < 3 * placement.engine + placement.worker <= 1
    assert place(config("generation.num_engines=2"), 1).kind == "colocated"  # auto: there are no GPUs for two engines apart


def test_separate_gives_an_engine_its_tensor_parallel_gpus() -> None:
    placement = place(config("generation.tensor_parallel_size=2", "generation.num_engines=3", "policy.parallel.data=2"), 8)
    assert (placement.kind, placement.gpus, placement.engine, placement.worker) == ("separate", 8, 2.0, 1.0)
    assert placement.refit.ranks_per_engine == 2


def test_a_policy_on_the_cpu_takes_no_gpu() -> None:
    assert place(config("policy.device=cpu"), 4).kind == "cpu"


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (["placement=separate"], 1, "need 2 GPU"),
        (["placement=colocated"], 0, "need 1 GPU"),
        (["placement=colocated", "generation.num_engines=4", "policy.parallel.data=2"], 8, "make their numbers equal"),
        (["generation.num_engines=2", "policy.parallel.data=4"], 4, "need 6 GPU"),
        (["placement=colocated", "policy.device=cpu"], 1, "policy.device"),
        (["generation.refit=nccl"], 1, "generation.refit"),
        (["generation.refit=ipc"], 2, "generation.refit"),
        (["generation.refit=ipc"], 0, "generation.refit"),
        (["generation.sleep_level=1"], 2, "sleep_level"),
        (["generation.sleep_level=1"], 0, "sleep_level"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(config(*overrides), gpus)


def test_an_engine_that_generates_while_the_policy_trains_cannot_sleep() -> None:
    with pytest.raises(ConfigError, match="sleep_level"):
        place(config("generation.sleep_level=1", recipe="arithmetic-cpu-async"), 1)


def sft(*overrides: str) -> SftConfig:
    return load("sft-cpu", list(overrides), SftConfig)


def evaluation(*overrides: str) -> EvaluateConfig:
    return load("evaluate-cpu", list(overrides), EvaluateConfig)


@pytest.mark.parametrize(
    ("overrides", "gpus", "asked"),
    [
        ((), 0, (0, 0.0)),
        ((), 1, (1, 1.0)),
        (("policy.parallel.data=4",), 8, (4, 1.0)),
        (("policy.parallel.data=4", "policy.device=cpu"), 8, (0, 0.0)),
    ],
)
def test_supervised_workers_have_a_gpu_each(overrides: tuple[str, ...], gpus: int, asked: tuple[int, float]) -> None:
    placement = place_policy(sft(*overrides), gpus)
    assert (placement.gpus, placement.worker) == asked


def test_a_replay_needs_the_policys_gpus_only() -> None:
    run = config("placement=separate", "generation.num_engines=6", "policy.parallel.data=2")
    assert place_policy(run, 2).gpus == 2
    assert place_policy(config("placement=cpu"), 2).gpus == 0


@pytest.mark.parametrize(("overrides", "gpus"), [(["policy.parallel.data=4"], 3), (["policy.device=cuda"], 0)])
def test_too_few_gpus_for_the_workers_are_refused(overrides: list[str], gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"policy.parallel: .* need a GPU each, there are {gpus}"):
        place_policy(sft(*overrides), gpus)


@pytest.mark.parametrize(
    ("overrides", "gpus", "asked"),
    [
        ((), 0, (0, 0.0, 1)),
        ((), 8, (1, 1.0, 1)),
        (("baseline=old",), 2, (2, 1.0, 1)),
        (("baseline=old",), 1, (1, 0.5, 1)),
        (("baseline=old", "generation.num_engines=2"), 3, (2, 0.5, 2)),  # two on each of two
        (("baseline=old", "generation.num_engines=3"), 1, (1, 0.1666, 3)),
        (("baseline=old", "generation.num_engines=2", "generation.tensor_parallel_size=2"), 8, (8, 2.0, 2)),
        (("baseline=old", "generation.num_engines=2", "generation.tensor_parallel_size=2"), 7, (4, 2.0, 1)),
    ],
)
def test_engines_of_an_evaluation(overrides: tuple[str, ...], gpus: int, asked: tuple[int, float, int]) -> None:
    placement = place_engines(evaluation(*overrides), gpus)
    assert (placement.gpus, placement.engine, placement.engines) == asked
    assert 2 * placement.engines * placement.engine <= max(gpus, 0) or not overrides


@pytest.mark.parametrize(
    ("gib", "asked"),
    [(10, (2, 0.25, 4)), (20, (2, 0.25, 4)), (21, (2, 0.3333, 3)), (27, (2, 0.5, 2)), (41, (2, 1.0, 1))],
)
def test_as_many_engines_share_a_gpu_as_fit_its_memory(gib: int, asked: tuple[int, float, int]) -> None:
    placement = place_engines(evaluation("baseline=old", "generation.num_engines=4"), 2, gib * GIB, 80 * GIB)
    assert (placement.gpus, placement.engine, placement.engines) == asked


@pytest.mark.parametrize(
    ("overrides", "gpus", "gib"),
    [((), 1, 81), (("baseline=old",), 1, 41), (("baseline=old", "generation.tensor_parallel_size=8"), 8, 1)],
)
def test_no_room_for_an_engine_of_each_model_is_refused(overrides: tuple[str, ...], gpus: int, gib: int) -> None:
    with pytest.raises(ConfigError, match=r"does not fit .*generation\.kv_cache_gib"):
        place_engines(evaluation(*overrides), gpus, gib * GIB, 80 * GIB)


GRANTED = """
import json, sys
import ray
from tasks.placement import place_engines
from configs.evaluate import EvaluateConfig
from configs.loader import load
config = load("evaluate-cpu", sys.argv[1:], EvaluateConfig)
ray.init(
    address="local", num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
    object_store_memory=80 * 2**20,
)
placement = place_engines(config, 2)
class Engine:
    def gpus(self):
        return ray.get_gpu_ids()
engines = [ray.remote(num_cpus=0, num_gpus=placement.engine)(Engine).remote() for _ in range(2 * placement.engines)]
print(json.dumps(ray.get([engine.gpus.remote() for engine in engines], timeout=60)))
"""


def test_ray_spreads_the_engines_of_an_evaluation_over_the_gpus() -> None:
    command = [sys.executable, "-c", GRANTED, "baseline=old", "generation.num_engines=2"]
    books = settings.child_environment(CUDA_VISIBLE_DEVICES="0,1")  # Ray keeps them for GPUs that are not there, too
    said = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True, env=books).stdout
    granted = [number for numbers in json.loads(said.splitlines()[-1]) for number in numbers]
    assert sorted(granted) == ["0", "0", "1", "1"]
