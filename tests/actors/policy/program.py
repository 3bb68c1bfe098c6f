"""What each worker process of a layout runs: a list of jobs, every job on a fresh PolicyWorker. Results come back as files.

parent ── fork ──► rank 0 .. n-1 ── gloo ──► job 0, job 1, ...  (model, batch, actions) ──► {job}-{rank}.pt
"""

import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.interface import DataPlaneError
from actors.data_plane.sharding import ShardPlan, plan_batch
from actors.heap import freeze_heap
from actors.policy.batch import BASE, CANDIDATES
from actors.policy.device import PeerLostError
from actors.policy.worker import PolicyWorker
from configs.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from tests.actors.policy import processes, tiny
from tests.actors.policy.plans import plain_plan

COLUMNS = {"logprob": ("policy_logprobs",), "reference": ("reference_logprobs",), "candidates": ("reference_logprobs", *CANDIDATES)}
FIELDS = (*BASE, "generation_logprobs", "advantages", *COLUMNS["logprob"], *COLUMNS["candidates"])


def _check_only_memory_was_taken(worker: PolicyWorker, before: Sequence[torch.Tensor]) -> None:
    """Weights and masters are those of before the warm-up, and moments are there, as zeros."""
    from actors.policy import state

    assert all(torch.equal(one, other) for one, other in zip(before, worker._bare.parameters(), strict=True))
    for part in state.parts(worker._bare, worker._optimizer):
        master, *moments = (part.value(kind) for kind in state.KINDS)
        assert torch.equal(master.to(part.parameter.dtype), part.parameter.detach().reshape(-1))
        for moment in moments:
            assert moment is not None
            assert not moment.any()


@dataclass(frozen=True)
class Job:
    """One model, one batch, and the methods to call in order: "logprob", "reference", "candidates", "sft", "grpo", "export", ..."""

    name: str
    model: str
    actions: tuple[str, ...]
    vocab: int = 96
    policy: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.8
    seed: int = 5
    longest: int = 8  # response
    distributed: bool = False  # the optimizer of GPUs, whose masters and moments are split over data-parallel ranks
    directory: str = ""  # of the state that "begin_save", "finish_save", "load" and "load_again" are about; its reference is beside it


class _DistributedWorker(PolicyWorker):
    _distributed_optimizer = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]


def run_layout(parallel: ParallelConfig, jobs: Sequence[Job]) -> dict[str, list[dict[str, Any]]]:
    """Run the jobs in `parallel.world_size` processes. Returns, by job, each rank's results in order of rank."""
    with tempfile.TemporaryDirectory() as directory:
        processes.run(_rank, (parallel, list(jobs), directory), parallel.world_size)
        return {
            job.name: [torch.load(Path(directory) / f"{job.name}-{rank}.pt", weights_only=False) for rank in range(parallel.world_size)]
            for job in jobs
        }


