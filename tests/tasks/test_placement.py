"""Who gets which GPUs, and how weights travel between them."""

from __future__ import annotations

import pytest

from configs.base import ConfigError
from configs.loader import load
from configs.run import RunConfig
from tasks.placement import place


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
