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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from actors.data_plane.sharding import MicroBatchPlan, ShardPlan

BASE = ("input_ids", "token_mask", "sample_mask")  # columns that every stage reads
CANDIDATES = ("teacher_ids", "teacher_logprobs")  # with policy.teacher.top_k: k values per token, int32 and float32

Columns = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Shapes follow from the plan alone, never from the rows; whatever is no real token is 0 and masked.

    Attributes:
        input_ids, position_ids: [B, T] int64. Positions restart at each sequence.
        token_mask: [S, L] bool. sample_mask: [S, L] float32, the same for all tokens of a row.
        totals: [2] float32, response tokens and samples of the whole batch: denominators of losses. A tensor, so that a captured graph
            reads those of each batch. temperature, loss_scale: [1] float32, that logits are divided by, and that
            the loss is multiplied by for the backward pass; likewise.
        rows: numbers of the real sequences in the plan's meta; empty: padding only. lengths: their tokens.
        boundaries: packed: [n + 1] int32, where each of n slots of the row begins, then T: a slot per sequence, then the rest of the row
            in slots of its own; n = S + ceil(T / L) - 1 always suffices, as none is longer than L. padded: None.
        index: packed: [S, L] int64, the position in the row of each token that has a log-probability, else 0; padded: None.
        columns: [S, L] float32 each, by name: what an objective reads, and the weight columns of its loss.
        teacher_ids, teacher_logprobs: [B, T, k] int64 and float32, aligned with `input_ids`: tokens that might have been in that place,
            and how probable the teacher holds them; None: no objective reads them.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    token_mask: torch.Tensor
    sample_mask: torch.Tensor
    totals: torch.Tensor
    temperature: torch.Tensor
    loss_scale: torch.Tensor
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    boundaries: torch.Tensor | None = None
    index: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    teacher_ids: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None

    @property
    def counted(self) -> torch.Tensor:
        """[S, L] float32: 1 on the tokens that losses and metrics count."""
        return self.token_mask * self.sample_mask

    def with_columns(self, columns: Mapping[str, torch.Tensor]) -> MicroBatch:
        """With further columns; those that it has are replaced."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def with_room(self, candidates: int) -> MicroBatch:
        """With zeros for so many candidates per token, if it has none: then its shapes are those of one that has."""
        if self.teacher_ids is not None or not candidates:
            return self
        ids = self.input_ids.new_zeros((*self.input_ids.shape, candidates))
        return dataclasses.replace(self, teacher_ids=ids, teacher_logprobs=ids.float())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of it, by name."""
        found = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return {**found, **self.columns}

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
        """(row number, its values without padding) of a tensor [S, L, ...], on the CPU."""
        host = values.detach().cpu()
        for i, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            yield row, host[i, :length].clone()


def build(columns: Columns, plan: ShardPlan, device: torch.device, temperature: float = 1.0, loss_scale: float = 1.0) -> list[MicroBatch]:
    """The plan's micro-batches.

    Args:
        columns: by name, one CPU tensor per row of the plan's meta, those of `BASE` at least. The others have a value per token, or one
            for the row, which all its tokens get; those of `CANDIDATES` have k values per token.

    Raises:
        ValueError: rows whose lengths are not those that the plan was made for, or differ between columns.
    """
    totals = torch.tensor([max(plan.global_tokens, 1), plan.global_sequences], dtype=torch.float32, device=device)
    scalars = {"temperature": temperature, "loss_scale": loss_scale}
    shared = {"totals": totals} | {name: torch.tensor([value], dtype=torch.float32, device=device) for name, value in scalars.items()}
    return [_micro_batch(columns, part, plan.packed, shared, device) for part in plan.micro_batches]


def _micro_batch(
    columns: Columns, part: MicroBatchPlan, packed: bool, shared: Mapping[str, torch.Tensor], device: torch.device
) -> MicroBatch:
    # A few tensor operations per column, however many rows there are: a GPU waits meanwhile.
    rows, shape = part.rows, (part.sequences, part.longest)
    lengths = tuple(len(columns["input_ids"][row]) for row in rows)
    counts = torch.tensor(lengths, dtype=torch.int64)
    within = torch.arange(sum(lengths)) - _each(counts.cumsum(0) - counts, counts)  # every token's position in its sequence,
    places = _each(torch.arange(len(rows)) * part.longest, counts) + within  # in [S * L],
    positions = _each(torch.tensor(part.starts, dtype=torch.int64), counts) + within if packed else places  # and in [B * T]

    def scattered(name: str, dtype: torch.dtype, at: torch.Tensor = places, shape: tuple[int, int] = shape) -> torch.Tensor:
        each = columns[name][0].shape[1:]
        out = torch.zeros((*shape, *each), dtype=dtype)
        if rows:
            out.view(-1, *each)[at] = _joined(name, [columns[name][row] for row in rows], counts, part.longest).to(dtype)
        return _to(out, device)

    input_ids = scattered("input_ids", torch.int64, positions, part.shape)
    candidates = {
        name: scattered(name, dtype, positions, part.shape)
        for name, dtype in zip(CANDIDATES, (torch.int64, torch.float32), strict=True) if name in columns
    }  # fmt: skip
    position_ids, boundaries, index = torch.arange(part.shape[1], device=device).expand(part.shape), None, None
    if packed:
        slots = _slots(part, lengths)
        boundaries, found = _to(slots, device), torch.zeros(shape, dtype=torch.int64)
        position_ids = _to(torch.arange(part.shape[1]) - _each(slots[:-1].long(), slots.diff().long()), device)[None]
        found.view(-1)[places] = torch.where(within > 0, positions, 0)
        index = _to(found, device)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        token_mask=scattered("token_mask", torch.bool),
        sample_mask=scattered("sample_mask", torch.float32),
        rows=rows,
        lengths=lengths,
        boundaries=boundaries,
        index=index,
        columns={name: scattered(name, torch.float32) for name in columns if name not in (*BASE, *CANDIDATES)},
        **candidates,
        **shared,
    )


def _joined(name: str, rows: list[torch.Tensor], counts: torch.Tensor, longest: int) -> torch.Tensor:
    """The values of all tokens, one row after the other."""
    if rows[0].dim() == 0:
        return _each(torch.stack(rows), counts)
    for row, length in zip(rows, counts.tolist(), strict=True):
        if len(row) > longest:
            raise ValueError(f"column {name!r}: a row of {len(row)} tokens, but sequence_lengths promised at most {longest}")
        if len(row) != length:
            raise ValueError(f"column {name!r}: a row of {len(row)} tokens, but its input_ids are {length}")
    return torch.cat(rows)


def _slots(part: MicroBatchPlan, lengths: tuple[int, ...]) -> torch.Tensor:
    """`MicroBatch.boundaries` of a packed row."""
    total, longest = part.shape[1], part.longest
    # From the last sequence on a slot begins every `longest` tokens: attention kernels work to the longest slot that they are told of.
    filled = part.starts or (0,)
    slots = (*filled, *range(filled[-1] + longest, total, longest))
    slots += (total,) * (part.sequences + -(-total // longest) - len(slots))
    for start, stop, length in zip(part.starts, slots[1:], lengths, strict=False):
        if length > stop - start:
            raise ValueError(f"column 'input_ids': a row of {length} tokens, but the plan gave it {stop - start} in the packed row")
    return torch.tensor(slots, dtype=torch.int32)


def _each(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return values.repeat_interleave(counts)


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # From pageable memory: the copy is staged before the call returns, and the host does not wait for the device.
    return tensor.to(device, non_blocking=True)
