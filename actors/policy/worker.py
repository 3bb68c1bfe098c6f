"""One Megatron worker: a rank of the policy. Plain Python; Ray wraps it elsewhere, and tests drive it without Ray.

    plan ──read, build──► micro-batches ──► weight columns ──► passes ──► gradients, summed by DDP ──► optimizer      train
                                        └─► passes, forward only ──► log-probabilities ──put──► data plane            logprob

All ranks of a group are called together: the calls are collectives.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from actors.data_plane.interface import DataPlane
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import ShardPlan, plan_batch
from actors.models.hf import check_model_dir, save_model_dir, tensor_shapes
from actors.policy import device as devices
from actors.policy.batch import BASE, MicroBatch, build
from actors.policy.cuda_graphs import capture_stream
from actors.policy.fetch import ColumnReader
from actors.policy.limits import FLAG, NON_FINITE, SKIPPED, Limits, beyond, guard_of, tripped
from actors.policy.objectives import registry as objectives
from actors.policy.objectives.base import Objective
from actors.policy.objectives.components import EXACT_KL
from actors.policy.objectives.weighing import weigh
from actors.policy.on_device import on_device
from actors.policy.passes import Passes, as_they_are, reduce_reports, report_vector
from actors.policy.preferences import prefer
from actors.policy.reference import Teachers, columns_of, shares
from actors.policy.worker_state import NO_REFERENCE, WorkerState
from actors.refit.manifest import Manifest
from actors.rendezvous import Place
from configs.policy import PolicyConfig

_CLOSE_S = 30.0


class PolicyWorker(WorkerState):
    """Rank `rank` of the policy.

    Args:
        temperature: of the rollouts: log-probabilities are those of the distribution that was sampled from. An objective may have its own.
        teachers: directories by source, as `TeacherConfig.models`, on this machine; none: the policy has no teacher, or never asks it.
    """

    def __init__(
        self, config: PolicyConfig, model_path: str, rank: int, data_plane: DataPlane, seed: int, temperature: float,
        teachers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._config, self._model_path, self._plane = config, model_path, data_plane
        self._rank, self._seed, self._temperature = rank, seed, temperature
        self._objectives = {name: objectives.build(name, config) for name in (config.loss.objective, objectives.SUPERVISED)}
        self._entropy_control = self._objectives[config.loss.objective].entropy_control
        self._teachers = dict(teachers)
        self._device = devices.choose(config.device, rank)

    @on_device
    def setup(self, place: Place) -> dict[str, Any]:
        """Join the group, build the model, load the weights. Returns rank, device, parameters of the whole model, optimizer.

        Args:
            place: where all ranks meet, as of `rendezvous.store`.
        """
        config = self._config
        self._dtype = getattr(torch, config.dtype)
        graphs = config.cuda_graph.impl != "none" and self._device.type == "cuda"
        devices.init_distributed(self._device, config.parallel, self._rank, place, self._seed, config.timeout_s, graphs=graphs)
        self._reader = ColumnReader(self._plane, config, self._rank, self._device)
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from actors.models.weight_table import export_hf, read_hf
        from actors.policy import masters
        from actors.policy.model import build_model, takes_transformer_engine

        self._state = parallel_state
        self._hf = check_model_dir(self._model_path)
        shapes_vary = config.batching.mode == "dynamic"
        self._bare = build_model(self._hf, config.parallel, self._dtype, self._device, shapes_vary=shapes_vary, graphs=graphs)
        self._weights = functools.partial(export_hf, self._bare, self._hf)
        self._distributed_optimizer = self._device.type == "cuda"
        with capture_stream(self._device) if graphs else contextlib.nullcontext():
            self._model = DistributedDataParallel(
                self._bare.config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    overlap_grad_reduce=False,
                    use_distributed_optimizer=self._distributed_optimizer,
                    # It raises on one rank and leaves the others waiting, and cannot be captured; `train` checks on all ranks.
                    check_for_nan_in_grad=False,
                ),
                self._bare,
            )
        thd = takes_transformer_engine(self._device, self._dtype)
        self._passes = Passes(self._model, self._hf.vocab_size, config, self._device, thd=thd)
        if self._teachers:
            self._reference = Teachers(self._teachers, self._hf.vocab_size, config, self._device, thd=thd, graphs=graphs)
        if config.rounding == "stochastic":
            from actors.policy.rounding import Rounding

            self._rounding = Rounding(self._seed)
        self.reset_optimizer(config.optimizer)
        masters.fill(self._bare, self._optimizer, read_hf(self._bare, self._model_path, self._hf))
        return {
            "rank": self._rank,
            "device": str(self._device),
            "parameters": sum(map(math.prod, tensor_shapes(self._model_path).values())),
            "optimizer": "Megatron's distributed AdamW" if self._distributed_optimizer else "Megatron's AdamW",
            "cuda_graphs": "no CUDA graphs" if self._passes.graphs is None else self._passes.graphs.describe(),
        }

    def place(self) -> str:
        """What decides the bits of a result beside the settings: device, layout, instructions and threads, version of torch."""
        from actors.policy import random_states

        return f"{random_states.place(self._device)}; {devices.hardware(self._device)}; torch {torch.__version__}"

    def train_steps(self, plans: Sequence[ShardPlan], objective: str, limits: Limits | None = None) -> list[dict[str, float]]:
        """`train` on one plan after the other, up to the first that fails or is beyond a limit. No waiting for the group between two."""
        history: list[dict[str, float]] = []
        for plan in plans:
            history.append(self.train(plan, objective, limits))
            if tripped(history[-1]):
                break
        return history

    @on_device
    def train(self, plan: ShardPlan, objective: str, limits: Limits | None = None) -> dict[str, float]:
        """One optimizer step over the plan's rows. Metrics are those of the whole batch, equal on every rank.

        Args:
            objective: policy.loss.objective, or "sft".
            limits: by metric (above, below): beyond one of them, or when loss or gradient are not finite, weights, moments and schedule
                stay as they are, and `guard/NAME` is 1. None: what is not finite is an error.

        Returns:
            `Objective.metrics`; grad_norm (before clipping) and lr; in float16 loss_scale, and skipped_steps: 1 where gradients overflowed
            at it, so that there is no grad_norm, and weights, moments and schedule stay as they are; with policy.cuda_graph also the counts
            of `GraphCache` since the step before, so those of log-probability passes as well; on CUDA also `devices.peak_memory`.

        Raises:
            MissingColumnsError, DataPlaneError: the columns that the objective reads were not written, or cannot be read.
            FloatingPointError: without limits, the loss or a gradient is not finite; on every rank, and the weights stay as they were.
        """
        from actors.policy.optimizer import clip_and_step

        devices.reset_peak_memory(self._device)
        self._optimizer.zero_grad()
        scale = self._loss_scale()
        totals = self._gradients(plan, objective)
        overflow = self._optimizer.prepare_grads()  # and the loss scale follows
        norm = self._optimizer.get_grad_norm()
        grad_norm = float(norm)
        skipped = overflow and math.isfinite(totals["loss"]) and scale > self._config.loss_scale.minimum
        metrics = self._objectives[objective].metrics(totals) | ({} if skipped else {"grad_norm": grad_norm})
        if self._dtype == torch.float16:
            metrics |= {"loss_scale": scale, SKIPPED: float(skipped)}
        guards = beyond(metrics, limits or {})
        if not skipped and not (math.isfinite(totals["loss"]) and math.isfinite(grad_norm)):
            if limits is None:
                raise FloatingPointError(f"train ({objective}): loss {totals['loss']}, gradient norm {grad_norm}; no update was made")
            guards = [NON_FINITE]
        if not (guards or skipped):
            self._scheduler.step(1)
            if self._rounding is not None:
                self._rounding.count += 1
            clip_and_step(self._optimizer, norm)
            self._objectives[objective].entropy_control.see(metrics)
        metrics["lr"] = float(self._optimizer.param_groups[0]["lr"])
        if limits is not None:
            metrics |= {f"{FLAG}{name}": float(name in guards) for name in (NON_FINITE, *map(guard_of, limits))}
        return metrics | self._passes.counts() | devices.peak_memory(self._device, "train")

    def scale_rate(self, factor: float) -> None:
        """Multiply the learning rate of all further steps by this factor."""
        from actors.policy.optimizer import scale_rate

        scale_rate(self._optimizer, self._scheduler, factor)

    @on_device
    def evaluate(self, plan: ShardPlan) -> dict[str, float]:
        """The loss of objective sft, or of a run with dpo of that, over the plan's rows, without a gradient: its `metrics`.

        Raises:
            MissingColumnsError, DataPlaneError: the token columns were not written, or cannot be read.
        """
        objective = self._objectives.get(objectives.PREFERENCE, self._objectives[objectives.SUPERVISED])
        return objective.metrics(self._totals("evaluate", objective, plan, forward_only=True))

    @on_device
    def warm_up(self, plan: ShardPlan, objective: str) -> None:
        """The passes of `train` over the plan's rows, and an update that changes nothing; moments that were not there yet are, as zeros."""
        from actors.policy.optimizer import take_moments

        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            self._gradients(plan, objective)
            self._model.zero_grad_buffer()
            take_moments(self._optimizer)
            self._passes.counts()  # steps report their own

    @on_device
    def logprob(self, plan: ShardPlan, column: str, reference: bool = False) -> dict[str, float]:
        """Write the log-probabilities of the plan's response tokens as `column`: float32 [len], 0 elsewhere; and a teacher's `CANDIDATES`.

        Idempotent: the same weights give the same values under the same keys, and a repeated call overwrites them.

        Returns:
            response_tokens; on CUDA also `devices.peak_memory`.

        Raises:
            MissingColumnsError, DataPlaneError: the token columns were not written, or the data plane failed.
            RuntimeError: `reference` without a snapshot.
        """
        devices.reset_peak_memory(self._device)
        rows: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        if reference and self._reference is None:
            raise RuntimeError(NO_REFERENCE)
        with self._reference.passes() if reference and self._reference else contextlib.nullcontext({"": self._passes}) as by_source:
            for passes, part, numbers in shares(plan, by_source, self._plan):
                micro_batches = self._micro_batches(part)
                results = passes.run("logprob", micro_batches, as_they_are, forward_only=True)
                for micro_batch, values in zip(micro_batches, results, strict=True) if self._writes_back() else ():
                    for name, found in columns_of(torch.where(micro_batch.token_mask, values, 0.0), column).items():
                        rows[name] |= {numbers[row]: value for row, value in micro_batch.unpad(found)}
        if self._writes_back():
            candidates = self._reference.candidates if reference and isinstance(self._reference, Teachers) else 0
            self._plane.put(plan.meta, _of_all(rows, plan.meta, columns_of(torch.zeros(2 + 2 * candidates, 1, 1), column)), overwrite=True)
        peak = devices.peak_memory(self._device, "ref_logprob" if reference else "logprob")
        return {"response_tokens": float(plan.global_tokens)} | peak

    def drop_graphs(self) -> None:
        """Free what CUDA graphs hold. Passes that need one capture it anew."""
        if self._passes.graphs is not None:
            self._passes.graphs.clear()

    @on_device
    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """All weights under Hugging Face names, on the CPU, as copies; on rank 0 only. A collective."""
        keep = self._rank == 0
        weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in self._weights() if keep}
        return weights if keep else None

    @on_device
    def manifest(self) -> Manifest:
        """What `send_weights` sends. A collective, which gathers every weight once to see its shape."""
        return Manifest.of(self._weights())

    @on_device
    def send_weights(self, send: Callable[[Iterator[tuple[str, torch.Tensor]]], object]) -> None:
        """Give `send` all weights one by one, under Hugging Face names, as full tensors on this rank's device. Returns when they are sent.

        A collective: every rank's `send` must take all of them. Only what it keeps stays in memory.
        """
        torch.cuda.synchronize()  # `send` may use streams of its own; the optimizer's last update must be seen there
        send(self._weights())
        torch.cuda.synchronize()

    @on_device
    def call_on_device[T](self, call: Callable[[], T]) -> T:
        """The call's result, with this worker's device as the current one."""
        return call()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face directory: weights, and the source model's configuration and tokenizer. A collective."""
        weights = self.export_weights()
        if weights is not None:
            save_model_dir(Path(path), Path(self._model_path), weights, self._config.dtype)

    @on_device
    def close(self) -> None:
        """Let a save be written, but not for longer than `_CLOSE_S`, and leave the process group. Idempotent."""
        if self._saver is not None:
            self._saver.close(_CLOSE_S)
        self.drop_graphs()
        devices.leave_distributed()

    def _micro_batches(self, plan: ShardPlan, objective: Objective | None = None) -> list[MicroBatch]:
        columns = self._reader.read(plan.meta, (*BASE, *(objective.columns if objective else ())))
        if objective is not None:
            columns |= {name: list(torch.tensor(values).unbind()) for name, values in objective.row_weights(plan.meta).items()}
        temperature = self._temperature if objective is None else objective.temperature or self._temperature
        micro_batches = build(columns, plan, self._device, temperature, 1.0 if objective is None else self._loss_scale())
        if objective is None:
            return micro_batches
        others = () if self._passes.graphs is None else self._objectives.values()  # the same graph serves all of the run
        if others and isinstance(self._reference, Teachers):
            micro_batches = [b.with_room(self._reference.candidates) for b in micro_batches]
        preferred = prefer(micro_batches, plan, objective, self._passes, self._reference)
        return weigh(preferred, objective, others, self._state.get_data_parallel_group(with_context_parallel=False))

    def _loss_scale(self) -> float:
        return float(self._optimizer.get_loss_scale()) if self._dtype == torch.float16 else 1.0

    def _gradients(self, plan: ShardPlan, objective: str) -> dict[str, float]:
        self._model.zero_grad_buffer()
        return self._totals("train", self._objectives[objective], plan, forward_only=False)

    def _totals(self, stage: str, objective: Objective, plan: ShardPlan, *, forward_only: bool) -> dict[str, float]:
        """The objective's passes over the plan's rows. Returns its report of the whole batch."""

        def loss(b: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logprobs, entropies, *exact = output
            value, report = objective.loss(b.with_columns(dict(zip((EXACT_KL,), exact, strict=False))), logprobs, entropies)
            return value, report_vector(report, objective.reported, self._device)

        name, micro_batches = f"{stage} ({objective.computation})", self._micro_batches(plan, objective)
        reports = self._passes.run(name, micro_batches, loss, forward_only=forward_only)
        return reduce_reports(reports, objective.reported, self._device)

    def _plan(self, meta: KVBatchMeta) -> ShardPlan:
        """For some of this rank's rows."""
        parallel = self._config.parallel
        align, slots = parallel.row_multiple(self._device.type), parallel.sequence_multiple
        return plan_batch(meta, self._config.batching, data_parallel=1, align=align, sequence_align=slots).shards[0]

    def _writes_back(self) -> bool:
        # One rank of a replica: the last stage has the values, and a data-plane client as good as the leader's.
        state = self._state
        return bool(state.is_pipeline_last_stage()) and state.get_tensor_model_parallel_rank() == state.get_context_parallel_rank() == 0


def _of_all(
    found: Mapping[str, Mapping[int, torch.Tensor]], meta: KVBatchMeta, blank: Mapping[str, torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    """Columns of the rows in order; zeros for rows that have none. `blank`: one token of each column, [1, 1, ...]."""
    return {
        name: [
            found[name][row] if row in found[name] else one.new_zeros((length, *one.shape[2:]))
            for row, length in enumerate(meta.sequence_lengths)
        ]
        for name, one in blank.items()
    }
