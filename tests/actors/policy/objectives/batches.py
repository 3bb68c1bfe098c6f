"""Micro-batches of given columns, and what an objective makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives.base import Objective


def micro_batch(
    token_mask: torch.Tensor, sample_mask: torch.Tensor, columns: Mapping[str, torch.Tensor], *, tokens: int, sequences: int
) -> MicroBatch:
    """Of [S, L] columns and a sample mask [S]; tokens and sequences are those of the whole batch."""
    return MicroBatch(
        input_ids=token_mask.long(),
        position_ids=token_mask.long(),
        token_mask=token_mask,
        sample_mask=sample_mask[:, None].expand(token_mask.shape),
        totals=torch.tensor([float(tokens), float(sequences)]),
        temperature=torch.ones(1),
        loss_scale=torch.ones(1),
        rows=tuple(range(len(token_mask))),
        lengths=(token_mask.shape[1],) * len(token_mask),
        columns=columns,
    )


def loss_of(objective: Objective, b: MicroBatch, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Its loss over the columns that it reads, and nothing beside them."""
    columns = {name: b.columns[name] for name in objective.columns}
    b = dataclasses.replace(b, columns=columns)
    return objective.loss(b.with_columns(objective.weights(b)), logprobs, torch.zeros_like(logprobs))
