"""One Megatron worker: a rank of the policy. Plain Python; Ray wraps it elsewhere, and tests drive it without Ray.

    plan ──read, build──► micro-batches ──► forward_backward_func ──► DDP sums gradients ──► optimizer      train
                                        └─► forward only ──► log-probabilities ──put──► data plane        logprob

With policy.cuda_graph, the schedule runs one micro-batch at a time, and cuda_graphs.py replays what it launched.

The last pipeline stage's output is not logits but [2, B, T]: each token's log-probability, and its distribution's entropy.
Losses get it per sequence, [2, S, L], whatever the layout of the micro-batch (batch.py).

All ranks of a group are called together: the calls are collectives.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal

import torch

from actors.data_plane.interface import DataPlane
from actors.data_plane.sharding import ShardPlan
from actors.models.hf import check_model_dir, parameter_count, save_model_dir
from actors.policy import batch as batches
from actors.policy import device as devices
from actors.policy.batch import MicroBatch
from actors.policy.boundaries import packed_inputs, rows_as_slots, takes_thd
from actors.policy.columns import BASE, train_columns
from actors.policy.context import ContextPart, context_part, whole_rows
from actors.policy.cuda_graphs import GraphCache, Outputs, capture_stream
from actors.policy.fetch import ColumnReader
from actors.policy.logprob import VocabShard, label_logprobs, token_logprobs
from actors.policy.loss import Sums, grpo_loss, logprob_error, masked_sum, sft_loss
from actors.policy.step_metrics import reduce_tallies, step_metrics, tally
from actors.refit.manifest import Manifest
from configs.policy import OptimizerConfig, PolicyConfig

# On the last pipeline stage: (micro-batch, [2, S, L]) -> (loss, what the step keeps of it).
LossFunction = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Outputs]]


def _on_device[**P, R](method: Callable[Concatenate[PolicyWorker, P], R]) -> Callable[Concatenate[PolicyWorker, P], R]:
    """Run the method inside the device's runtime (the CPU shim, or CUDA's current device), on whichever thread it is called.

    Raises:
        PeerLostError: a collective inside it failed.
    """

    @functools.wraps(method)
    def call(self: PolicyWorker, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with devices.runtime(self._device):
                return method(self, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, devices.PeerLostError) or not devices.is_collective_failure(error):
                raise
            raise devices.PeerLostError(
                f"{method.__name__}: policy worker {self._rank} of {self._config.parallel.world_size} lost contact with another, "
                f"or waited longer than policy.timeout_s = {self._config.timeout_s:g} s for it ({str(error).splitlines()[0]})"
            ) from error

    return call  # type: ignore[return-value]


class PolicyWorker:
    """Rank `rank` of the policy.

    Args:
        init_method: rendezvous of all ranks (tcp://host:port or file://...).
        data_plane: where the columns are.
        temperature: of the rollouts: log-probabilities are those of the distribution that was sampled from.
    """

    def __init__(
        self, config: PolicyConfig, model_path: str, rank: int, init_method: str, data_plane: DataPlane, seed: int, temperature: float
    ) -> None:
        self._config, self._model_path, self._plane = config, model_path, data_plane
        self._rank, self._init_method, self._seed, self._temperature = rank, init_method, seed, temperature
        self._reference: list[torch.Tensor] | None = None
        self._graphs: GraphCache | None = None
        self._device = devices.choose(config.device, rank)

    @_on_device
    def setup(self) -> dict[str, Any]:
        """Join the group, build the model, load the weights. Returns rank, device, parameters of the whole model, optimizer."""
        config = self._config
        self._dtype = getattr(torch, config.dtype)
        graphs = config.cuda_graph.impl != "none" and self._device.type == "cuda"
        devices.init_distributed(self._device, config.parallel, self._rank, self._init_method, self._seed, config.timeout_s, graphs=graphs)
        self._reader = ColumnReader(self._plane, config, self._rank, self._device)
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from actors.models.weight_table import load_hf
        from actors.policy.model import build_model

        self._state = parallel_state
        self._hf = check_model_dir(self._model_path)
        shapes_vary = config.batching.mode == "dynamic"
        self._bare = build_model(self._hf, config.parallel, self._dtype, self._device, shapes_vary=shapes_vary, graphs=graphs)
        self._thd = takes_thd(self._bare)
        load_hf(self._bare, self._model_path, self._hf)
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
        if config.cuda_graph.impl != "none":
            self._graphs = GraphCache(config.cuda_graph.warmup_steps, self._device, self._anchors)
        self.reset_optimizer(config.optimizer)
        return {
            "rank": self._rank,
            "device": str(self._device),
            "parameters": parameter_count(self._model_path),
            "optimizer": "Megatron's distributed AdamW" if self._distributed_optimizer else "Megatron's AdamW",
            "cuda_graphs": graphs,
        }

    @_on_device
    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Fresh moments, and the schedule from its start."""
        from actors.policy.optimizer import build_optimizer

        vars(self).update(_optimizer=None, _scheduler=None)  # their moments go before the new ones come
        self._optimizer, self._scheduler = build_optimizer(optimizer, self._model, self._dtype, distributed=self._distributed_optimizer)

    @_on_device
    def snapshot_reference(self) -> None:
        """Keep a copy of the present weights as the reference policy."""
        self._reference = [parameter.detach().clone() for parameter in self._bare.parameters()]

    @_on_device
    def train(self, plan: ShardPlan, objective: Literal["sft", "grpo"]) -> dict[str, float]:
        """One optimizer step over the plan's rows. Metrics are those of the whole batch, equal on every rank.

        Returns:
            loss, entropy, grad_norm (before clipping), lr, response_tokens; for grpo also kl, clip_fraction, ratio and
            ratio/max, logprob_error/mean and /max; with policy.cuda_graph also the counts of `GraphCache` since
            the step before, so those of log-probability passes as well; on CUDA also `devices.peak_memory`.

        Raises:
            MissingColumnsError, DataPlaneError: the columns that the objective reads were not written, or cannot be read.
            FloatingPointError: the loss or a gradient is not finite; on every rank, and the weights stay as they were.
        """
        from actors.policy.optimizer import clip_and_step

        devices.reset_peak_memory(self._device)
        micro_batches = self._micro_batches(plan, train_columns(self._config, objective))
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        tallies = self._forward_backward(f"train ({objective})", micro_batches, self._objective(objective), forward_only=False)
        totals, largest = reduce_tallies(tallies, self._device)
        self._optimizer.prepare_grads()
        norm = self._optimizer.get_grad_norm()
        grad_norm = float(norm)
        if not (math.isfinite(totals["loss"]) and math.isfinite(grad_norm)):
            raise FloatingPointError(f"train ({objective}): loss {totals['loss']}, gradient norm {grad_norm}; no update was made")
        self._scheduler.step(1)
        clip_and_step(self._optimizer, norm)
        metrics = step_metrics(objective, totals, largest, self._config.loss)
        metrics |= {"grad_norm": grad_norm, "lr": float(self._optimizer.param_groups[0]["lr"])}
        return metrics | self._graph_counts() | devices.peak_memory(self._device, "train")

    @_on_device
    def evaluate(self, plan: ShardPlan) -> dict[str, float]:
        """The supervised loss over the plan's rows, without a gradient: loss, entropy and response_tokens as of `train`.

        Raises:
            MissingColumnsError, DataPlaneError: the token columns were not written, or cannot be read.
        """
        micro_batches = self._micro_batches(plan, BASE)
        tallies = self._forward_backward("evaluate", micro_batches, self._objective("sft"), forward_only=True)
        return step_metrics("sft", *reduce_tallies(tallies, self._device), self._config.loss)

    @_on_device
    def warm_up(self, plan: ShardPlan, objective: Literal["sft", "grpo"]) -> None:
        """The passes of `train` over the plan's rows, without an update: weights, moments, schedule and random state stay."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            micro_batches = self._micro_batches(plan, train_columns(self._config, objective))
            self._model.zero_grad_buffer()
            tallies = self._forward_backward(f"train ({objective})", micro_batches, self._objective(objective), forward_only=False)
            reduce_tallies(tallies, self._device)
            self._model.zero_grad_buffer()
            self._graph_counts()  # steps report their own

    @_on_device
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
        micro_batches = self._micro_batches(plan, BASE)
        if reference:
            self._swap_reference()
        try:
            results = self._forward_backward("logprob", micro_batches, lambda _, out: (out.sum(), (out[0],)), forward_only=True)
        finally:
            if reference:
                self._swap_reference()
        if self._writes_back():
            rows: dict[int, torch.Tensor] = {}
            for micro_batch, (logprobs,) in zip(micro_batches, results, strict=True):
                masked = torch.where(micro_batch.token_mask, logprobs, 0.0)
                rows.update(micro_batch.unpad(masked))
            self._plane.put(plan.meta, {column: [rows[row] for row in range(len(plan.meta))]}, overwrite=True)
        peak = devices.peak_memory(self._device, "ref_logprob" if reference else "logprob")
        return {"response_tokens": float(plan.global_tokens)} | peak

    def drop_graphs(self) -> None:
        """Free what CUDA graphs hold. Passes that need one capture it anew."""
        if self._graphs is not None:
            self._graphs.clear()

    @_on_device
    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """All weights under Hugging Face names, on the CPU, as copies; on rank 0 only. A collective."""
        from actors.models.weight_table import export_hf

        keep = self._rank == 0
        weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in export_hf(self._bare, self._hf) if keep}
        return weights if keep else None

    @_on_device
    def manifest(self) -> Manifest:
        """What `send_weights` sends. A collective, which gathers every weight once to see its shape."""
        from actors.models.weight_table import export_hf

        return Manifest.of(export_hf(self._bare, self._hf))

    @_on_device
    def send_weights(self, send: Callable[[Iterator[tuple[str, torch.Tensor]]], object]) -> None:
        """Give `send` all weights, one after the other, under Hugging Face names, as full tensors on this rank's device. A collective:
        every rank's `send` must take all of them. Only what `send` keeps stays in memory. Returns when the device has done it.
        """
        from actors.models.weight_table import export_hf

        torch.cuda.synchronize()  # `send` may use streams of its own; the optimizer's last update must be seen there
        send(export_hf(self._bare, self._hf))
        torch.cuda.synchronize()

    @_on_device
    def on_device[T](self, call: Callable[[], T]) -> T:
        """The call's result, with this worker's device as the current one."""
        return call()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face directory: weights, and the source model's configuration and tokenizer. A collective."""
        weights = self.export_weights()
        if weights is not None:
            save_model_dir(Path(path), Path(self._model_path), weights, self._config.dtype)

    @_on_device
    def close(self) -> None:
        """Leave the process group. Idempotent."""
        self.drop_graphs()
        devices.leave_distributed()

    # ---- inside a step ----

    def _micro_batches(self, plan: ShardPlan, fields: Sequence[str]) -> list[MicroBatch]:
        built = batches.build(self._reader.read(plan.meta, fields), plan, self._device)
        return [rows_as_slots(b, self._config.parallel.sequence_multiple) for b in built] if self._thd else built

    def _objective(self, name: str) -> LossFunction:
        return functools.partial(self._loss, name)

    def _loss(self, objective: str, b: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Outputs]:
        logprobs, entropies = output
        tokens, sequences = b.totals
        counted = b.token_mask * b.sample_mask[:, None]
        sums: Sums
        largest: Sums = {}
        if objective == "sft":
            loss, sums = sft_loss(logprobs, b.token_mask, b.sample_mask, global_tokens=tokens)
        else:
            assert b.advantages is not None and b.generation_logprobs is not None  # noqa: PT018  (fetch brought them)
            loss, sums, largest = grpo_loss(
                logprobs,
                b.policy_logprobs,
                b.advantages,
                b.token_mask,
                b.sample_mask,
                b.reference_logprobs,
                self._config.loss,
                global_tokens=tokens,
                global_sequences=sequences,
                generation_logprobs=b.generation_logprobs,
            )
            # Of the weights that generated: after the first of several updates `logprobs` belongs to others.
            generating = logprobs if b.policy_logprobs is None else b.policy_logprobs
            error = logprob_error(generating, b.generation_logprobs, counted > 0)
            sums["logprob_error"], largest["logprob_error"] = error
        sums |= {"loss": loss.detach(), "tokens": counted.sum(), "entropy": masked_sum(entropies, counted)}
        return loss, tally((sums, largest), self._device)

    def _forward_backward(self, stage: str, micro_batches: list[MicroBatch], loss: LossFunction, *, forward_only: bool) -> list[Outputs]:
        """The passes over the micro-batches, and the reduction of their gradients. Returns what `loss` kept of each, on the last stage."""
        from megatron.core.distributed import finalize_model_grads

        self._model.train(not forward_only)
        with torch.set_grad_enabled(not forward_only):
            if self._graphs is None:
                kept = self._schedule(micro_batches, loss, forward_only=forward_only)
            else:
                self._graphs.begin()
                alone = functools.partial(self._schedule_one, loss=loss, forward_only=forward_only)
                kept = [self._graphs.run(stage, b, alone) for b in micro_batches]
        if not forward_only:
            finalize_model_grads([self._model], None)  # the second would divide by tokens; our losses already are
        return kept

    def _schedule_one(self, b: MicroBatch, *, loss: LossFunction, forward_only: bool) -> Outputs:
        (kept,) = self._schedule([b], loss, forward_only=forward_only)
        return kept

    def _schedule(self, micro_batches: list[MicroBatch], loss: LossFunction, *, forward_only: bool) -> list[Outputs]:
        """Megatron's schedule. Gradients are summed in the buffers of this rank."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
            b = next(iterator)
            split = self._config.parallel.context > 1
            visible = packed_inputs(b.boundaries, b.input_ids.shape[1], b.token_mask.shape[1], thd=self._thd, split=split)
            part = context_part(b, self._state.get_context_parallel_group()) if split else None
            output = model(
                input_ids=(part or b).input_ids,
                position_ids=(part or b).position_ids,
                output_processor=self._token_logprobs,
                output_processor_context=part,
                **visible,
            )
            return output, functools.partial(after, b)

        def after(b: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Outputs]:
            value, kept = loss(b, b.per_sequence(output))
            return value, b.token_mask.sum().int(), kept  # Megatron adds the second, which is int, over micro-batches

        size, length = micro_batches[0].input_ids.shape  # of all; where they differ, stages exchange shapes and ignore these
        kept: list[Outputs] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self._model,
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=forward_only,
        )
        return kept

    def _anchors(self) -> Iterator[torch.Tensor]:
        for parameter in self._bare.parameters():
            yield parameter
            yield parameter.main_grad

    def _graph_counts(self) -> dict[str, float]:
        return {} if self._graphs is None else self._graphs.counts()

    def _token_logprobs(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: Any,
        input_ids: torch.Tensor,
        context: ContextPart | None,
        **_: Any,
    ) -> torch.Tensor:
        """Megatron's `output_processor`: [T, B, H] (of `context`, if given) -> [2, B, T] float32, without the batch's logits in memory."""
        state = self._state
        parts = state.get_tensor_model_parallel_world_size()
        width = output_layer.output_size_per_partition
        shard = VocabShard(
            start=state.get_tensor_model_parallel_rank() * width,
            width=width,
            total=self._hf.vocab_size,
            group=state.get_tensor_model_parallel_group() if parts > 1 else None,
        )

        def project(part: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = output_layer(part, weight=output_weight)[0]
            return logits

        if context is None:
            return torch.stack(token_logprobs(hidden_states, project, input_ids, self._temperature, shard))
        mine = torch.stack(label_logprobs(hidden_states, project, context.labels, self._temperature, shard))
        return whole_rows(mine, context, state.get_context_parallel_group())

    def _writes_back(self) -> bool:
        # One rank of a replica: the last stage has the values, and a data-plane client as good as the leader's.
        state = self._state
        return bool(state.is_pipeline_last_stage()) and state.get_tensor_model_parallel_rank() == state.get_context_parallel_rank() == 0

    def _swap_reference(self) -> None:
        if self._reference is None:
            raise RuntimeError("there is no reference policy yet: call snapshot_reference first")
        with torch.no_grad():
            for parameter, kept in zip(self._bare.parameters(), self._reference, strict=True):
                present = parameter.detach().clone()
                parameter.copy_(kept)
                kept.copy_(present)
