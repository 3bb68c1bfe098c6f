"""Splits a batch over data-parallel ranks and into micro-batches, from metadata alone.

meta (N rows) ── plan_batch ──► DP rank 0: micro-batch 0, 1, ...
                                DP rank 1: micro-batch 0, 1, ...   (the same number of them: Megatron's collectives match)

A micro-batch in each layout, three sequences of 5, 3 and 2 tokens:

    padded, dynamic  [3, 5]   aaaaa          packed  [1, 10]   aaaaabbbcc
                              bbb..                  starts     0    5  8
                              cc...
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from actors.data_plane.meta import KVBatchMeta
from configs.batching import BatchingConfig


class MicroBatchPlan(BaseModel):
    """One forward pass.

    Attributes:
        rows: row numbers into the shard's meta, in the order in which they lie in the tensors. Empty: padding only.
        shape: [B, T] of the token ids that go through the model.
        starts: packed: position of each row's first token in the single row [1, T]; padded: empty.
        sequences: sequences for which per-sequence buffers are sized, at least len(rows); B when padded.
        longest: tokens to which per-sequence columns [sequences, longest] are padded; T when padded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: tuple[int, ...]
    shape: tuple[int, int]
    starts: tuple[int, ...] = ()
    sequences: int
    longest: int


class ShardPlan(BaseModel):
    """What one data-parallel rank computes in one call. Workers follow it and never repack.

    Attributes:
        meta: the rank's rows.
        rows: their row numbers in the whole batch.
        micro_batches: every row of `meta` once.
        packed: the layout of all of them.
        global_tokens: response tokens in the whole batch (all ranks): the denominator of token_mean.
        global_sequences: samples in the whole batch: the denominator of sequence_mean.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    meta: KVBatchMeta
    rows: tuple[int, ...]
    micro_batches: tuple[MicroBatchPlan, ...]
    packed: bool
    global_tokens: int
    global_sequences: int


class BatchPlan(BaseModel):
    """All ranks' plans.

    Attributes:
        shards: one per data-parallel rank, each with the same number of micro-batches.
        token_efficiency: tokens of sequences / tokens that go through the model.
        token_imbalance: most tokens on a rank / mean tokens of a rank - 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shards: tuple[ShardPlan, ...]
    token_efficiency: float
    token_imbalance: float

    @property
    def permutation(self) -> tuple[int, ...]:
        """Row numbers of the whole batch in the order rank 0's rows, rank 1's rows, ..."""
        return tuple(row for shard in self.shards for row in shard.rows)

    def restore(self, values: list[Any]) -> list[Any]:
        """Values in the order of `permutation`, put back into the order of the whole batch."""
        order = self.permutation
        if len(values) != len(order):
            raise ValueError(f"{len(values)} values for {len(order)} rows")
        out: list[Any] = [None] * len(order)
        for row, value in zip(order, values, strict=True):
            out[row] = value
        return out


def plan_batch(meta: KVBatchMeta, batching: BatchingConfig, *, data_parallel: int, align: int = 8) -> BatchPlan:
    """One plan per data-parallel rank, whose ranks carry about the same tokens.

    Args:
        meta: with `sequence_lengths` and a `response_length` tag per row.
        align: every row's length in the model (packed: every sequence's, too) divides by it; context, tensor and sequence
            parallelism need that.

    Raises:
        ValueError: an empty batch, rows that do not divide by the ranks, lengths or tags that are missing, a sequence longer
            than the token budget, or a batch that fits no bucket.
    """
    n = len(meta)
    if n == 0:
        raise ValueError(f"{meta.task_name or 'batch'}: nothing to shard, the batch is empty")
    if n % data_parallel:
        raise ValueError(f"{n} samples do not divide by {data_parallel} data-parallel ranks")
    if len(meta.sequence_lengths) != n or len(meta.tags) != n:
        raise ValueError(f"{meta.task_name or 'batch'}: sequence_lengths and tags are needed for each of {n} rows")
    if batching.mode != "padded":
        raise NotImplementedError(batching.mode)
    longest = max(meta.sequence_lengths)
    padded = -(-longest // align) * align
    tokens = sum(int(tag["response_length"]) for tag in meta.tags)
    order = sorted(range(n), key=lambda row: (-meta.sequence_lengths[row], row))
    size = min(batching.micro_batch_size, n // data_parallel)
    shards = []
    for rank in range(data_parallel):
        rows = tuple(sorted(_snake(order, rank, data_parallel)))
        starts = range(0, len(rows), size)
        shards.append(
            ShardPlan(
                meta=meta.subset(rows),
                rows=rows,
                micro_batches=tuple(
                    MicroBatchPlan(
                        rows=tuple(range(start, min(start + size, len(rows)))), shape=(size, padded), sequences=size, longest=padded
                    )
                    for start in starts
                ),
                packed=False,
                global_tokens=tokens,
                global_sequences=n,
            )
        )
    loads = [sum(shard.meta.sequence_lengths) for shard in shards]
    computed = sum(b.shape[0] * b.shape[1] for shard in shards for b in shard.micro_batches)
    return BatchPlan(
        shards=tuple(shards),
        token_efficiency=sum(loads) / computed,
        token_imbalance=max(loads) * data_parallel / sum(loads) - 1,
    )


def _snake(order: list[int], rank: int, ranks: int) -> list[int]:
    # Snake order (0 1 2 | 2 1 0 | ...): each rank gets one long and one short of every pair of deals.
    return [order[start + (rank if (start // ranks) % 2 == 0 else ranks - 1 - rank)] for start in range(0, len(order), ranks)]
