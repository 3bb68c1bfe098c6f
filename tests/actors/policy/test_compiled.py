"""The compiled graph changes nothing but the time: the same weights and metrics as plain actor calls, on the same workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.generation.types import UpdateOptions, WeightUpdate
from actors.policy import device as devices
from actors.policy.executors import CompiledExecutor, PlainExecutor
from actors.policy.group import PolicyGroup
from actors.policy.worker_actor import OverlapError
from actors.refit.transport import RefitPlan
from actors.waiting import ActorGoneError, cause
from configs.policy import ParallelConfig, PolicyConfig
from tests.actors.policy import tiny
from tests.patience import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
LAYOUTS = {
    "DP1": ParallelConfig(),
    "DP2": ParallelConfig(data=2),
    "TP2": ParallelConfig(tensor=2),
    "PP2": ParallelConfig(pipeline=2),
    "DP2xTP2": ParallelConfig(data=2, tensor=2),
}
NAMESPACE = "compiled"
FIELDS = ("input_ids", "token_mask", "sample_mask", "generation_logprobs", "advantages", "policy_logprobs", "reference_logprobs")


def _swap_reference(actor: Any) -> None:
    worker = actor._worker
    with devices.runtime(worker._device):
        worker._reference.swap()


def _begin_anew(actor: Any, config: PolicyConfig, rank: int) -> None:
    """A worker of another layout in the same process: importing Megatron takes longer than all that the tests do with it."""
    from megatron.core import parallel_state

    from actors.policy.worker import PolicyWorker

    old = actor._worker
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    if rank < config.parallel.world_size:
        actor._worker = PolicyWorker(config, old._model_path, rank, old._plane, old._seed, old._temperature)


def _resources(_: Any = None) -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    shared = sum("/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return {"files": len(os.listdir("/proc/self/fd")), "shared": shared, "resident": pages}


class Group(PolicyGroup):
    """A group whose layout and executor can be exchanged, and whose weights can go back to where they began."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._processes = self._workers
        self._layout = ""

    def lay_out(self, layout: str) -> None:
        """Start anew with this layout, over as many of the processes as it takes."""
        if layout == self._layout:
            return
        if self._layout:
            self._executor.close()
        config = self._config.model_copy(update={"parallel": LAYOUTS[layout]})
        begun = [p.__ray_call__.remote(_begin_anew, config, rank) for rank, p in enumerate(self._processes.values())]
        ray.get(begun, timeout=WAIT_S)  # four processes import Megatron at once on two shared cores
        self._config, self._layout = config, layout
        self._workers = dict(list(self._processes.items())[: config.parallel.world_size])
        assert "compiled graph over" in self.ready()
        self.snapshot_reference()

    def begin(self, kind: str) -> None:
        """Initial weights, fresh optimizer, and the given way to call."""
        self._executor.close()
        replicas = self._executor._replicas
        if kind == "plain":
            self._executor = PlainExecutor(replicas, 60.0)
        else:
            self._executor = CompiledExecutor(replicas, 60.0)
        self._on_workers(_swap_reference)
        self._call("snapshot_reference")
        self._call("reset_optimizer", self._config.optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        """Rank 0's export."""
        exported: dict[str, torch.Tensor] = self._call("export_weights")[0]
        return exported

    def refit_version(self) -> int:
        """That the next refit would send."""
        return self._version

    def resources(self) -> list[dict[str, int]]:
        """Open files, shared mappings and resident pages of this process and of every worker."""
        return [_resources(), *self._on_workers(_resources)]

    def _on_workers(self, function: Callable[[Any], Any]) -> list[Any]:
        found: list[Any] = ray.get([worker.__ray_call__.remote(function) for worker in self._workers.values()], timeout=WAIT_S)
        return found


class Engine:
    """Takes the weights of a refit and forgets them."""

    def update_weights(self, weights: dict[str, torch.Tensor], version: int, options: UpdateOptions) -> WeightUpdate:
        return WeightUpdate(bytes=sum(tensor.nbytes for tensor in weights.values()), pause_s=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("compiled") / "model", "qwen3", tied=True)


@pytest.fixture(scope="module")
def batch(address: DataPlaneAddress) -> Any:
    plane = connect(address, timeout_s=30)
    plane.register_partition("compiled", fields=FIELDS)
    meta, columns = tiny.batch(5, 96)
    columns["policy_logprobs"] = columns["reference_logprobs"] = columns["generation_logprobs"]
    return plane.put(meta.model_copy(update={"partition_id": "compiled"}), columns)


@pytest.fixture(scope="module")
def group_of(address: DataPlaneAddress, model: Path) -> Iterator[Callable[[str], Any]]:
    """One group for all tests, laid out as each wants it."""
    config = PolicyConfig(
        parallel=LAYOUTS["DP2xTP2"],
        device="cpu",
        timeout_s=180,
        batching={"micro_batch_size": 2},
        recompute_logprobs="always",
        loss={"kl_coef": 0.1},
    )
    single = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    # Eight threads, against its nature, for the test that tries to make calls overlap.
    actor = ray.remote(num_cpus=0, max_concurrency=8)(Group)
    group = actor.remote(config, str(model), NAMESPACE, address, 30.0, 0, 0.8, [single] * config.parallel.world_size, 32, RefitPlan())

    def find(layout: str) -> Any:
        ray.get(group.lay_out.remote(layout), timeout=WAIT_S)
        return group

    yield find
    ray.kill(group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_are_bit_equal_on_both_paths(group_of: Callable[[str], Any], batch: Any, layout: str) -> None:
    group = group_of(layout)
    ray.get(group.begin.remote("plain"), timeout=WAIT_S)  # when repeated, the group has trained
    before = ray.get(group.weights.remote(), timeout=WAIT_S)
    found = {}
    for kind in ("plain", "compiled"):
        ray.get(group.begin.remote(kind), timeout=WAIT_S)
        assert all(torch.equal(before[name], tensor) for name, tensor in ray.get(group.weights.remote(), timeout=WAIT_S).items())
        history = [ray.get(group.train.remote(batch, objective), timeout=WAIT_S) for objective in ("sft",) * 5 + ("grpo",) * 5]
        assert {metrics["compiled_graph_active"] for metrics in history} == {float(kind == "compiled")}
        found[kind] = ray.get(group.weights.remote(), timeout=WAIT_S), [{n: m[n] for n in ("loss", "grad_norm")} for m in history]
    assert found["plain"][1] == found["compiled"][1]
    assert all(torch.equal(found["plain"][0][name], tensor) for name, tensor in found["compiled"][0].items())
    assert not all(torch.equal(before[name], tensor) for name, tensor in found["compiled"][0].items())


@pytest.fixture(scope="module")
def receiver() -> Iterator[str]:
    """Name of an engine to which the group sends its weights."""
    engine = ray.remote(num_cpus=0)(Engine).options(name="engine", namespace=NAMESPACE).remote()
    yield "engine"
    ray.kill(engine)


def test_a_hundred_steps_with_checkpoints_and_refits_leave_nothing_open(
    group_of: Callable[[str], Any], receiver: str, batch: Any, tmp_path: Path
) -> None:
    group = group_of("DP1")

    def steps(count: int) -> None:
        for number in range(count):
            ray.get(group.train.remote(batch, "grpo"), timeout=WAIT_S)
            if number % 10 == 0:
                ray.get(group.save_hf.remote(str(tmp_path / "hf")), timeout=WAIT_S)
                ray.get(group.refit.remote([receiver], UpdateOptions()), timeout=WAIT_S)

    steps(20)
    before = ray.get(group.resources.remote(), timeout=WAIT_S)
    steps(100)
    after = ray.get(group.resources.remote(), timeout=WAIT_S)
    for old, new in zip(before, after, strict=True):
        assert new["resident"] <= old["resident"] * 1.05, (old, new)
        assert new["files"] <= old["files"] * 1.05, (old, new)
        assert new["shared"] <= old["shared"] * 1.05, (old, new)


def test_calls_from_several_threads_never_overlap_on_a_worker(group_of: Callable[[str], Any], batch: Any) -> None:
    """A worker refuses a second call while one runs, so an overlap would be an OverlapError."""
    group = group_of("DP2")
    calls = [group.train.remote(batch, "grpo") for _ in range(6)] + [group.snapshot_reference.remote() for _ in range(6)]
    for call in calls:
        try:
            ray.get(call, timeout=WAIT_S)
        except ray.exceptions.RayTaskError as error:
            pytest.fail(f"{OverlapError.__name__}: {cause(error)}")


def test_a_group_goes_back_to_what_it_saved_while_it_trained(group_of: Callable[[str], Any], batch: Any, tmp_path: Path) -> None:
    group = group_of("DP2")
    ray.get(group.begin.remote("compiled"), timeout=WAIT_S)

    def train() -> dict[str, float]:
        metrics = ray.get(group.train.remote(batch, "grpo"), timeout=WAIT_S)
        return {name: metrics[name] for name in ("loss", "grad_norm", "lr")}

    train()
    ray.get(group.prepare_saves.remote(WAIT_S), timeout=WAIT_S)
    version = ray.get(group.refit_version.remote(), timeout=WAIT_S)
    begun = ray.get(group.begin_save.remote(str(tmp_path / "state"), WAIT_S), timeout=WAIT_S)
    assert begun["standstill_s"] > 0
    ahead = [train(), train()]
    ray.get(group.begin_save.remote(str(tmp_path / "later"), WAIT_S), timeout=WAIT_S)  # waits for the first
    assert ray.get(group.wait_for_save.remote(WAIT_S), timeout=WAIT_S) > 0
    assert ray.get(group.wait_for_save.remote(WAIT_S), timeout=WAIT_S) == 0
    loaded = ray.get(group.load_state.remote(str(tmp_path / "state"), None, WAIT_S), timeout=WAIT_S)
    assert loaded == {"weight_version": version, "optimizer_steps": 1, "random_states": True}
    assert ray.get(group.refit_version.remote(), timeout=WAIT_S) == version
    assert [train(), train()] == ahead


def test_what_the_writer_meets_is_raised_by_the_wait(group_of: Callable[[str], Any], tmp_path: Path) -> None:
    group = group_of("DP2")
    (tmp_path / "file").touch()
    ray.get(group.begin_save.remote(str(tmp_path / "file" / "state"), WAIT_S), timeout=WAIT_S)
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(group.wait_for_save.remote(WAIT_S), timeout=WAIT_S)
    assert isinstance(cause(caught.value), CheckpointError)
    assert "cannot write its part of" in str(cause(caught.value))
    ray.get(group.begin_save.remote(str(tmp_path / "state"), WAIT_S), timeout=WAIT_S)
    assert ray.get(group.wait_for_save.remote(WAIT_S), timeout=WAIT_S) > 0


def test_a_worker_killed_in_a_step_is_named_within_30_s(group_of: Callable[[str], Any], batch: Any) -> None:
    """Last in this module: the group is broken afterwards. The plain path: test_executors.py and e2e/test_actors.py."""
    group = group_of("DP2")
    ray.get(group.begin.remote("compiled"), timeout=WAIT_S)
    calls = [group.train.remote(batch, "grpo") for _ in range(500)]  # more than it can do before it dies
    ray.get(calls[0], timeout=WAIT_S)
    ray.kill(ray.get_actor("policy-worker-1", namespace=NAMESPACE))
    started = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(calls, timeout=WAIT_S)
    error = cause(caught.value)
    assert isinstance(error, ActorGoneError | devices.PeerLostError)
    assert "policy-worker-1" in str(error) or "lost contact" in str(error)
    assert time.monotonic() - started < 30
    ray.get(ray.get_actor("policy-worker-0", namespace=NAMESPACE).ping.remote(), timeout=WAIT_S)
