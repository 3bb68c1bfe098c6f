"""Pairs of responses before a training pass: how much more the policy holds of each response than the reference, and so its weight.

micro-batches ──► policy, forward only ────┐
              └─► reference, forward only ─┴─► sum per row ──► margin per pair, over data-parallel ranks ──► weight per row
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.data_plane.sharding import ShardPlan
from actors.policy.batch import MicroBatch
from actors.policy.objectives.base import Objective
from actors.policy.objectives.dpo import Dpo, by_row
from actors.policy.passes import Passes, as_they_are
from actors.policy.reference import Snapshot, Teachers


def prefer(
    micro_batches: Sequence[MicroBatch], plan: ShardPlan, objective: Objective, policy: Passes, reference: Snapshot | Teachers | None
) -> list[MicroBatch]:
    """With objective dpo, the micro-batches with the weights of their rows as the column `cross_entropy`; else as they are.

    A collective; needs Megatron's groups.

    Raises:
        RuntimeError: there is no reference.
    """
    from megatron.core import parallel_state

    if not isinstance(objective, Dpo):
        return list(micro_batches)
    if reference is None:
        raise RuntimeError("there is no model against which preferences are judged")
    plain = list(micro_batches)
    mine = [logprobs for logprobs, *_ in policy.run("logprob", plain, as_they_are, forward_only=True)]
    with reference.passes() as by_source:
        theirs = [logprobs for logprobs, *_ in by_source[""].run("logprob", plain, as_they_are, forward_only=True)]
    rows = len(plan.meta)
    sums = by_row(mine, plain, rows) - by_row(theirs, plain, rows)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last, group = parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(sums, src=last, group=group)
    counts = by_row([torch.ones_like(b.counted) for b in plain], plain, rows)
    data = parallel_state.get_data_parallel_group(with_context_parallel=False)
    weights = objective.prefer(plan.meta, sums, counts, plan.global_sequences, data)
    return [b.with_columns({"cross_entropy": spread(weights, b)}) for b in plain]


def spread(values: torch.Tensor, b: MicroBatch) -> torch.Tensor:
    """[S, L]: each row's value at all its places, 0 in rows that are padding."""
    found = torch.zeros_like(b.counted)
    found[: len(b.rows)] = values[list(b.rows), None]
    return found
