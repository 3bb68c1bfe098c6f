"""Columns of a shard's rows to the tensors of its micro-batches, in either layout. Pure torch: no data plane, no Megatron.

    padded, dynamic     input_ids [B, T]  aaaaa           per-token columns [S, L]  aaaaa      S, L = B, T
                                          bbb..                                     bbb..
    packed              input_ids [1, T]  aaaaabbb.cc...  per-token columns [S, L]  aaaaa
                                                                                    bbb..
                                                                                    cc...
Masks, log-probability columns and everything that the loss computes lie per sequence, [S, L], in both: the model's output for
a packed row is gathered there (`MicroBatch.per_sequence`), so losses and write-back know no layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from actors.data_plane.sharding import MicroBatchPlan, ShardPlan

_TOKEN_FIELDS = frozenset({"generation_logprobs", "policy_logprobs", "reference_logprobs"})

Columns = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Shapes follow from the plan alone, never from the rows; whatever is no real token is 0 and masked.

    Attributes:
        input_ids, position_ids: [B, T] int64. Positions restart at each sequence.
        token_mask: [S, L] bool. sample_mask: [S] float32.
        rows: numbers of the real sequences in the plan's meta; empty: padding only. lengths: their tokens.
        totals: [2] float32, response tokens and samples of the whole batch: denominators of losses. A tensor, for a captured graph reads
            those of each batch.
        boundaries: packed: [S + ceil(T / L)] int32, where each slot of the row begins, then T to the end: a slot per sequence, and the
            rest of the row in slots of its own. None is longer than L. padded: None.
        index: packed: [S, L] int64, the position in the row of each token that has a log-probability, else 0; padded: None.
        advantages: [S] float32 or None. The three log-probability columns: [S, L] float32 or None.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    token_mask: torch.Tensor
    sample_mask: torch.Tensor
    totals: torch.Tensor
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    boundaries: torch.Tensor | None = None
    index: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    generation_logprobs: torch.Tensor | None = None
    policy_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """[n, B, T], aligned with `input_ids` and 0 at t = 0 -> [n, S, L]: 0 at each sequence's first token and past its last."""
        if self.index is None:
            return values
        return values.flatten(1).index_select(1, self.index.flatten()).unflatten(1, self.index.shape)

    def unpad(self, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(row number, its values without padding) of an [S, L] tensor, on the CPU."""
        host = values.detach().cpu()
        for i, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            yield row, host[i, :length].clone()


def build(columns: Columns, plan: ShardPlan, device: torch.device) -> list[MicroBatch]:
    """The plan's micro-batches.

    Args:
        columns: by name, one CPU tensor per row of the plan's meta; input_ids, token_mask and sample_mask at least.

    Raises:
        ValueError: rows whose lengths are not those that the plan was made for.
    """
    totals = torch.tensor([max(plan.global_tokens, 1), plan.global_sequences], dtype=torch.float32, device=device)
    return [_micro_batch(columns, part, plan.packed, totals, device) for part in plan.micro_batches]


def _micro_batch(columns: Columns, part: MicroBatchPlan, packed: bool, totals: torch.Tensor, device: torch.device) -> MicroBatch:
    rows = part.rows
    lengths = tuple(len(columns["input_ids"][row]) for row in rows)

    def tokens(name: str, dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(part.sequences, part.longest, dtype=dtype)
        for i, row in enumerate(rows):
            value = columns[name][row]
            if len(value) > part.longest:
                raise ValueError(f"column {name!r}: a row of {len(value)} tokens, but sequence_lengths promised at most {part.longest}")
            out[i, : len(value)] = value
        return out.to(device)

    def scalars(name: str) -> torch.Tensor:
        out = torch.zeros(part.sequences)
        for i, row in enumerate(rows):
            out[i] = columns[name][row]
        return out.to(device)

    token_mask = tokens("token_mask", torch.bool)
    if packed:
        layout = {name: tensor.to(device) for name, tensor in _row(columns["input_ids"], part, lengths).items()}
    else:
        size, length = part.shape
        layout = {"input_ids": tokens("input_ids", torch.int64), "position_ids": torch.arange(length, device=device).expand(size, length)}
    return MicroBatch(
        **layout,
        token_mask=token_mask,
        sample_mask=scalars("sample_mask"),
        totals=totals,
        rows=rows,
        lengths=lengths,
        advantages=scalars("advantages") if "advantages" in columns else None,
        **{name: tokens(name, torch.float32) for name in _TOKEN_FIELDS & set(columns)},
    )


def _row(ids: Sequence[torch.Tensor], part: MicroBatchPlan, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The packed row [1, T], its slots, and where the loss finds each token."""
    total, longest = part.shape[1], part.longest
    # From the last sequence on a slot begins every `longest` tokens: attention kernels work to the longest slot that they are told of.
    filled = part.starts or (0,)
    slots = (*filled, *range(filled[-1] + longest, total, longest))
    slots += (total,) * (part.sequences + -(-total // longest) - len(slots))
    input_ids = torch.zeros(1, total, dtype=torch.int64)
    index = torch.zeros(part.sequences, longest, dtype=torch.int64)
    for i, (row, start, length) in enumerate(zip(part.rows, part.starts, lengths, strict=True)):
        if length > slots[i + 1] - start:
            raise ValueError(f"column 'input_ids': a row of {length} tokens, but the plan gave it {slots[i + 1] - start} in the packed row")
        input_ids[0, start : start + length] = ids[row]
        index[i, 1:length] = torch.arange(start + 1, start + length)
    boundaries = torch.tensor(slots, dtype=torch.int32)
    position_ids = torch.cat([torch.arange(stop - start) for start, stop in pairwise(slots)])
    return {"input_ids": input_ids, "position_ids": position_ids[None], "boundaries": boundaries, "index": index}
