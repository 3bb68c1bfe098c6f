"""What losses report, from micro-batches to the whole batch.

micro-batch ── scalars by name ──► vector ──► over micro-batches ──► over data-parallel ranks ──► to the other pipeline stages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def vector(report: Mapping[str, torch.Tensor], names: Sequence[str], device: torch.device) -> torch.Tensor:
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
