"""Context parallelism: each rank of a replica passes its part of every row through the model, and all see every log-probability.

    row [T]  a b c d e f g h        rank 0  a b g h   labels  b c h .        (CP = 2: chunks 0 and 3 of 4; packed rows: of each slot)
                                    rank 1  c d e f   labels  d e f g
    labels are shifted first ──► MCore cuts ──► model (ring attention) ──► log p(label) ──► all-gather, put back in order ──► [T]

Megatron-Core decides which tokens a rank gets (`get_batch_on_this_cp_rank`), to match Transformer Engine's attention. Every rank of the
replica computes the whole loss; each rank's gradients are those of its own tokens, and DDP adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.policy.batch import MicroBatch


@dataclass(frozen=True)
class ContextPart:
    """This rank's tokens of a micro-batch.

    Attributes:
        input_ids, position_ids: [B, T / CP] int64. labels: the tokens that follow them, 0 after a row's last.
        order: [T] int64: for each place of a row, where an all-gather over the ranks leaves its value.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    order: torch.Tensor


def context_part(b: MicroBatch, group: torch.distributed.ProcessGroup) -> ContextPart:
    """This rank's part of the micro-batch. A collective. T, and each slot of a packed row, divides by 2 CP (plan_batch)."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    cu_seqlens = None if b.boundaries is None else b.boundaries[None]
    part = get_batch_on_this_cp_rank(
        {
            "tokens": b.input_ids,
            "labels": torch.nn.functional.pad(b.input_ids[:, 1:], (0, 1)),
            "loss_mask": torch.arange(b.input_ids.shape[1], device=b.input_ids.device).expand_as(b.input_ids),  # a name that MCore cuts
            "position_ids": b.position_ids,
            "cu_seqlens": cu_seqlens,
            "cu_seqlens_padded": cu_seqlens,
        },
        is_hybrid_cp=False,
        cp_group=group,
    )
    mine = part["loss_mask"][0].contiguous()  # the same places of every row
    places = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(places, mine, group=group)
    return ContextPart(part["tokens"], part["position_ids"], part["labels"], torch.cat(places).argsort())


def whole_rows(values: torch.Tensor, part: ContextPart, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """[n, B, T / CP] of this rank's labels -> [n, B, T] of each token, 0 at t = 0; the same on every rank. A collective.

    Every rank computes the same from the result, so the gradient here is this rank's own part, not a sum over ranks.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    everything = gather_from_sequence_parallel_region(values.movedim(-1, 0).contiguous(), tensor_parallel_output_grad=False, group=group)
    of_labels = everything.index_select(0, part.order).movedim(0, -1)
    return torch.nn.functional.pad(of_labels[..., :-1], (1, 0))
