"""KVBatchMeta: no row is lost or doubled, and lengths and tags stay with their key."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.data_plane.meta import KVBatchMeta, mint_key


def make(n: int, prefix: str = "k", **changes: object) -> KVBatchMeta:
    """Row i has length i + 1 and tag row=i, so that any misalignment shows."""
    values: dict[str, object] = {
        "partition_id": "p",
        "task_name": "rollout",
        "keys": tuple(f"{prefix}{i}" for i in range(n)),
        "fields": frozenset({"x"}),
        "sequence_lengths": tuple(range(1, n + 1)),
        "tags": tuple({"row": i, "source": prefix} for i in range(n)),
        "extra_info": {"note": 1},
    }
    return KVBatchMeta.model_validate(values | changes)


def assert_aligned(meta: KVBatchMeta, keys: list[str]) -> None:
    assert list(meta.keys) == keys
    rows = [tag["row"] for tag in meta.tags]
    assert [f"{tag['source']}{tag['row']}" for tag in meta.tags] == keys
    assert [length - 1 for length in meta.sequence_lengths] == rows


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), unique=True))))
def test_subset_keeps_the_rows_asked_for_in_order(case: tuple[int, list[int]]) -> None:
    n, rows = case
    meta = make(n).subset(rows)
    assert_aligned(meta, [f"k{row}" for row in rows])
    assert meta.fields == {"x"}
    assert meta.extra_info == {"note": 1}


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=4))
def test_slices_concatenate_to_the_whole(n: int, cuts: list[int]) -> None:
    meta = make(n)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    parts = [meta.slice(start, stop) for start, stop in pairwise(edges)]
    assert sum(map(len, parts)) == n
    assert_aligned(KVBatchMeta.concat(parts), list(meta.keys))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_concat_keeps_every_row(sizes: list[int]) -> None:
    metas = [make(size, prefix=f"m{index}-") for index, size in enumerate(sizes)]
    assert_aligned(KVBatchMeta.concat(metas), [key for meta in metas for key in meta.keys])


def test_transforms_leave_the_original_alone() -> None:
    meta = make(3)
    before = meta.model_dump()
    meta.with_fields("y")
    meta.subset([2, 0])
    assert meta.model_dump() == before
    with pytest.raises(ValidationError):
        meta.keys = ()  # type: ignore[misc]


def test_concat_knows_the_fields_that_all_have() -> None:
    joined = KVBatchMeta.concat([make(1, "a").with_fields("y"), make(1, "b")])
    assert joined.fields == {"x"}
    assert KVBatchMeta.concat([make(0), make(1).with_fields("y")]).fields == {"x", "y"}, "an empty batch has no say"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValidationError, match="'k0' occurs twice"):
        make(2, keys=("k0", "k0"))
    with pytest.raises(ValidationError, match="1 tags for 2 keys"):
        make(2, tags=({},))
    with pytest.raises(ValidationError, match="3 sequence_lengths for 2 keys"):
        make(2, sequence_lengths=(1, 2, 3))
    with pytest.raises(ValidationError, match="occurs twice"):
        make(2).subset([1, 1])
    with pytest.raises(ValidationError, match="occurs twice"):
        KVBatchMeta.concat([make(1), make(1)])
    with pytest.raises(IndexError):
        make(1).subset([1])
    with pytest.raises(ValueError, match="across partitions"):
        KVBatchMeta.concat([make(1), make(1, "b", partition_id="q")])
    with pytest.raises(ValidationError, match="tags"):
        KVBatchMeta.concat([make(1), make(1, "b", tags=())])
    with pytest.raises(ValueError, match="no metas"):
        KVBatchMeta.concat([])


def test_a_meta_is_small_on_the_wire() -> None:
    meta = make(64)
    assert pickle.loads(pickle.dumps(meta)) == meta
    assert len(pickle.dumps(meta)) < 8_000


def test_minted_keys_are_unique() -> None:
    keys = {mint_key(version, uid, index) for version in range(3) for uid in ("a", "b") for index in range(4)}
    assert len(keys) == 24
