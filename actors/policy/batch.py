"""Columns of a shard's rows to the tensors of its micro-batches, in either layout. Pure torch: no data plane, no Megatron.

    padded, dynamic     input_ids [B, T]  aaaaa           per-token columns [S, L]  aaaaa      S, L = B, T
                                          bbb..                                     bbb..
    packed              input_ids [1, T]  aaaaabbb.cc...  per-token columns [S, L]  aaaaa
                                                                                    bbb..
                                                                                    cc...
Masks, columns and everything that the loss computes are per sequence, [S, L], in both layouts: the model's output for a packed row is
gathered there (`MicroBatch.per_sequence`), so losses and write-back know no layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from actors.data_plane.sharding import MicroBatchPlan, ShardPlan

BASE = ("input_ids", "token_mask", "sample_mask")  # columns that every stage reads

Columns = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Shapes follow from the plan alone, never from the rows; whatever is no real token is 0 and masked.

    Attributes:
        input_ids, position_ids: [B, T] int64. Positions restart at each sequence.
        token_mask: [S, L] bool. sample_mask: [S] float32.
        totals: [2] float32, response tokens and samples of the whole batch: denominators of losses. A tensor, so that a captured graph
            reads those of each batch.
        rows: numbers of the real sequences in the plan's meta; empty: padding only. lengths: their tokens.
        boundaries: packed: [n + 1] int32, where each of n slots of the row begins, then T: a slot per sequence, then the rest of the row
            in slots of its own; n = S + ceil(T / L) - 1 always suffices, as none is longer than L. padded: None.
        index: packed: [S, L] int64, the position in the row of each token that has a log-probability, else 0; padded: None.
        columns: [S, L] float32 each, by name: what an objective reads, and the weight columns of its loss.
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
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def counted(self) -> torch.Tensor:
        """[S, L] float32: 1 on the tokens that losses and metrics count."""
        return self.token_mask * self.sample_mask[:, None]

    def with_columns(self, columns: Mapping[str, torch.Tensor]) -> MicroBatch:
        """With further columns; those that it has are replaced."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of it, by name."""
        found = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)} | self.columns

    def clone(self) -> MicroBatch:
        """A copy with tensors of its own, and no rows."""
        cloned = {name: tensor.clone() for name, tensor in self.tensors().items()}
        columns = {name: cloned.pop(name) for name in self.columns}
        return dataclasses.replace(self, rows=(), lengths=(), columns=columns, **cloned)

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """[n, B, T], aligned with `input_ids` and 0 at t = 0 -> [n, S, L]: 0 at each sequence's first token and past its last."""
        if self.index is None:
            return values
        chosen: torch.Tensor = values.flatten(1).index_select(1, self.index.flatten()).unflatten(1, self.index.shape)
        return chosen

    def unpad(self, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(row number, its values without padding) of an [S, L] tensor, on the CPU."""
        host = values.detach().cpu()
        for i, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            yield row, host[i, :length].clone()


def build(columns: Columns, plan: ShardPlan, device: torch.device) -> list[MicroBatch]:
    """The plan's micro-batches.

    Args:
        columns: by name, one CPU tensor per row of the plan's meta, those of `BASE` at least. The others have a value per token, or one
            for the row, which all its tokens get.

    Raises:
        ValueError: rows whose lengths are not those that the plan was made for, or differ between columns.
    """
    totals = torch.tensor([max(plan.global_tokens, 1), plan.global_sequences], dtype=torch.float32, device=device)
    return [_micro_batch(columns, part, plan.packed, totals, device) for part in plan.micro_batches]


def _micro_batch(columns: Columns, part: MicroBatchPlan, packed: bool, totals: torch.Tensor, device: torch.device) -> MicroBatch:
    # A few tensor operations per column, however many rows there are: a GPU waits meanwhile.
    rows, longest = part.rows, part.longest
    lengths = tuple(len(columns["input_ids"][row]) for row in rows)
    counts = torch.tensor(lengths, dtype=torch.int64)
    within = torch.arange(sum(lengths)) - _each(counts.cumsum(0) - counts, counts)  # the position of every token in its sequence
    places = _each(torch.arange(len(rows)) * longest, counts) + within  # and in [S * L]

    def joined(name: str) -> torch.Tensor:
        values = [columns[name][row] for row in rows]
        for value, length in zip(values, lengths, strict=True):
            if len(value) > longest:
                raise ValueError(f"column {name!r}: a row of {len(value)} tokens, but sequence_lengths promised at most {longest}")
            if len(value) != length:
                raise ValueError(f"column {name!r}: a row of {len(value)} tokens, but its input_ids are {length}")
        return torch.cat(values) if values else torch.empty(0)

    def tokens(name: str, dtype: torch.dtype) -> torch.Tensor:
        per_row = bool(rows) and columns[name][rows[0]].dim() == 0
        out = torch.zeros(part.sequences * longest, dtype=dtype)
        out[places] = (_each(stacked(name), counts) if per_row else joined(name)).to(dtype)
        return _to(out.view(part.sequences, longest), device)

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([columns[name][row] for row in rows])

    if packed:
        layout = {name: _to(tensor, device) for name, tensor in _row(joined, part, lengths, counts, within, places).items()}
    else:
        size, length = part.shape
        layout = {"input_ids": tokens("input_ids", torch.int64), "position_ids": torch.arange(length, device=device).expand(size, length)}
    sample_mask = torch.zeros(part.sequences)
    if rows:
        sample_mask[: len(rows)] = stacked("sample_mask")
    return MicroBatch(
        **layout,
        token_mask=tokens("token_mask", torch.bool),
        sample_mask=_to(sample_mask, device),
        totals=totals,
        rows=rows,
        lengths=lengths,
        columns={name: tokens(name, torch.float32) for name in columns if name not in BASE},
    )


def _row(
    joined: Callable[[str], torch.Tensor],
    part: MicroBatchPlan,
    lengths: tuple[int, ...],
    counts: torch.Tensor,
    within: torch.Tensor,
    places: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The packed row [1, T], its slots, and where the loss finds each token."""
    total, longest = part.shape[1], part.longest
    # From the last sequence on a slot begins every `longest` tokens: attention kernels work to the longest slot that they are told of.
    filled = part.starts or (0,)
    slots = (*filled, *range(filled[-1] + longest, total, longest))
    slots += (total,) * (part.sequences + -(-total // longest) - len(slots))
    for start, stop, length in zip(part.starts, slots[1:], lengths, strict=False):
        if length > stop - start:
            raise ValueError(f"column 'input_ids': a row of {length} tokens, but the plan gave it {stop - start} in the packed row")
    positions = _each(torch.tensor(part.starts, dtype=torch.int64), counts) + within
    input_ids = torch.zeros(total, dtype=torch.int64)
    input_ids[positions] = joined("input_ids").to(torch.int64)
    index = torch.zeros(part.sequences * longest, dtype=torch.int64)
    index[places] = torch.where(within > 0, positions, 0)
    boundaries = torch.tensor(slots, dtype=torch.int32)
    position_ids = torch.arange(total) - _each(boundaries[:-1].long(), boundaries.diff().long())
    return {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None],
        "boundaries": boundaries,
        "index": index.view(part.sequences, longest),
    }


def _each(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return values.repeat_interleave(counts)


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # From pageable memory: the copy is staged before the call returns, and the host does not wait for the device.
    return tensor.to(device, non_blocking=True)
