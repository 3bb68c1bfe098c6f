"""Claims: each sample once to each consumer, in order of first write, over both implementations and against a model."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.data_plane.interface import (
    ClaimTimeoutError,
    DataPlane,
    UnknownConsumerError,
    UnknownFieldError,
    UnknownPartitionError,
    UnsatisfiableClaimError,
)
from actors.data_plane.meta import KVBatchMeta
from tests.actors.data_plane.conftest import Plane, new_partition

SHORT_S = 0.3


def batch(partition: str, *keys: str) -> KVBatchMeta:
    """Row i of the whole alphabet has length ord(key) and a tag that names its key."""
    lengths, tags = tuple(len(key) for key in keys), tuple({"name": key, "pair": (key, 1.5)} for key in keys)
    return KVBatchMeta(partition_id=partition, keys=keys, sequence_lengths=lengths, tags=tags)


def ones(count: int) -> list[torch.Tensor]:
    return [torch.tensor(1.0)] * count


def test_a_claim_hands_out_samples_in_order_of_first_write(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "y"], consumers=["train", "log"])
    for keys in (("z", "bb"), ("a",), ("ccc", "d")):
        plane.put(batch(partition, *keys), {"x": ones(len(keys))})
    plane.put(batch(partition, "d", "z", "a"), {"y": ones(3)})  # later columns do not change the order
    first = plane.claim(partition, "train", ["x"], 3, SHORT_S)
    assert first == batch(partition, "z", "bb", "a").model_copy(update={"task_name": "train", "fields": frozenset({"x"})})
    assert first.tags[1] == {"name": "bb", "pair": ("bb", 1.5)}
    assert plane.claim(partition, "log", ["y", "x"], 2, SHORT_S).keys == ("z", "a"), "another consumer has its own cursor"
    assert plane.claim(partition, "train", ["x"], 2, SHORT_S).keys == ("ccc", "d")
    assert plane.claim(partition, "log", ["x"], 3, SHORT_S).keys == ("bb", "ccc", "d")
    assert plane.get(first, ["x"])["x"] == ones(3)


def test_order_survives_clearing(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x"], consumers=["train"])
    keys = [f"k{n}" for n in range(12)]
    plane.put(batch(partition, *keys), {"x": ones(12)})
    plane.clear(batch(partition, "k1", "k4", "k11", "k0"))
    plane.put(batch(partition, "new", "k4", "k0"), {"x": ones(3)})  # the queue reuses what the cleared samples held
    expected = ("k2", "k3", "k5", "k6", "k7", "k8", "k9", "k10", "new", "k4", "k0")
    assert plane.claim(partition, "train", ["x"], 11, SHORT_S).keys == expected


def test_a_cleared_key_is_a_new_sample_and_an_overwritten_one_is_not(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x"], consumers=["train"])
    meta = batch(partition, "a", "b")
    plane.put(meta, {"x": ones(2)})
    assert plane.claim(partition, "train", ["x"], 2, SHORT_S).keys == ("a", "b")
    plane.put(meta, {"x": ones(2)}, overwrite=True)
    with pytest.raises(ClaimTimeoutError):
        plane.claim(partition, "train", ["x"], 1, 0.0)
    plane.clear(meta.slice(0, 1))
    plane.put(meta.slice(0, 1), {"x": ones(1)})
    assert plane.claim(partition, "train", ["x"], 1, SHORT_S).keys == ("a",)


def test_lengths_and_tags_come_with_the_claim(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "y"], consumers=["train", "second", "third"])
    bare = KVBatchMeta(partition_id=partition, keys=("a", "b"))
    plane.put(bare, {"x": ones(2)})
    claimed = plane.claim(partition, "train", ["x"], 2, SHORT_S)
    assert (claimed.sequence_lengths, claimed.tags) == ((), ())
    tagged = bare.model_copy(update={"sequence_lengths": (3, 4), "tags": ({"reward": 1.0, "n": 1}, {"reward": 2.0, "n": 2})})
    plane.put(tagged, {"y": ones(2)})
    plane.put(bare.model_copy(update={"tags": ({"reward": -1.0}, {"extra": None})}), {"y": ones(2)}, overwrite=True)
    claimed = plane.claim(partition, "second", ["x"], 2, SHORT_S)
    assert claimed.sequence_lengths == (3, 4)
    assert claimed.tags == ({"reward": -1.0, "n": 1}, {"reward": 2.0, "n": 2, "extra": None})
    claimed.tags[0]["reward"] = 99
    plane.put(KVBatchMeta(partition_id=partition, keys=("c",)), {"x": ones(1)})
    claimed = plane.claim(partition, "third", ["x"], 3, SHORT_S)
    assert claimed.sequence_lengths == (), "not every sample has one"
    assert claimed.tags == ({"reward": -1.0, "n": 1}, {"reward": 2.0, "n": 2, "extra": None}, {})


def test_only_complete_samples_are_handed_out(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "y", "z"], consumers=["train"])
    plane.put(batch(partition, "a", "b", "c"), {"x": ones(3)})
    plane.put(batch(partition, "c", "b"), {"y": ones(2)})
    with pytest.raises(ClaimTimeoutError, match=r"'train' waited 0.3 s, 2 of 3 samples are ready; 'y' is not written for 1") as caught:
        plane.claim(partition, "train", ["x", "y"], 3, SHORT_S)
    copied = pickle.loads(pickle.dumps(caught.value))  # it crosses processes
    assert (copied.ready, copied.wanted, copied.missing, str(copied)) == (2, 3, {"y": 1}, str(caught.value))
    with pytest.raises(ClaimTimeoutError, match=r"0 of 1 samples are ready; 'z' is not written for 3 samples"):
        plane.claim(partition, "train", ["z"], 1, 0.0)
    assert plane.claim(partition, "train", ["x", "y"], 2, SHORT_S).keys == ("b", "c")
    with pytest.raises(ClaimTimeoutError, match=r"0 of 1 samples are ready; 'y' is not written for 1"):
        plane.claim(partition, "train", ["y"], 1, 0.0)
    with pytest.raises(ClaimTimeoutError, match=r"1 of 2 samples are ready; every sample that is there has them"):
        plane.claim(partition, "train", ["x"], 2, 0.0)


def test_a_claim_waits_for_a_writer(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "y"], consumers=["train"])
    plane.put(batch(partition, "a", "b"), {"x": ones(2)})
    timers = [
        threading.Timer(0.3, plane.put, (batch(partition, "b"), {"y": ones(1)})),
        threading.Timer(0.6, plane.put, (batch(partition, "a"), {"y": ones(1)})),
    ]
    for timer in timers:
        timer.start()
    started = time.monotonic()
    assert plane.claim(partition, "train", ["x", "y"], 2, 30.0).keys == ("a", "b")
    assert time.monotonic() - started > 0.5
    for timer in timers:
        timer.join()


def test_a_claim_that_can_never_be_satisfied_is_refused_at_once(plane: DataPlane, partition: str) -> None:
    with pytest.raises(UnknownPartitionError, match=partition):
        plane.claim(partition, "train", ["x"], 1, 60.0)
    plane.register_partition(partition, fields=["prompt", "x"], consumers=["train"], capacity=4)
    with pytest.raises(UnknownConsumerError, match=rf"{partition}.*no consumer 'trian'.*train"):
        plane.claim(partition, "trian", ["x"], 1, 60.0)
    with pytest.raises(UnknownFieldError, match=rf"{partition}.*'promt'; did you mean 'prompt'"):
        plane.claim(partition, "train", ["promt"], 1, 60.0)
    for count, message in ((5, "cannot claim 5 samples at once; it holds at most 4"), (0, "cannot claim 0")):
        with pytest.raises(UnsatisfiableClaimError, match=message):
            plane.claim(partition, "train", ["x"], count, 60.0)
    with pytest.raises(UnsatisfiableClaimError, match="at least one column"):
        plane.claim(partition, "train", [], 1, 60.0)


def test_many_claimers_and_writers(made: Plane, partition: str) -> None:
    total, share = 60, 6
    made.plane.register_partition(partition, fields=["x", "y"], consumers=["train", "log"], capacity=total)

    def write(name: int) -> None:
        for n in range(0, total // 3, 5):
            keys = [f"{name}-{n + i}" for i in range(5)]
            made.plane.put(batch(partition, *keys), {"x": ones(5)})
            made.plane.put(batch(partition, *random.Random(n).sample(keys, 5)), {"y": ones(5)})

    with ThreadPoolExecutor(9) as pool:
        claims = {
            consumer: [pool.submit(made.plane.claim, partition, consumer, ["x", "y"], share, 60.0) for _ in range(total // share)]
            for consumer in ("train", "log")
        }
        # The pool is smaller than the number of claims: later ones start when earlier ones end.
        writers = [threading.Thread(target=write, args=(name,)) for name in range(3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    everything = Counter(f"{name}-{n}" for name in range(3) for n in range(total // 3))
    for consumer, futures in claims.items():
        metas = [future.result() for future in futures]
        assert all(len(meta) == share for meta in metas)
        assert Counter(key for meta in metas for key in meta.keys) == everything, consumer
        assert all(tag["name"] == key for meta in metas for key, tag in zip(meta.keys, meta.tags, strict=True))


# Model: samples in order of first write, the columns of each, and what each consumer has taken.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True), st.sampled_from("xyz")),
        st.tuples(st.just("clear"), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True)),
        st.tuples(st.just("claim"), st.sampled_from(["one", "two"]), st.sets(st.sampled_from("xyz"), min_size=1), st.integers(1, 3)),
    ),
    max_size=25,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_history_agrees_with_the_model(plane: DataPlane, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    partition = new_partition()
    plane.register_partition(partition, fields=["x", "y", "z"], consumers=["one", "two"])
    written: dict[str, set[str]] = {}
    taken: dict[str, set[str]] = {"one": set(), "two": set()}
    for step in steps:
        match step:
            case "put", keys, column:
                plane.put(batch(partition, *keys), {column: ones(len(keys))}, overwrite=True)
                for key in keys:
                    written.setdefault(key, set()).add(column)
            case "clear", keys:
                plane.clear(batch(partition, *keys))
                for key in keys:
                    written.pop(key, None)
                    taken["one"].discard(key)
                    taken["two"].discard(key)
            case "claim", consumer, columns, count:
                open_to = [key for key in written if key not in taken[consumer]]
                ready = [key for key in open_to if written[key] >= columns]
                if len(ready) >= count:
                    assert list(plane.claim(partition, consumer, sorted(columns), count, 10.0).keys) == ready[:count]
                    taken[consumer].update(ready[:count])
                    continue
                with pytest.raises(ClaimTimeoutError) as caught:
                    plane.claim(partition, consumer, sorted(columns), count, 0.0)
                lacking = {name: sum(name not in written[key] for key in open_to) for name in columns}
                assert (caught.value.ready, caught.value.missing) == (len(ready), {n: c for n, c in lacking.items() if c})
    assert plane.samples(partition) == len(written)
