"""Passes of one rank over micro-batches: Megatron's schedule, eager or as CUDA graphs.

    micro-batches ──► schedule ──► model ──► last stage: hidden states ──► log-probabilities, entropies ──► loss ─┬─► gradient buffers
                        │                                                                                         └─► a vector of sums
                        └── with policy.cuda_graph one micro-batch at a time: cuda_graphs.py replays it

The last pipeline stage's output is not logits but [n, B, T]. Losses get it per sequence, [n, S, L], whatever the layout of the
micro-batch (batch.py). The n values of a token are

    its log-probability, its distribution's entropy
    ... and the reverse KL to the teacher's candidates (policy.teacher.top_k), where the micro-batch has them
    ... and the k most probable tokens in its place, numbers first, then log-probabilities: of a model that passes for a teacher
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from actors.policy.batch import MicroBatch
from actors.policy.boundaries import packed_inputs, rows_as_slots
from actors.policy.context import ContextPart, context_part, whole_rows
from actors.policy.cuda_graphs import GraphCache
from actors.policy.logprob import Projection, Top, VocabShard, token_logprobs, top_logprobs
from actors.policy.objectives.reverse_kl import reverse_kl
from configs.policy import PolicyConfig

# On the last pipeline stage: (micro-batch, [n, S, L]) -> (loss, what the caller gets).
LossFunction = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Passes:
    """Needs Megatron's parallel groups.

    Args:
        model: a GPTModel in Megatron's DistributedDataParallel; bare, if all passes are forward only.
        vocabulary: tokens of the tokenizer; the model's may be padded beyond it.
        thd: whether the model's attention takes packed sequences by their boundaries. Megatron's own refuses them.
        captured: whether policy.cuda_graph is for these passes. top: the tokens that a teacher names; None: it names none.

    Attributes:
        graphs: the captured passes; None without policy.cuda_graph.
    """

    def __init__(
        self, model: Any, vocabulary: int, config: PolicyConfig, device: torch.device, *, thd: bool, captured: bool = True,
        top: Top | None = None,
    ) -> None:  # fmt: skip
        from megatron.core import parallel_state

        self._model, self._vocabulary, self._config = model, vocabulary, config
        self._state = parallel_state
        self._thd, self._top = thd, top
        graph = config.cuda_graph
        self.graphs = None if graph.impl == "none" or not captured else GraphCache(graph.warmup_steps, device, self._anchors)

    def run(self, stage: str, micro_batches: list[MicroBatch], loss: LossFunction, *, forward_only: bool) -> list[torch.Tensor]:
        """The passes, and the reduction of their gradients over ranks. Returns what `loss` gave besides the loss, on the last stage.

        Args:
            stage: name of the computation; passes of the same stage and shapes share a CUDA graph.
        """
        from megatron.core.distributed import finalize_model_grads

        if self._thd:
            micro_batches = [rows_as_slots(b, self._config.parallel.sequence_multiple) for b in micro_batches]
        self._model.train(not forward_only)
        with torch.set_grad_enabled(not forward_only):
            if self.graphs is None:
                outputs = self._schedule(micro_batches, loss, forward_only=forward_only)
            else:
                self.graphs.begin()
                outputs = [
                    self.graphs.run(stage, b, lambda b: self._schedule([b], loss, forward_only=forward_only)[0]) for b in micro_batches
                ]
        if not forward_only:
            finalize_model_grads([self._model], None)  # the second would divide by tokens; our losses already are
        return outputs

    def counts(self) -> dict[str, float]:
        """`GraphCache.counts`; nothing without graphs."""
        return {} if self.graphs is None else self.graphs.counts()

    def _schedule(self, micro_batches: list[MicroBatch], loss: LossFunction, *, forward_only: bool) -> list[torch.Tensor]:
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
                output_processor=functools.partial(self._token_values, b=b),
                output_processor_context=part,
                **visible,
            )
            return output, functools.partial(after, b)

        def after(b: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            value, kept = loss(b, b.per_sequence(output))
            # The scale is a tensor of the batch, which a replay reads: Megatron's own is another one after each change.
            return value * b.loss_scale[0], b.token_mask.sum().int(), kept  # Megatron adds the second, which is int, over micro-batches

        size, length = micro_batches[0].input_ids.shape  # of all; where they differ, stages exchange shapes and ignore these
        outputs: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self._model,
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=forward_only,
        )
        return outputs

    def _anchors(self) -> Iterator[torch.Tensor]:
        for parameter in self._model.parameters():
            yield parameter
            yield parameter.main_grad

    def _token_values(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: Any,
        input_ids: torch.Tensor,
        context: ContextPart | None,
        b: MicroBatch,
        **_: Any,
    ) -> torch.Tensor:
        """Megatron's `output_processor`: [T, B, H] (of `context`, if given) -> [n, B, T] float32, without the batch's logits in memory."""
        state = self._state
        parts = state.get_tensor_model_parallel_world_size()
        width = output_layer.output_size_per_partition
        shard = VocabShard(
            start=state.get_tensor_model_parallel_rank() * width,
            width=width,
            total=self._vocabulary,
            group=state.get_tensor_model_parallel_group() if parts > 1 else None,
        )

        def project(part: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = output_layer(part, weight=output_weight)[0]
            return logits

        labels = input_ids[:, 1:] if context is None else context.labels
        hidden = hidden_states[: labels.shape[1]]
        if self._top is not None:
            values = most_probable(hidden, project, labels, b.temperature, shard, self._top)
        else:
            values = values_of(hidden, project, labels, b, shard, entropy_gradient=self._config.loss.reads_entropy)
        if context is None:
            return torch.nn.functional.pad(values, (1, 0))
        return whole_rows(values, context, state.get_context_parallel_group())


def as_they_are(_: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The `LossFunction` of passes whose values are wanted."""
    return output.sum(), output


