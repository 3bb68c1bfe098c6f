"""plan_batch(): every sample on exactly one rank, ranks that stay in step, and shapes that keep their promises."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import BatchPlan, MicroBatchPlan, ShardPlan, plan_batch
from configs.batching import BatchingConfig

Case = tuple[list[int], BatchingConfig, int, int, int]


def make(lengths: list[int]) -> KVBatchMeta:
    return KVBatchMeta(
        partition_id="p",
        keys=tuple(f"k{n}" for n in range(len(lengths))),
        sequence_lengths=tuple(lengths),
        tags=tuple({"response_length": length // 2, "length": length} for length in lengths),
    )


def plan(lengths: list[int], data_parallel: int = 1, align: int = 8, **batching: object) -> BatchPlan:
    return plan_batch(make(lengths), BatchingConfig.model_validate(batching), data_parallel=data_parallel, align=align)


def shard(meta: KVBatchMeta, *, data_parallel: int, micro_batch_size: int, align: int = 8) -> tuple[ShardPlan, ...]:
    return plan_batch(meta, BatchingConfig(micro_batch_size=micro_batch_size), data_parallel=data_parallel, align=align).shards


def rows_of(shard: ShardPlan) -> list[int]:
    """Row numbers in the whole batch that `make` gave."""
    return [int(key.removeprefix("k")) for key in shard.meta.keys]


def imbalance(planned: BatchPlan) -> float:
    """Most tokens on a rank / mean tokens of a rank - 1."""
    loads = [sum(shard.meta.sequence_lengths) for shard in planned.shards]
    return max(loads) * len(loads) / sum(loads) - 1


def up(length: int, align: int) -> int:
    return -(-length // align) * align


def bucket(buckets: tuple[int, ...], value: int) -> int:
    return min(b for b in buckets if b >= value) if buckets else value


def naive_fit(sizes: list[int], capacity: int, most: int, *, best: bool) -> int:
    """Bins that first-fit (or best-fit) decreasing opens."""
    bins: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [members for members in bins if sum(members) + size <= capacity and len(members) < most]
        if not fitting:
            bins.append([size])
        elif best:
            max(fitting, key=sum).append(size)
        else:
            fitting[0].append(size)
    return len(bins)


@st.composite
def cases(draw: st.DrawFn, modes: tuple[str, ...] = ("padded", "dynamic", "packed")) -> Case:
    """A batch that can be planned: lengths from 1 to the longest that the budget and the buckets hold."""
    mode = draw(st.sampled_from(modes))
    ranks = draw(st.integers(1, 5))
    n = ranks * draw(st.integers(1, 8))
    align = draw(st.sampled_from([1, 8, 64]))
    units = draw(st.integers(1, 40))
    budget = units * align + draw(st.integers(0, align - 1))
    token_buckets = sorted(align * u for u in draw(st.sets(st.integers(1, units), max_size=3)))
    longest = token_buckets[-1] if token_buckets else units * align
    lengths = draw(st.lists(st.one_of(st.integers(1, longest), st.just(longest)), min_size=n, max_size=n))
    sequence_buckets = sorted(draw(st.sets(st.integers(1, 12), max_size=3)))
    batching: dict[str, object] = {"mode": mode, "token_buckets": token_buckets}
    if mode == "padded":
        size = draw(st.integers(1, sequence_buckets[-1] if sequence_buckets else 9))
        batching["micro_batch_size"] = size
    else:
        batching["tokens_per_micro_batch"] = budget
        batching["packing"] = draw(st.sampled_from(["balanced", "first_fit_decreasing"]))
    if mode == "dynamic" and sequence_buckets:
        # One row of the longest has to fit a bucket of rows.
        sequence_buckets = sorted({1, *sequence_buckets} if longest * sequence_buckets[0] > budget else sequence_buckets)
    batching["sequence_buckets"] = sequence_buckets
    # As many micro-batches as rows always do; more than that leaves some empty.
    if draw(st.booleans()):
        batching["micro_batch_buckets"] = sorted({*draw(st.sets(st.integers(1, 8), max_size=2)), draw(st.integers(n // ranks, 10))})
    unit = draw(st.sampled_from([unit for unit in (1, 2, align) if align % unit == 0]))
    return lengths, BatchingConfig.model_validate(batching), ranks, align, unit


def parts(planned: BatchPlan) -> list[tuple[MicroBatchPlan, list[int]]]:
    """Every micro-batch, with the lengths of its rows."""
    return [(b, [s.meta.sequence_lengths[row] for row in b.rows]) for s in planned.shards for b in s.micro_batches]


@given(cases())
def test_no_sample_is_lost_or_doubled_and_ranks_stay_in_step(case: Case) -> None:
    lengths, batching, ranks, align, unit = case
    meta = make(lengths)
    planned = plan_batch(meta, batching, data_parallel=ranks, align=align, sequence_align=unit)

    assert len(planned.shards) == ranks
    assert sorted(key for s in planned.shards for key in s.meta.keys) == sorted(meta.keys)
    (count,) = {len(s.micro_batches) for s in planned.shards}
    assert not batching.micro_batch_buckets or count in batching.micro_batch_buckets
    empty = sum(not b.rows for s in planned.shards for b in s.micro_batches)
    assert empty == max(ranks * count - len(lengths), 0), "padding only when there are fewer rows than micro-batches"
    for s in planned.shards:
        assert [row for b in s.micro_batches for row in b.rows] == list(range(len(s.meta)))
        assert s.meta == meta.subset(rows_of(s))
        assert s.packed == (batching.mode == "packed")
        assert s.global_tokens == sum(length // 2 for length in lengths)
        assert s.global_sequences == len(lengths)
        assert [tag["length"] for tag in s.meta.tags] == list(s.meta.sequence_lengths), "tags ride with their rows"

    order = [row for s in planned.shards for row in rows_of(s)]
    assert sorted(order) == list(range(len(lengths)))
    assert [length for s in planned.shards for length in s.meta.sequence_lengths] == [lengths[row] for row in order]
    assert plan_batch(make(lengths), batching, data_parallel=ranks, align=align, sequence_align=unit) == planned, "deterministic"


@given(cases())
def test_shapes_hold_the_rows_within_budget_and_buckets(case: Case) -> None:
    lengths, batching, ranks, align, unit = case
    planned = plan_batch(make(lengths), batching, data_parallel=ranks, align=align, sequence_align=unit)
    for b, inside in parts(planned):
        assert all(t % align == 0 and (not batching.token_buckets or t in batching.token_buckets) for t in (b.shape[1], b.longest))
        assert not batching.sequence_buckets or b.sequences in batching.sequence_buckets
        assert len(b.rows) <= b.sequences
        assert max(inside, default=0) <= b.longest <= b.shape[1]
        if batching.tokens_per_micro_batch is not None:
            assert b.shape[0] * b.shape[1] <= batching.tokens_per_micro_batch
        if batching.mode != "packed":
            assert (b.shape, b.starts) == ((b.sequences, b.longest), ())


@given(cases())
def test_the_efficiency_is_what_it_says(case: Case) -> None:
    lengths, batching, ranks, align, unit = case
    planned = plan_batch(make(lengths), batching, data_parallel=ranks, align=align, sequence_align=unit)
    computed = sum(b.shape[0] * b.shape[1] for b, _ in parts(planned))
    assert planned.token_efficiency == pytest.approx(sum(lengths) / computed)


@given(cases(("padded",)))
def test_padded_ranks_do_the_same_at_every_step(case: Case) -> None:
    lengths, batching, ranks, align, unit = case
    planned = plan_batch(make(lengths), batching, data_parallel=ranks, align=align, sequence_align=unit)
    assert len({tuple((len(b.rows), b.shape) for b in s.micro_batches) for s in planned.shards}) == 1
    size = min(batching.micro_batch_size, len(lengths) // ranks)
    for b, _ in parts(planned):
        assert len(b.rows) <= size
        assert b.shape == (bucket(batching.sequence_buckets, size), bucket(batching.token_buckets, up(max(lengths), align)))
    loads = [sum(s.meta.sequence_lengths) for s in planned.shards]
    # Dealt in a snake over sorted lengths, two ranks differ by less than the spread of one row.
    assert max(loads) - min(loads) <= max(lengths) - min(lengths)


@given(cases(("dynamic",)))
def test_dynamic_micro_batches_hold_similar_lengths_without_waste(case: Case) -> None:
    lengths, batching, ranks, align, unit = case
    planned = plan_batch(make(lengths), batching, data_parallel=ranks, align=align, sequence_align=unit)
    spans = []
    for b, inside in parts(planned):
        if inside:
            wanted = bucket(batching.sequence_buckets, len(inside)), bucket(batching.token_buckets, up(max(inside), align))
            assert b.shape == wanted, "no larger than its own rows need"
            spans.append((min(inside), max(inside)))
    spans.sort()
    assert all(low >= high for (_, high), (low, _) in pairwise(spans)), "grouped by length over the whole batch"


@given(cases(("packed",)))
def test_packed_sequences_lie_one_after_the_other_in_one_shape(case: Case) -> None:
    lengths, batching, ranks, align, unit = case
    planned = plan_batch(make(lengths), batching, data_parallel=ranks, align=align, sequence_align=unit)
    assert len({(b.shape, b.sequences, b.longest) for b, _ in parts(planned)}) == 1
    ends = []
    for b, inside in parts(planned):
        assert b.shape[0] == 1
        assert len(b.starts) == len(inside)
        end = 0
        for start, length in zip(b.starts, inside, strict=True):
            assert start == end, "no gap, no overlap"
            end = up(start + length, unit)
        ends.append(up(end, align))
    first = parts(planned)[0][0]
    assert first.shape[1] == bucket(batching.token_buckets, max(ends)), "as wide as the fullest"
    assert first.sequences == bucket(batching.sequence_buckets, max(len(inside) for _, inside in parts(planned)))
    assert first.longest == bucket(batching.token_buckets, up(max(lengths), align))
    assert imbalance(planned) <= 1 / planned.token_efficiency - 1 + 1e-9, "no rank carries more than its shape holds"


@given(cases(("packed",)))
def test_packed_micro_batches_are_few(case: Case) -> None:
    lengths, batching, ranks, align, unit = case
    count = len(plan_batch(make(lengths), batching, data_parallel=ranks, align=align, sequence_align=unit).shards[0].micro_batches)
    capacity = batching.token_buckets[-1] if batching.token_buckets else (batching.tokens_per_micro_batch or 0) // align * align
    most = batching.sequence_buckets[-1] if batching.sequence_buckets else len(lengths)
    sizes = [up(length, unit) for length in lengths]
    fewest = bucket(batching.micro_batch_buckets, max(-(-sum(sizes) // (ranks * capacity)), -(-len(sizes) // (ranks * most)), 1))
    best = batching.packing == "balanced"
    fitted = bucket(batching.micro_batch_buckets, -(-naive_fit(sizes, capacity, most, best=best) // ranks))
    assert fewest <= count <= fitted
    assert best or count == fitted


def test_a_large_long_tailed_batch_is_packed_tightly() -> None:
    source = random.Random(0)
    lengths = [max(1, min(4096, round(source.lognormvariate(6.5, 0.8)))) for _ in range(4096)]
    planned = plan(lengths, 64, mode="packed", tokens_per_micro_batch=8192)
    assert planned.token_efficiency >= 0.97
    assert imbalance(planned) <= 0.03
    fitted = plan(lengths, 64, mode="packed", tokens_per_micro_batch=8192, packing="first_fit_decreasing")
    assert planned.token_efficiency > fitted.token_efficiency


def test_balanced_bins_take_more_micro_batches_only_when_the_sequences_do_not_fit() -> None:
    # 3 x 24 tokens are 72 <= 2 x 40, but no two sequences share a row of 40.
    planned = plan([24, 24, 24], mode="packed", tokens_per_micro_batch=40)
    assert [b.shape for b, _ in parts(planned)] == [(1, 24)] * 3
    planned = plan([24, 8, 16], mode="packed", tokens_per_micro_batch=40)
    assert [b.shape for b, _ in parts(planned)] == [(1, 24)] * 2


def test_the_largest_bucket_of_sequences_limits_who_shares() -> None:
    planned = plan([8] * 6, mode="packed", tokens_per_micro_batch=64, sequence_buckets=(1, 2))
    assert [(len(b.rows), b.sequences, b.shape) for b, _ in parts(planned)] == [(2, 2, (1, 16))] * 3


def test_micro_batches_beyond_the_rows_are_padding() -> None:
    for batching in (
        {"mode": "padded"},
        {"mode": "dynamic", "tokens_per_micro_batch": 64},
        {"mode": "packed", "tokens_per_micro_batch": 64},
    ):
        planned = plan([9, 20], 2, **batching, micro_batch_buckets=(3,))
        assert [[len(b.rows) for b in s.micro_batches] for s in planned.shards] == [[1, 0, 0], [1, 0, 0]]
        assert all(b.shape[0] * b.shape[1] > 0 and b.starts == () for b, inside in parts(planned) if not inside)


def test_the_same_batch_gives_the_same_plans() -> None:
    meta = make([5, 5, 5, 9, 2, 2])
    assert shard(meta, data_parallel=2, micro_batch_size=2) == shard(meta, data_parallel=2, micro_batch_size=2)


def test_one_rank_keeps_the_order() -> None:
    (planned,) = shard(make([3, 9, 1]), data_parallel=1, micro_batch_size=2)
    assert planned.meta.keys == ("k0", "k1", "k2")
    assert [b.rows for b in planned.micro_batches] == [(0, 1), (2,)]


@pytest.mark.parametrize("mode", ["padded", "dynamic", "packed"])
def test_what_cannot_be_sharded_is_refused(mode: str) -> None:
    batching = {"mode": mode} | ({} if mode == "padded" else {"tokens_per_micro_batch": 64})
    with pytest.raises(ValueError, match="empty"):
        plan([], **batching)
    with pytest.raises(ValueError, match="3 samples do not divide by 2"):
        plan([1, 2, 3], 2, **batching)
    with pytest.raises(ValueError, match="tags are needed"):
        plan_batch(
            KVBatchMeta(partition_id="p", keys=("a",), sequence_lengths=(1,)), BatchingConfig.model_validate(batching), data_parallel=1
        )
    with pytest.raises(ValueError, match="'k1': a sequence of 0 tokens"):
        plan([1, 0], **batching)
    with pytest.raises(ValueError, match="token_buckets: 12 does not divide by 8"):
        plan([1], **batching, token_buckets=(12, 16))
    with pytest.raises(ValueError, match=r"'k1': a sequence of 33 tokens \(40 when aligned\) fits none of token_buckets \[16, 32\]"):
        plan([1, 33], **batching, token_buckets=(16, 32))
    with pytest.raises(
        ValueError, match=r"6 samples on 2 data-parallel ranks need 3 micro-batches per rank.* \[1, 2\].* raise \w+ \(\d+\)"
    ):
        plan([64] * 6, 2, **batching | ({"micro_batch_size": 1} if mode == "padded" else {}), micro_batch_buckets=(1, 2))


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_a_sequence_beyond_the_budget_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=r"'k1': a sequence of 61 tokens \(64 when aligned\) exceeds tokens_per_micro_batch \(63\).* 56"):
        plan([1, 61], mode=mode, tokens_per_micro_batch=63)


def test_dynamic_rows_that_fit_no_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'k0': .* takes 32 tokens in each of at least 3 rows .*\[3, 4\]\), more than .* \(64\)"):
        plan([30], mode="dynamic", tokens_per_micro_batch=64, sequence_buckets=(3, 4))


def test_buckets_that_could_never_be_used_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"token_buckets: 128 exceeds tokens_per_micro_batch \(64\)"):
        BatchingConfig(mode="packed", tokens_per_micro_batch=64, token_buckets=(64, 128))
    with pytest.raises(ValidationError, match=r"sequence_buckets: none of \[4, 8\] holds micro_batch_size \(9\)"):
        BatchingConfig(micro_batch_size=9, sequence_buckets=(4, 8))


@pytest.mark.parametrize("mode", ["padded", "dynamic", "packed"])
def test_masked_rows_travel_and_do_not_count(mode: str) -> None:
    meta = make([10, 20, 30, 40])
    meta = meta.model_copy(update={"tags": tuple({**tag, "masked": row == 2} for row, tag in enumerate(meta.tags))})
    batching = BatchingConfig(mode=mode, micro_batch_size=2, tokens_per_micro_batch=None if mode == "padded" else 64)
    for part in plan_batch(meta, batching, data_parallel=2).shards:
        assert (part.global_tokens, part.global_sequences) == ((10 + 20 + 40) // 2, 3)
