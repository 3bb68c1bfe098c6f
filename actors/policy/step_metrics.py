"""What a step reports: sums and maxima of micro-batches, over ranks, to the metrics of the whole batch.

micro-batch ── Report ──► tally ──► sum, max over micro-batches ──► over data-parallel ranks ──► to the other pipeline stages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from actors.policy.loss import CORRECTION_SUMS, correction_metrics
from configs.policy import LossConfig

_SUMMED = ("loss", "tokens", "entropy", "kl", "clipped", "ratio", "logprob_error", *CORRECTION_SUMS)
_LARGEST = ("ratio", "logprob_error")

# Sums and maxima of one micro-batch by the names above; those that an objective has not are 0.
Report = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
# The same as vectors, float64.
Tally = tuple[torch.Tensor, ...]


def tally(report: Report, device: torch.device) -> Tally:
    """A report as two vectors, by launches on the device alone."""
    absent = torch.zeros((), dtype=torch.float64, device=device)
    return tuple(
        torch.stack([found.get(name, absent).double() for name in names]) for names, found in zip((_SUMMED, _LARGEST), report, strict=True)
    )


def reduce_tallies(tallies: Sequence[Tally], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima over micro-batches and data-parallel ranks, on every rank. A collective; needs Megatron's groups."""
    from megatron.core import parallel_state

    sums = torch.zeros(len(_SUMMED), dtype=torch.float64, device=device)
    largest = torch.zeros(len(_LARGEST), dtype=torch.float64, device=device)
    for summed, found in tallies:
        sums += summed
        largest = torch.maximum(largest, found)
    data = parallel_state.get_data_parallel_group(with_context_parallel=False)  # context-parallel ranks have the same sums
    torch.distributed.all_reduce(sums, group=data)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=data)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last, group = parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(sums, src=last, group=group)
        torch.distributed.broadcast(largest, src=last, group=group)
    return dict(zip(_SUMMED, sums.tolist(), strict=True)), dict(zip(_LARGEST, largest.tolist(), strict=True))


def step_metrics(objective: str, totals: dict[str, float], largest: dict[str, float], loss: LossConfig) -> dict[str, float]:
    """Means over the response tokens, and maxima: what `PolicyWorker.train` returns but for grad_norm and lr."""
    tokens = max(totals["tokens"], 1.0)
    metrics = {"loss": totals["loss"], "entropy": totals["entropy"] / tokens, "response_tokens": totals["tokens"]}
    if objective == "grpo":
        metrics |= {
            "kl": totals["kl"] / tokens,
            "clip_fraction": totals["clipped"] / tokens,
            "ratio": totals["ratio"] / tokens,
            "ratio/max": largest["ratio"],
            "logprob_error/mean": totals["logprob_error"] / tokens,
            "logprob_error/max": largest["logprob_error"],
        } | correction_metrics(totals, loss)
    return metrics