def values_of(
    hidden: torch.Tensor, project: Projection, labels: torch.Tensor, b: MicroBatch, shard: VocabShard, *, entropy_gradient: bool
) -> torch.Tensor:
    """[2, B, T] log-probabilities and entropies; [3, B, T] with the reverse KL to a teacher, where `b` has its candidates."""
    options: dict[str, Any] = {"temperature": b.temperature, "shard": shard, "entropy_gradient": entropy_gradient}
    if b.teacher_ids is None or b.teacher_logprobs is None:
        return torch.stack(token_logprobs(hidden, project, labels, **options))
    several = torch.cat((labels.unsqueeze(-1), b.teacher_ids[:, 1:]), dim=-1)
    logprobs, entropies = token_logprobs(hidden, project, several, **options)
    return torch.stack((logprobs[..., 0], entropies, reverse_kl(logprobs[..., 1:], b.teacher_logprobs[:, 1:])))


def most_probable(
    hidden: torch.Tensor, project: Projection, labels: torch.Tensor, temperature: torch.Tensor, shard: VocabShard, top: Top
) -> torch.Tensor:
    """[2 + 2 k, B, T] log-probabilities of the labels and entropies; numbers and log-probabilities of the k most probable tokens."""
    logprobs, entropies, ids = top_logprobs(hidden, project, labels, temperature, shard, top)
    several = torch.cat((ids.float(), logprobs[..., 1:]), dim=-1)  # float32 has whole numbers up to 2^24, and vocabularies fewer
    return torch.cat((torch.stack((logprobs[..., 0], entropies)), several.movedim(-1, 0)))


def report_vector(report: Mapping[str, torch.Tensor], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """[len(names)] float64, 0 for a name that the report has not; by launches on the device alone."""
    absent = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([report.get(name, absent).double() for name in names])


def reduce_reports(reports: Sequence[torch.Tensor], names: Sequence[str], device: torch.device) -> dict[str, float]:
    """Sums, and of */max maxima, over micro-batches and data-parallel ranks; on every rank. A collective; needs Megatron's groups.

    Args:
        reports: a vector per micro-batch on the last pipeline stage; none on the others.
    """
    from megatron.core import parallel_state

    sums = torch.zeros(len(names), dtype=torch.float64, device=device)
    maxima = torch.zeros_like(sums)
    for report in reports:
        sums += report
        maxima = torch.maximum(maxima, report)
    data = parallel_state.get_data_parallel_group(with_context_parallel=False)  # context-parallel ranks have the same sums
    torch.distributed.all_reduce(sums, group=data)
    torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX, group=data)
    both = torch.stack((sums, maxima))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last, group = parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(both, src=last, group=group)
    summed, largest = both.tolist()
    return {name: largest[i] if name.endswith("/max") else summed[i] for i, name in enumerate(names)}
