"""Sums and maxima that a loss reports, from micro-batches to the whole batch.

micro-batch ── sums, maxima ──► Tally ──► sum, max over micro-batches ──► over data-parallel ranks ──► to the other pipeline stages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

# Values by the names of a sum or a maximum, in their order, float64: what a CUDA graph can hand out.
Tally = tuple[torch.Tensor, torch.Tensor]


def tally(values: Mapping[str, torch.Tensor], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """[len(names)] float64, 0 for a name without a value; by launches on the device alone."""
    absent = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([values.get(name, absent).double() for name in names])


def reduce_tallies(
    tallies: Sequence[Tally], summed: Sequence[str], largest: Sequence[str], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima over micro-batches and data-parallel ranks, on every rank. A collective; needs Megatron's groups.

    Args:
        tallies: of each micro-batch; none on other pipeline stages than the last. summed, largest: their names.
    """
    from megatron.core import parallel_state

    sums = torch.zeros(len(summed), dtype=torch.float64, device=device)
    maxima = torch.zeros(len(largest), dtype=torch.float64, device=device)
    for added, found in tallies:
        sums += added
        maxima = torch.maximum(maxima, found)
    data = parallel_state.get_data_parallel_group(with_context_parallel=False)  # context-parallel ranks have the same sums
    torch.distributed.all_reduce(sums, group=data)
    torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX, group=data)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last, group = parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(sums, src=last, group=group)
        torch.distributed.broadcast(maxima, src=last, group=group)
    return dict(zip(summed, sums.tolist(), strict=True)), dict(zip(largest, maxima.tolist(), strict=True))
