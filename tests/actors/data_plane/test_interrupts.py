"""Interrupted calls: a put leaves all or nothing, an overwrite replaces all or nothing, a claim takes nothing."""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.interface import DataPlane, UnknownFieldError, UnknownKeyError
from actors.data_plane.meta import KVBatchMeta
from tests.actors.data_plane.conftest import TIMEOUT_S, Interrupted, interrupted_after


@pytest.fixture
def plane(address: DataPlaneAddress) -> DataPlane:
    return connect(address, timeout_s=TIMEOUT_S)


def batch(partition: str, *keys: str) -> KVBatchMeta:
    return KVBatchMeta(partition_id=partition, keys=keys)


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_interrupted_put_leaves_all_or_nothing(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "y"], capacity=2)  # a sample left behind would block the next put
    meta, interrupted = batch(partition, "a", "b"), 0
    for n in range(30):
        first = {"x": [torch.full((1000,), n)] * 2}
        try:
            with interrupted_after(random.Random(n).uniform(0, 0.008)):
                plane.put(meta, first)
        except Interrupted:
            interrupted += 1
        if n % 2:  # straight on to another put of the same keys
            plane.put(meta, {"x": [torch.tensor([n])] * 2}, overwrite=True)
            assert_same(plane.get(meta, ["x"])["x"], [torch.tensor([n])] * 2)
        else:
            with contextlib.suppress(UnknownKeyError, UnknownFieldError):
                assert_same(plane.get(meta, ["x"])["x"], first["x"])
        plane.put(batch(partition, "a"), {"y": [torch.tensor(1)]})  # waits for the clean-up
        plane.clear(meta)
    assert interrupted > 0
    assert plane.samples(partition) == 0


def test_an_interrupted_overwrite_replaces_all_or_nothing(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x"])
    meta = batch(partition, *(f"k{n}" for n in range(8)))
    plane.put(meta, {"x": [torch.tensor(-1)] * 8})
    for n in range(30):
        with contextlib.suppress(Interrupted), interrupted_after(random.Random(n).uniform(0, 0.006)):
            plane.put(meta, {"x": [torch.tensor(n)] * 8}, overwrite=True)
        plane.put(batch(partition, f"other-{n}"), {"x": [torch.tensor(0)]})  # after what goes on behind it
        assert len(set(torch.stack(plane.get(meta, ["x"])["x"]).tolist())) == 1


def test_an_interrupted_claim_takes_nothing(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x"], consumers=["train"])
    rounds, got = 25, list[str]()

    def put(n: int) -> None:
        time.sleep(0.001)
        plane.put(batch(partition, f"k{n}"), {"x": [torch.tensor(1.0)]})

    with ThreadPoolExecutor(1) as pool:
        for n in range(rounds):
            putting = pool.submit(put, n)
            with contextlib.suppress(Interrupted), interrupted_after(random.Random(n).uniform(0, 0.03)):
                got += plane.claim(partition, "train", ["x"], 1, 30.0).keys
            putting.result()
    while len(got) < rounds:
        got += plane.claim(partition, "train", ["x"], 1, 10.0).keys
    assert sorted(got) == sorted(f"k{n}" for n in range(rounds))