def _rank(rank: int, parallel: ParallelConfig, jobs: list[Job], directory: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for job in jobs:
        torch.save(_run(rank, parallel, job, directory), Path(directory) / f"{job.name}-{rank}.pt")


def _run(rank: int, parallel: ParallelConfig, job: Job, directory: str) -> dict[str, Any]:
    config = PolicyConfig(parallel=parallel, timeout_s=120, **({"device": "cpu", "batching": {"micro_batch_size": 2}} | job.policy))
    meta, columns = tiny.batch(job.seed, job.vocab, longest=job.longest)
    plane = MemoryPlane()
    plane.register_partition("train", fields=FIELDS)
    if "poison" in job.actions and rank == 0:
        columns["advantages"] = [torch.tensor(float("nan"))] * len(meta)  # in this rank's plane only
    meta = plane.put(meta, columns)
    kind = _DistributedWorker if job.distributed else PolicyWorker
    teachers = config.teacher.models if config.teacher else {"": job.model} if config.loss.objective == "dpo" else {}
    worker = kind(config, job.model, rank, plane, seed=0, temperature=job.temperature, teachers=teachers)
    results: dict[str, Any] = {"setup": worker.setup(f"file://{directory}/rendezvous-{job.name}"), "metrics": []}
    data_rank = rank // (parallel.tensor * parallel.context) % parallel.data
    for action in job.actions:
        plan = _plans(meta, config)[data_rank]
        match action:
            case "logprob" | "reference" | "candidates":
                worker.logprob(plan, COLUMNS[action][0], reference=action != "logprob")
                for column in COLUMNS[action]:
                    meta, results[column] = _share(plane, meta, plan.meta, column, rank)
            case "snapshot":
                worker.snapshot_reference()
            case "sft" | "grpo" | "poison":
                try:
                    results["metrics"].append(worker.train(plan, "sft" if action == "sft" else config.loss.objective))
                except (FloatingPointError, ValueError, PeerLostError, DataPlaneError) as error:
                    results["error"] = repr(error)
            case "evaluate":
                results["metrics"].append(worker.evaluate(plan))
            case "guarded":  # a step that no limit allows
                results["metrics"].append(worker.train(plan, "sft", {"grad_norm": (0.0, None), "entropy": (None, 0.0)}))
            case "warm_up":
                random_state = torch.get_rng_state()
                before = [parameter.detach().clone() for parameter in worker._bare.parameters()]
                worker.warm_up(plan, "sft")
                assert torch.equal(random_state, torch.get_rng_state())
                _check_only_memory_was_taken(worker, before)
            case "lower":
                worker.scale_rate(0.5)
            case "reset":
                old = [weakref.ref(tensor) for tensor in optimizer_tensors(worker)]
                freeze_heap()  # as in an actor
                worker.reset_optimizer(OptimizerConfig(lr=5e-3, warmup_steps=3))
                results["freed"] = [tensor() is None for tensor in old]
            case "working":
                results["working"] = {name: value.detach().clone() for name, value in worker._bare.named_parameters()}
            case "round":  # by chance
                results["rounded"] = mean_working_copy(worker)
            case "round masters":
                worker._optimizer.reload_model_params()  # copies the working copy into them
            case "clear":
                if rank == 0:
                    plane.clear(meta)
            case "vanish":
                if rank == 1:
                    torch.save(results, Path(directory) / f"{job.name}-{rank}.pt")
                    os._exit(0)
            case "export":
                results["weights"] = worker.export_weights()
            case "begin_save":
                worker.begin_save(job.directory)
            case "finish_save":
                finish_save(worker, rank, job.directory)
            case "load" | "load_again":
                results["loaded"] = worker.load_state(job.directory, None if action == "load" else config.optimizer)
            case _ if action.startswith("refuse "):
                try:
                    worker.load_state(str(Path(job.directory, action.removeprefix("refuse "))), None)
                except CheckpointError as error:
                    results[action] = str(error)
            case "save_reference":
                worker.save_reference(f"{job.directory}-reference")
            case "load_reference":
                worker.load_reference(f"{job.directory}-reference")
            case "draw":
                results["drawn"] = torch.rand(4)
            case "state":
                results["state"] = state_of(worker)
            case "save":
                worker.save_hf(f"{job.model}-saved")
            case _:
                raise ValueError(action)
    worker.close()
    return results


ROUNDINGS = 200


def mean_working_copy(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    """Of `ROUNDINGS` working copies of the same masters: float64, by name."""
    parameters = dict(worker._bare.named_parameters())
    total = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in parameters.items()}
    for _ in range(ROUNDINGS):
        worker._rounding.count += 1
        worker._rounding.again(worker._model, worker._optimizer)
        for name, value in parameters.items():
            total[name] += value.detach()
    return {name: value / ROUNDINGS for name, value in total.items()}


def finish_save(worker: PolicyWorker, rank: int, directory: str) -> None:
    """What the group does: wait for every rank's writing, and give its results to the first."""
    deadline = time.monotonic() + 60
    while worker.is_saving():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, worker.save_results()[0])
    if rank == 0:
        worker.finish_save(directory, everyone, weight_version=7)
    torch.distributed.barrier()


def state_of(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    """Copies of this rank's masters and moments, flat, by kind and name."""
    from actors.policy.state import KINDS, parts

    found = {(kind, part.name): part.value(kind) for part in parts(worker._bare, worker._optimizer) for kind in KINDS}
    return {f"{kind}.{name}": value.clone() for (kind, name), value in found.items() if value is not None}


def optimizer_tensors(worker: PolicyWorker) -> Iterator[torch.Tensor]:
    """Moments and masters."""
    own = {id(parameter) for parameter in worker._bare.parameters()}
    for one in worker._optimizer.chained_optimizers:
        yield from (tensor for group in one.optimizer.param_groups for tensor in group["params"] if id(tensor) not in own)
        yield from (tensor for state in one.optimizer.state.values() for tensor in state.values())


def _plans(meta: Any, config: PolicyConfig) -> Sequence[ShardPlan]:
    parallel = config.parallel
    if config.batching.mode == "padded" or parallel.context > 1:
        align, slots = parallel.row_multiple(config.device), parallel.sequence_multiple
        return plan_batch(meta, config.batching, data_parallel=parallel.data, align=max(align, 8), sequence_align=slots).shards
    return plain_plan(meta, config.batching.mode, data_parallel=config.parallel.data)


def _share(plane: MemoryPlane, meta: Any, mine: Any, column: str, rank: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Every process has its own plane here: exchange the column, as the real data plane would. Also says who wrote what."""
    written: dict[str, torch.Tensor] = {}
    if plane_has(plane, mine, column):
        written = dict(zip(mine.keys, plane.get(mine, [column])[column], strict=True))
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, written)
    full: dict[str, torch.Tensor] = {}
    for part in everyone:
        assert not set(part) & set(full), "two ranks wrote the same rows"
        full |= part
    return plane.put(meta, {column: [full[key] for key in meta.keys]}, overwrite=True), full


def plane_has(plane: MemoryPlane, meta: Any, column: str) -> bool:
    """Whether the column is written for these keys in this process's plane."""
    from actors.data_plane.interface import UnknownFieldError

    try:
        plane.get(meta, [column])
    except UnknownFieldError:
        return False
    return True
