"""Splits a batch over data-parallel ranks and into micro-batches, from metadata alone.

meta (N rows) ── plan_batch ──► DP rank 0: micro-batch 0, 1, ...
                                DP rank 1: micro-batch 0, 1, ...   (the same number of them: Megatron's collectives match)

A micro-batch in each layout, three sequences of 5, 3 and 2 tokens:

    padded, dynamic  [3, 5]   aaaaa          packed  [1, 10]   aaaaabbbcc
                              bbb..                  starts     0    5  8
                              cc...
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.packing import Bins, balanced, best_fit_decreasing, deal, even_runs, first_fit_decreasing, runs_within, split_to
from configs.batching import BatchingConfig


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """One forward pass.

    Attributes:
        rows: row numbers into the shard's meta, in the order in which they lie in the tensors. Empty: padding only.
        shape: [B, T] of the token ids that go through the model.
        starts: packed: position of each row's first token in the single row [1, T]; otherwise empty.
        sequences: sequences for which per-sequence buffers are sized, at least len(rows); B unless packed.
        longest: tokens to which per-sequence columns [sequences, longest] are padded, a token bucket where there are some; T unless packed.
    """

    rows: tuple[int, ...]
    shape: tuple[int, int]
    starts: tuple[int, ...] = ()
    sequences: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """What one data-parallel rank computes in one call. Workers follow it and never repack.

    Attributes:
        meta: the rank's rows.
        micro_batches: every row of `meta` once, in order.
        packed: the layout of all of them.
        global_tokens: response tokens in the whole batch (all ranks): the denominator of token_mean.
        global_sequences: samples in the whole batch: the denominator of sequence_mean. Neither counts rows with the tag `masked`.
    """

    meta: KVBatchMeta
    micro_batches: tuple[MicroBatchPlan, ...]
    packed: bool
    global_tokens: int
    global_sequences: int


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """All ranks' plans.

    Attributes:
        shards: one per data-parallel rank, each with the same number of micro-batches.
        token_efficiency: tokens of sequences / tokens that go through the model.
    """

    shards: tuple[ShardPlan, ...]
    token_efficiency: float


def plan_batch(meta: KVBatchMeta, batching: BatchingConfig, *, data_parallel: int, align: int = 8, sequence_align: int = 1) -> BatchPlan:
    """One plan per data-parallel rank, whose ranks carry about the same tokens.

    padded: every rank gets equally many rows, cut into micro-batches of one shape. dynamic: rows are grouped by length over the whole
    batch, and each micro-batch has its own shape. packed: all micro-batches have one shape, `sequences` and `longest`; ranks may
    differ in rows. Every micro-batch holds a row, unless `micro_batch_buckets` asks for more micro-batches than there are rows.

    Args:
        meta: with `sequence_lengths` and a `response_length` tag per row.
        align: every row's length in the model divides by it; tensor cores, tensor, sequence and context parallelism need that.
        sequence_align: packed: every sequence's slot divides by it, as context parallelism needs; it divides `align`.

    Raises:
        ValueError: alignments that do not divide, an empty batch, rows that do not divide by the ranks, lengths or tags that are
            missing, a sequence longer than the token budget, or a batch that fits no bucket.
    """
    n = len(meta)
    name = meta.task_name or "batch"
    if n == 0:
        raise ValueError(f"{name}: nothing to shard, the batch is empty")
    if n % data_parallel:
        raise ValueError(f"{name}: {n} samples do not divide by {data_parallel} data-parallel ranks")
    if len(meta.sequence_lengths) != n or len(meta.tags) != n:
        raise ValueError(f"{name}: sequence_lengths and tags are needed for each of {n} rows")
    if align % sequence_align:
        raise ValueError(f"sequence_align {sequence_align} does not divide align {align}")
    if wrong := [bucket for bucket in batching.token_buckets if bucket % align]:
        raise ValueError(f"token_buckets: {wrong[0]} does not divide by {align}, as a row's length in this parallel layout must")
    _check_lengths(meta, batching, align)
    if batching.mode == "packed":
        ranks = _packed(meta.sequence_lengths, batching, data_parallel, align, sequence_align)
    else:
        ranks = (_padded if batching.mode == "padded" else _dynamic)(meta.sequence_lengths, batching, data_parallel, align)
    counted = [tag for tag in meta.tags if not tag.get("masked")]  # the others' sample_mask is 0
    totals = {"global_tokens": sum(int(tag["response_length"]) for tag in counted), "global_sequences": max(1, len(counted))}
    shards = tuple(_shard(meta, parts, packed=batching.mode == "packed", **totals) for parts in ranks)
    computed = sum(part.shape[0] * part.shape[1] for parts in ranks for part in parts)
    return BatchPlan(shards=shards, token_efficiency=sum(meta.sequence_lengths) / computed)


def _check_lengths(meta: KVBatchMeta, batching: BatchingConfig, align: int) -> None:
    shortest, longest = min(meta.sequence_lengths), max(meta.sequence_lengths)
    if shortest < 1:
        raise ValueError(
            f"key {meta.keys[meta.sequence_lengths.index(shortest)]!r}: a sequence of {shortest} tokens, a row needs one or more"
        )
    named = f"key {meta.keys[meta.sequence_lengths.index(longest)]!r}: a sequence of {longest} tokens ({_up(longest, align)} when aligned)"
    budget = batching.tokens_per_micro_batch
    if budget is not None and _up(longest, align) > budget:
        raise ValueError(f"{named} exceeds tokens_per_micro_batch ({budget}): raise it, or generate at most {budget // align * align}")
    if batching.token_buckets and _up(longest, align) > batching.token_buckets[-1]:
        raise ValueError(f"{named} fits none of token_buckets {list(batching.token_buckets)}: add a larger one")
    if batching.mode == "dynamic" and batching.sequence_buckets and budget is not None:
        padded, rows = _bucket(batching.token_buckets, _up(longest, align)), batching.sequence_buckets[0]
        if padded * rows > budget:
            raise ValueError(
                f"{named} takes {padded} tokens in each of at least {rows} rows (sequence_buckets {list(batching.sequence_buckets)}), "
                f"more than tokens_per_micro_batch ({budget}): raise it, or add a smaller bucket"
            )


def _rectangle(rows: list[int], height: int, longest: int) -> MicroBatchPlan:
    return MicroBatchPlan(rows=tuple(rows), shape=(height, longest), sequences=height, longest=longest)


def _padded(lengths: Sequence[int], batching: BatchingConfig, ranks: int, align: int) -> list[list[MicroBatchPlan]]:
    each = len(lengths) // ranks
    size = min(batching.micro_batch_size, each)
    count = _bins(ranks * -(-each // size), batching, len(lengths), ranks) // ranks
    height = _bucket(batching.sequence_buckets, size)
    longest = _bucket(batching.token_buckets, _up(max(lengths), align))
    filled = min(count, each)
    edges = [-(-min(part, filled) * each // filled) for part in range(count + 1)]
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    rounds = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    rounds[1::2] = [dealt[::-1] for dealt in rounds[1::2]]  # in snake order each rank gets one long and one short of every pair
    dealt = [sorted(rows) for rows in zip(*rounds, strict=True)]
    return [[_rectangle(rows[start:stop], height, longest) for start, stop in pairwise(edges)] for rows in dealt]


def _dynamic(lengths: Sequence[int], batching: BatchingConfig, ranks: int, align: int) -> list[list[MicroBatchPlan]]:
    budget, buckets = batching.tokens_per_micro_batch, batching.sequence_buckets
    assert budget is not None  # BatchingConfig checks it
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    padded = [_bucket(batching.token_buckets, _up(lengths[row], align)) for row in order]
    count = _bins(len(runs_within(padded, budget, buckets)), batching, len(lengths), ranks)

    def shape(run: list[int]) -> tuple[int, int]:
        return _bucket(buckets, max(len(run), 1)), padded[run[0]] if run else _bucket(batching.token_buckets, align)

    runs = split_to(
        even_runs(padded, count, budget, buckets),
        count,
        cost=lambda run: math.prod(shape(run)),
        halve=lambda run: (run[: len(run) // 2], run[len(run) // 2 :]),
    )

    def part(run: list[int]) -> MicroBatchPlan:
        height, longest = shape(run)
        return _rectangle(sorted(order[i] for i in run), height, longest)

    dealt = deal([sum(lengths[order[i]] for i in run) for run in runs], ranks)
    return [[part(runs[number]) for number in numbers] for numbers in dealt]


def _packed(lengths: Sequence[int], batching: BatchingConfig, ranks: int, align: int, unit: int) -> list[list[MicroBatchPlan]]:
    sizes = [-(-length // unit) for length in lengths]  # all sums below are in units of `unit` tokens
    bins = split_to(
        *_fill(sizes, batching, ranks, align, unit),
        cost=lambda members: sum(sizes[row] for row in members),
        halve=lambda members: (members[::2], members[1::2]),
    )
    width = _bucket(batching.token_buckets, _up(unit * max(sum(sizes[row] for row in members) for members in bins), align))
    sequences = _bucket(batching.sequence_buckets, max(map(len, bins)))
    longest = _bucket(batching.token_buckets, _up(max(lengths), align))

    def part(members: list[int]) -> MicroBatchPlan:
        rows = sorted(members)
        starts = accumulate((unit * sizes[row] for row in rows[:-1]), initial=0) if rows else ()
        return MicroBatchPlan(rows=tuple(rows), shape=(1, width), starts=tuple(starts), sequences=sequences, longest=longest)

    dealt = deal([sum(lengths[row] for row in members) for members in bins], ranks)
    return [[part(bins[number]) for number in numbers] for numbers in dealt]


def _fill(sizes: list[int], batching: BatchingConfig, ranks: int, align: int, unit: int) -> tuple[Bins, int]:
    # Bins of rows, and how many bins there are to be.
    budget = batching.tokens_per_micro_batch
    assert budget is not None  # BatchingConfig checks it
    n = len(sizes)
    capacity = (batching.token_buckets[-1] if batching.token_buckets else budget // align * align) // unit
    most = batching.sequence_buckets[-1] if batching.sequence_buckets else n
    if batching.packing == "first_fit_decreasing":
        bins = first_fit_decreasing(sizes, capacity, most)
        return bins, _bins(len(bins), batching, n, ranks)

    def level(count: int) -> Bins | None:
        tightest = _up(unit * max(-(-sum(sizes) // count), max(sizes)), align)
        return balanced(sizes, count, low=_bucket(batching.token_buckets, tightest) // unit, high=capacity, most=most)

    count = _bins(max(-(-sum(sizes) // capacity), -(-n // most)), batching, n, ranks)
    filled = level(count)
    if filled is None:
        opened = best_fit_decreasing(sizes, capacity, most, n)
        assert opened is not None  # a row fits a bin by itself
        count = _bins(sum(1 for members in opened if members), batching, n, ranks)
        filled = level(count)
        assert filled is not None  # best fit opens the same bins again
    return filled, count


def _bins(least: int, batching: BatchingConfig, n: int, ranks: int) -> int:
    # Micro-batches of all ranks: equally many on each, and an allowed number.
    each = -(-least // ranks)
    buckets = batching.micro_batch_buckets
    if buckets and each > buckets[-1]:
        knob = "micro_batch_size" if batching.mode == "padded" else "tokens_per_micro_batch"
        raise ValueError(
            f"{n} samples on {ranks} data-parallel ranks need {each} micro-batches per rank, more than any of micro_batch_buckets "
            f"{list(buckets)}: add a larger one, or raise {knob} ({getattr(batching, knob)})"
        )
    return ranks * _bucket(buckets, each)


def _shard(meta: KVBatchMeta, parts: list[MicroBatchPlan], *, packed: bool, global_tokens: int, global_sequences: int) -> ShardPlan:
    # The parts' rows are numbers in the whole batch; those of the shard's micro-batches are numbers in the shard.
    edges = accumulate((len(part.rows) for part in parts), initial=0)
    return ShardPlan(
        meta=meta.subset([row for part in parts for row in part.rows]),
        micro_batches=tuple(
            replace(part, rows=tuple(range(start, stop))) for (start, stop), part in zip(pairwise(edges), parts, strict=True)
        ),
        packed=packed,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
    )


def _bucket(buckets: Sequence[int], value: int) -> int:
    # The smallest bucket that holds the value; the value itself without buckets.
    return buckets[bisect_left(buckets, value)] if buckets else value


def _up(length: int, align: int) -> int:
    return -(-length // align) * align
