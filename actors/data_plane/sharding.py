"""Splits a batch over data-parallel ranks and into micro-batches, from metadata alone.

meta (N rows) ── shard ──► DP rank 0: micro-batch 0, 1, ...   (row numbers of the rank's own subset)
                           DP rank 1: micro-batch 0, 1, ...   (the same number of them: Megatron's collectives match)
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from actors.data_plane.meta import KVBatchMeta


class ShardPlan(BaseModel):
    """What one data-parallel rank computes in one call. Workers follow it and never repack.

    Attributes:
        meta: the rank's rows.
        micro_batches: row numbers (into `meta`) of each forward pass.
        padded_length: tokens to which every row of every rank is padded, so that pipeline messages have one shape.
        global_tokens: response tokens in the whole batch (all ranks): the denominator of token_mean.
        global_sequences: samples in the whole batch: the denominator of sequence_mean.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    meta: KVBatchMeta
    micro_batches: tuple[tuple[int, ...], ...]
    padded_length: int
    global_tokens: int
    global_sequences: int


def shard(meta: KVBatchMeta, *, data_parallel: int, micro_batch_size: int, pad_to_multiple_of: int = 8) -> list[ShardPlan]:
    """One plan per data-parallel rank: rows dealt in order of length, so that ranks carry about the same tokens.

    Args:
        meta: with `sequence_lengths` and a `response_length` tag per row.
        micro_batch_size: most rows in one forward pass.
        pad_to_multiple_of: the padded length divides by it (tensor parallelism with sequence parallelism needs that).

    Raises:
        ValueError: an empty batch, rows that do not divide by the ranks, or lengths or tags that are missing.
    """
    n = len(meta)
    if n == 0:
        raise ValueError(f"{meta.task_name or 'batch'}: nothing to shard, the batch is empty")
    if n % data_parallel:
        raise ValueError(f"{n} samples do not divide by {data_parallel} data-parallel ranks")
    if len(meta.sequence_lengths) != n or len(meta.tags) != n:
        raise ValueError(f"{meta.task_name or 'batch'}: sequence_lengths and tags are needed for each of {n} rows")
    longest = max(meta.sequence_lengths)
    padded = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    tokens = sum(int(tag["response_length"]) for tag in meta.tags)
    order = sorted(range(n), key=lambda row: (-meta.sequence_lengths[row], row))
    plans = []
    for rank in range(data_parallel):
        # Snake order (0 1 2 | 2 1 0 | ...): each rank gets one long and one short of every pair of deals.
        dealt = order[rank::data_parallel] if data_parallel == 1 else _snake(order, rank, data_parallel)
        rows = sorted(dealt)
        plans.append(
            ShardPlan(
                meta=meta.subset(rows),
                micro_batches=tuple(
                    tuple(range(start, min(start + micro_batch_size, len(rows)))) for start in range(0, len(rows), micro_batch_size)
                ),
                padded_length=padded,
                global_tokens=tokens,
                global_sequences=n,
            )
        )
    return plans


def _snake(order: list[int], rank: int, ranks: int) -> list[int]:
    return [order[start + (rank if (start // ranks) % 2 == 0 else ranks - 1 - rank)] for start in range(0, len(order), ranks)]
