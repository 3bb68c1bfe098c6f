"""plan_batch(): every sample on exactly one rank, and ranks that stay in step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import ShardPlan, plan_batch
from configs.batching import BatchingConfig


def make(lengths: list[int]) -> KVBatchMeta:
    return KVBatchMeta(
        partition_id="p",
        keys=tuple(f"k{n}" for n in range(len(lengths))),
        sequence_lengths=tuple(lengths),
        tags=tuple({"response_length": length // 2, "length": length} for length in lengths),
    )


def shard(meta: KVBatchMeta, *, data_parallel: int, micro_batch_size: int, align: int = 8) -> tuple[ShardPlan, ...]:
    return plan_batch(meta, BatchingConfig(micro_batch_size=micro_batch_size), data_parallel=data_parallel, align=align).shards


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    ranks = draw(st.integers(1, 5))
    rows = ranks * draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, 300), min_size=rows, max_size=rows))
    return lengths, ranks, draw(st.integers(1, 9)), draw(st.sampled_from([1, 8, 64]))


@given(cases())
def test_no_sample_is_lost_or_doubled_and_ranks_stay_in_step(case: tuple[list[int], int, int, int]) -> None:
    lengths, ranks, micro, multiple = case
    meta = make(lengths)
    plans = shard(meta, data_parallel=ranks, micro_batch_size=micro, align=multiple)

    assert len(plans) == ranks
    assert sorted(key for plan in plans for key in plan.meta.keys) == sorted(meta.keys)
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    # Step m of every rank has the same shape: the number of rows agrees too.
    assert len({tuple((len(b.rows), b.shape) for b in plan.micro_batches) for plan in plans}) == 1
    for plan in plans:
        assert [row for b in plan.micro_batches for row in b.rows] == list(range(len(plan.meta)))
        assert all(1 <= len(b.rows) <= b.shape[0] <= micro for b in plan.micro_batches)
        assert all(b.shape[1] % multiple == 0 for b in plan.micro_batches)
        assert all(max(lengths) <= b.shape[1] < max(lengths) + multiple for b in plan.micro_batches)
        assert plan.global_tokens == sum(length // 2 for length in lengths)
        assert plan.global_sequences == len(lengths)
        assert [tag["length"] for tag in plan.meta.tags] == list(plan.meta.sequence_lengths), "tags ride with their rows"


@given(cases())
def test_ranks_carry_about_the_same_tokens(case: tuple[list[int], int, int, int]) -> None:
    lengths, ranks, micro, _ = case
    loads = [sum(plan.meta.sequence_lengths) for plan in shard(make(lengths), data_parallel=ranks, micro_batch_size=micro)]
    # Dealt in a snake over sorted lengths, two ranks differ by less than the spread of one row.
    assert max(loads) - min(loads) <= max(lengths) - min(lengths)


def test_the_same_batch_gives_the_same_plans() -> None:
    meta = make([5, 5, 5, 9, 2, 2])
    assert shard(meta, data_parallel=2, micro_batch_size=2) == shard(meta, data_parallel=2, micro_batch_size=2)


def test_one_rank_keeps_the_order() -> None:
    (plan,) = shard(make([3, 9, 1]), data_parallel=1, micro_batch_size=2)
    assert plan.meta.keys == ("k0", "k1", "k2")
    assert [b.rows for b in plan.micro_batches] == [(0, 1), (2,)]


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        shard(make([]), data_parallel=1, micro_batch_size=1)
    with pytest.raises(ValueError, match="3 samples do not divide by 2"):
        shard(make([1, 2, 3]), data_parallel=2, micro_batch_size=1)
    with pytest.raises(ValueError, match="tags are needed"):
        shard(KVBatchMeta(partition_id="p", keys=("a",), sequence_lengths=(1,)), data_parallel=1, micro_batch_size=1)
