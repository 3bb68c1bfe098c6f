"""What a step reports: sums and maxima of micro-batches, over ranks, to the metrics of the whole batch.

micro-batch ── Report ──► sum, max over micro-batches ──► over data-parallel ranks ──► to the other pipeline stages
"""

from __future__ import annotations

from typing import Any

import torch

from actors.policy.loss import CORRECTION_SUMS, correction_metrics
from configs.policy import LossConfig

_SUMMED = ("loss", "tokens", "entropy", "kl", "clipped", "ratio", "logprob_error", *CORRECTION_SUMS)
_LARGEST = ("ratio", "logprob_error")

# Of one micro-batch, on the last pipeline stage: {"sums": {...}, "largest": {...}} when training.
Report = dict[str, Any]


def reduce_reports(reports: list[Report], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima over micro-batches and data-parallel ranks, on every rank. A collective; needs Megatron's groups."""
    from megatron.core import parallel_state

    sums = torch.zeros(len(_SUMMED), dtype=torch.float64, device=device)
    largest = torch.zeros(len(_LARGEST), dtype=torch.float64, device=device)
    for report in reports:
        sums += torch.stack([torch.as_tensor(report["sums"].get(name, 0.0), device=device).double() for name in _SUMMED])
        found = torch.stack([torch.as_tensor(report["largest"].get(name, 0.0), device=device).double() for name in _LARGEST])
        largest = torch.maximum(largest, found)
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
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
