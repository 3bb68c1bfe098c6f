"""Rows from the data plane to padded tensors. Every micro-batch of a call has the same shape: pipeline messages need that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from actors.data_plane.interface import DataPlane
from actors.data_plane.sharding import ShardPlan

_TOKEN_FIELDS = frozenset({"generation_logprobs", "policy_logprobs", "reference_logprobs"})


class MissingColumnsError(ValueError):
    """A batch lacks columns that the stage reads; the message names both."""


@dataclass(frozen=True)
class MicroBatch:
    """Padded on the right. Rows past `count` are padding too: their masks are 0.

    Attributes:
        input_ids: [B, T] int64. position_ids: [B, T] int64. token_mask: [B, T] bool. sample_mask: [B] float32.
        advantages: [B] float32 or None. The three log-probability columns: [B, T] float32 or None.
        lengths: tokens of each of the `count` real rows.
        rows: their numbers in the plan's meta.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    token_mask: torch.Tensor
    sample_mask: torch.Tensor
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    advantages: torch.Tensor | None = None
    generation_logprobs: torch.Tensor | None = None
    policy_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.rows)


def fetch(plane: DataPlane, plan: ShardPlan, fields: Sequence[str], device: torch.device) -> list[MicroBatch]:
    """Read the columns of a plan's rows once, and pad them into its micro-batches.

    Raises:
        MissingColumnsError: a column that no stage has written. ValueError: a row longer than the plan's padded length.
    """
    missing = set(fields) - plan.meta.fields
    if missing:
        raise MissingColumnsError(
            f"wanted columns {sorted(fields)}, the batch has {sorted(plan.meta.fields)}: {', '.join(sorted(missing))} not written yet"
        )
    columns = plane.get(plan.meta, fields)
    return [_pad(columns, part.rows, part.shape[0], part.shape[1], device) for part in plan.micro_batches]


def _pad(columns: dict[str, list[torch.Tensor]], rows: tuple[int, ...], size: int, length: int, device: torch.device) -> MicroBatch:
    def tokens(name: str, dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(size, length, dtype=dtype)
        for i, row in enumerate(rows):
            value = columns[name][row]
            if len(value) > length:
                raise ValueError(f"column {name!r}: a row of {len(value)} tokens, but sequence_lengths promised at most {length}")
            out[i, : len(value)] = value
        return out.to(device)

    def scalars(name: str) -> torch.Tensor:
        out = torch.zeros(size)
        out[: len(rows)] = torch.stack([columns[name][row] for row in rows])
        return out.to(device)

    return MicroBatch(
        input_ids=tokens("input_ids", torch.int64),
        position_ids=torch.arange(length, device=device).expand(size, length),
        token_mask=tokens("token_mask", torch.bool),
        sample_mask=scalars("sample_mask"),
        rows=rows,
        lengths=tuple(len(columns["input_ids"][row]) for row in rows),
        advantages=scalars("advantages") if "advantages" in columns else None,
        **{name: tokens(name, torch.float32) for name in _TOKEN_FIELDS & set(columns)},
    )


def unpad(batch: MicroBatch, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(row number, its values without padding) of a [B, T] tensor, on the CPU."""
    host = values.detach().cpu()
    for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
        yield row, host[i, :length].clone()
