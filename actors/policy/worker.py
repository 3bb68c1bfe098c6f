"""One Megatron worker: a rank of the policy. Plain Python; Ray wraps it elsewhere, and tests drive it without Ray.

    plan ──read, build──► micro-batches ──► weight columns ──► passes ──► gradients, summed by DDP ──► optimizer      train
                                        └─► passes, forward only ──► log-probabilities ──put──► data plane            logprob

All ranks of a group are called together: the calls are collectives.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from actors.data_plane.interface import DataPlane
from actors.data_plane.sharding import ShardPlan
from actors.heap import freeze_heap
from actors.models.hf import check_model_dir, save_model_dir, tensor_shapes
from actors.policy import device as devices
from actors.policy.batch import BASE, MicroBatch, build
from actors.policy.cuda_graphs import capture_stream
from actors.policy.fetch import ColumnReader
from actors.policy.limits import FLAG, NON_FINITE, Limits, beyond, guard_of, tripped
from actors.policy.objectives import registry as objectives
from actors.policy.objectives.base import Objective
from actors.policy.on_device import on_device
from actors.policy.passes import Passes, reduce_reports, report_vector
from actors.refit.manifest import Manifest
from configs.policy import OptimizerConfig, PolicyConfig

_CLOSE_S = 30.0
_NO_REFERENCE = "there is no reference policy yet: call snapshot_reference first"


class PolicyWorker:
    """Rank `rank` of the policy.

    Args:
        temperature: of the rollouts: log-probabilities are those of the distribution that was sampled from.
    """

    def __init__(self, config: PolicyConfig, model_path: str, rank: int, data_plane: DataPlane, seed: int, temperature: float) -> None:
        self._config, self._model_path, self._plane = config, model_path, data_plane
        self._rank, self._seed, self._temperature = rank, seed, temperature
        self._objectives = {name: objectives.build(name, config) for name in (config.loss.objective, objectives.SUPERVISED)}
        self._reference: list[torch.Tensor] | None = None
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._device = devices.choose(config.device, rank)
        self._saver: Any = None  # built at the first save, or ahead of it

    @on_device
    def setup(self, place: str) -> dict[str, Any]:
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

        from actors.models.weight_table import export_hf, load_hf
        from actors.policy.model import build_model, takes_transformer_engine

        self._state = parallel_state
        self._hf = check_model_dir(self._model_path)
        shapes_vary = config.batching.mode == "dynamic"
        self._bare = build_model(self._hf, config.parallel, self._dtype, self._device, shapes_vary=shapes_vary, graphs=graphs)
        load_hf(self._bare, self._model_path, self._hf)
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
        self._passes = Passes(self._model, self._hf.vocab_size, config, self._device, self._temperature, thd=thd)
        self.reset_optimizer(config.optimizer)
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

    @on_device
    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Fresh moments, and the schedule from its start."""
        from actors.policy.optimizer import build_optimizer

        if self._optimizer is not None:  # its memory is free before the new one is built
            self._optimizer = self._scheduler = None
            for parameter in self._bare.parameters():
                vars(parameter).pop("main_param", None)  # Megatron's handle to the optimizer's float32 copy
            freeze_heap()  # the old one is part of cycles
        self._optimizer, self._scheduler = build_optimizer(optimizer, self._model, self._dtype, distributed=self._distributed_optimizer)

    @on_device
    def snapshot_reference(self) -> None:
        """Keep a copy of the present weights as the reference policy."""
        self._reference = [parameter.detach().clone() for parameter in self._bare.parameters()]

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
            `Objective.metrics`; grad_norm (before clipping) and lr; with policy.cuda_graph also the counts of `GraphCache` since the step
            before, so those of log-probability passes as well; on CUDA also `devices.peak_memory`.

        Raises:
            MissingColumnsError, DataPlaneError: the columns that the objective reads were not written, or cannot be read.
            FloatingPointError: without limits, the loss or a gradient is not finite; on every rank, and the weights stay as they were.
        """
        from actors.policy.optimizer import clip_and_step

        devices.reset_peak_memory(self._device)
        self._optimizer.zero_grad()
        totals = self._gradients(plan, objective)
        self._optimizer.prepare_grads()
        norm = self._optimizer.get_grad_norm()
        grad_norm = float(norm)
        metrics = self._objectives[objective].metrics(totals) | {"grad_norm": grad_norm}
        guards = beyond(metrics, limits or {})
        if not (math.isfinite(totals["loss"]) and math.isfinite(grad_norm)):
            if limits is None:
                raise FloatingPointError(f"train ({objective}): loss {totals['loss']}, gradient norm {grad_norm}; no update was made")
            guards = [NON_FINITE]
        if not guards:
            self._scheduler.step(1)
            clip_and_step(self._optimizer, norm)
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
        """The supervised loss over the plan's rows, without a gradient: loss, entropy and response_tokens as of `train`.

        Raises:
            MissingColumnsError, DataPlaneError: the token columns were not written, or cannot be read.
        """
        objective = self._objectives[objectives.SUPERVISED]
        return objective.metrics(self._totals("evaluate", objective, plan, forward_only=True))

    @on_device
    def warm_up(self, plan: ShardPlan, objective: str) -> None:
        """The passes of `train` over the plan's rows, without an update: weights, moments, schedule and random state stay."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            self._gradients(plan, objective)
            self._model.zero_grad_buffer()
            self._passes.counts()  # steps report their own

    @on_device
    def logprob(self, plan: ShardPlan, column: str, reference: bool = False) -> dict[str, float]:
        """Write the log-probabilities of the plan's response tokens as `column`: float32 [len], 0 elsewhere.

        Idempotent: the same weights give the same values under the same keys, and a repeated call overwrites them.

        Returns:
            response_tokens; on CUDA also `devices.peak_memory`.

        Raises:
            MissingColumnsError, DataPlaneError: the token columns were not written, or the data plane failed.
            RuntimeError: `reference` without a snapshot.
        """
        devices.reset_peak_memory(self._device)
        micro_batches = self._micro_batches(plan)
        if reference:
            self._swap_reference()
        try:
            results = self._passes.run("logprob", micro_batches, lambda _, out: (out.sum(), out[0]), forward_only=True)
        finally:
            if reference:
                self._swap_reference()
        if self._writes_back():
            rows: dict[int, torch.Tensor] = {}
            for micro_batch, logprobs in zip(micro_batches, results, strict=True):
                masked = torch.where(micro_batch.token_mask, logprobs, 0.0)
                rows.update(micro_batch.unpad(masked))
            self._plane.put(plan.meta, {column: [rows[row] for row in range(len(plan.meta))]}, overwrite=True)
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
    def prepare_save(self) -> None:
        """Allocate the host memory of saves, so that the first one does not wait for it. A collective; idempotent."""
        from actors.policy.state import Saver

        if self._saver is None:
            self._saver = Saver(self._bare, self._optimizer, self._device)

    @on_device
    def begin_save(self, directory: str) -> None:
        """Copy the state to host memory, and begin to write it to the directory beside training. A collective.

        Raises:
            RuntimeError: the save before is still being written.
        """
        self.prepare_save()
        self._saver.begin(self._bare, self._optimizer, self._scheduler, directory)

    def is_saving(self) -> bool:
        """Whether a save is still being written."""
        return self._saver is not None and bool(self._saver.writing())

    def save_results(self) -> tuple[list[Any], float]:
        """What `finish_save` needs of this rank's save, which is written; and the seconds of writing.

        Raises:
            CheckpointError: it could not be written.
        """
        found: tuple[list[Any], float] = self._saver.results()
        return found

    def finish_save(self, directory: str, results: list[list[Any]], weight_version: int) -> None:
        """Write the index over what all ranks wrote; to be called on rank 0. No collective."""
        self._saver.finish(directory, results, weight_version, self._hf.vocab_size)

    @on_device
    def load_state(self, directory: str, optimizer: OptimizerConfig | None) -> dict[str, Any]:
        """Go on from a saved state: weights, masters, moments, schedule and, on the same device and layout, random states. A collective.

        Args:
            optimizer: whose schedule the run goes on with; None: the present one's.

        Returns:
            weight_version, optimizer_steps, random_states (whether they were restored).

        Raises:
            CheckpointError: the state is damaged, or another model's: seen before anything is changed. Or a file could not be read.
        """
        from actors.policy import state as states

        saved = states.check(self._bare, self._optimizer, directory, self._hf.vocab_size)
        if optimizer is not None:
            self.reset_optimizer(optimizer)
        same = states.load(self._bare, self._optimizer, self._scheduler, self._device, directory, saved)
        return {"weight_version": saved.weight_version, "optimizer_steps": saved.optimizer_steps, "random_states": same}

    @on_device
    def save_reference(self, directory: str) -> None:
        """Write the reference weights. A collective.

        Raises:
            CheckpointError: they cannot be written. RuntimeError: there is no reference.
        """
        from actors.policy.state import save_reference

        if self._reference is None:
            raise RuntimeError(_NO_REFERENCE)
        save_reference(self._bare, self._optimizer, self._reference, directory)

    @on_device
    def load_reference(self, directory: str) -> None:
        """Make saved weights the reference policy. A collective.

        Raises:
            CheckpointError: they are damaged, or another model's.
        """
        from actors.policy.state import load_reference

        self._reference = load_reference(self._bare, self._optimizer, directory)

    @on_device
    def close(self) -> None:
        """Let a save be written, but not for longer than `_CLOSE_S`, and leave the process group. Idempotent."""
        if self._saver is not None:
            self._saver.close(_CLOSE_S)
        self.drop_graphs()
        devices.leave_distributed()

    def _micro_batches(self, plan: ShardPlan, columns: Sequence[str] = ()) -> list[MicroBatch]:
        return build(self._reader.read(plan.meta, (*BASE, *columns)), plan, self._device)

    def _gradients(self, plan: ShardPlan, objective: str) -> dict[str, float]:
        self._model.zero_grad_buffer()
        return self._totals("train", self._objectives[objective], plan, forward_only=False)

    def _totals(self, stage: str, objective: Objective, plan: ShardPlan, *, forward_only: bool) -> dict[str, float]:
        """The objective's passes over the plan's rows. Returns its report of the whole batch."""

        def loss(b: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            value, report = objective.loss(b, *output)
            return value, report_vector(report, objective.reported, self._device)

        micro_batches = [self._weighted(b, objective) for b in self._micro_batches(plan, objective.columns)]
        reports = self._passes.run(f"{stage} ({objective.computation})", micro_batches, loss, forward_only=forward_only)
        return reduce_reports(reports, objective.reported, self._device)

    def _weighted(self, b: MicroBatch, objective: Objective) -> MicroBatch:
        weights = objective.weights(b)
        if self._passes.graphs is None:
            return b.with_columns(weights)
        # With the columns of every objective of the run, 0 where this one has none: the same graph serves all.
        names = {name for one in self._objectives.values() for name in (*one.columns, *one.components)}
        missing = names.difference(b.columns, weights)
        return b.with_columns(weights | dict.fromkeys(missing, torch.zeros_like(b.token_mask, dtype=torch.float32)))

    def _writes_back(self) -> bool:
        # One rank of a replica: the last stage has the values, and a data-plane client as good as the leader's.
        state = self._state
        return bool(state.is_pipeline_last_stage()) and state.get_tensor_model_parallel_rank() == state.get_context_parallel_rank() == 0

    def _swap_reference(self) -> None:
        if self._reference is None:
            raise RuntimeError(_NO_REFERENCE)
        with torch.no_grad():
            for parameter, kept in zip(self._bare.parameters(), self._reference, strict=True):
                present = parameter.detach().clone()
                parameter.copy_(kept)
                kept.copy_(present)
