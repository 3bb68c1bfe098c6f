"""Weight columns of a batch's micro-batches, each component over its own denominator.

micro-batches of this rank ── Objective.weights ──► columns ──► where they are not 0: tokens, responses ── all-reduce ──► denominators
                                                     └────────────────── x (denominator of the aggregation / own) ◄───────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from actors.policy.batch import CANDIDATES, MicroBatch
from actors.policy.objectives.base import Objective

Weights = dict[str, torch.Tensor]


def weigh(
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    others: Iterable[Objective] = (),
    group: torch.distributed.ProcessGroup | None = None,
) -> list[MicroBatch]:
    """The micro-batches with their weight columns. A collective of the group if the objective has denominators of its own.

    Args:
        others: objectives that share a computation with this one: their columns are there as well, 0 everywhere.
        group: data-parallel ranks, which hold the batch together; None: this one alone.
    """
    weights = [objective.weights(b) for b in micro_batches]
    if objective.own_denominators:
        weights = _over_their_own(weights, micro_batches, objective, group)
    names = {name for one in others for name in (*one.columns, *one.components)}.difference(CANDIDATES)
    return [b.with_columns(_absent(b, names.difference(b.columns, mine)) | mine) for b, mine in zip(micro_batches, weights, strict=True)]


def _over_their_own(
    weights: Sequence[Weights], micro_batches: Sequence[MicroBatch], objective: Objective, group: torch.distributed.ProcessGroup | None
) -> list[Weights]:
    by_token = objective.aggregation == "token_mean"

    def counted(column: torch.Tensor) -> torch.Tensor:
        return (column != 0).sum() if by_token else (column != 0).any(dim=1).sum()

    counts = torch.stack([torch.stack([counted(mine[name]) for mine in weights]).sum() for name in objective.components])
    if group is not None:
        torch.distributed.all_reduce(counts, group=group)
    factors = micro_batches[0].totals[0 if by_token else 1] / counts.clamp(min=1)
    return [{name: mine[name] * factor for name, factor in zip(objective.components, factors, strict=True)} for mine in weights]


def _absent(b: MicroBatch, names: Iterable[str]) -> Weights:
    return dict.fromkeys(names, torch.zeros_like(b.token_mask, dtype=torch.float32))
