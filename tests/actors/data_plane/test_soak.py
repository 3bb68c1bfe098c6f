"""200 steps with failures between the stages: nothing stays behind, and the storage actors do not grow."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.interface import DataPlane, DataPlaneError
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.transfer_queue.connection import connection
from actors.data_plane.transfer_queue.requests import Requests
from tests.actors.data_plane.conftest import Interrupted, interrupted_after
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow
STEPS, WARM_UP, SAMPLES = 200, 60, 128


class Faults:
    """Makes the requests to the queue fail, before or after they had their effect."""

    def __init__(self, requests: Requests, chance: float) -> None:
        self._random, self._chance = random.Random(0), chance
        self._real = {name: getattr(requests, name) for name in ("resolve", "store", "note", "publish", "load")}
        for name, real in self._real.items():
            setattr(requests, name, self._flaky(real))

    def _flaky(self, real: Any) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            fate = self._random.random()
            if fate < self._chance:
                if fate < self._chance / 2:
                    await real(*arguments, **named)
                raise OSError("injected")
            return await real(*arguments, **named)

        return call

    def end(self, requests: Requests) -> None:
        """The requests as they were."""
        for name, real in self._real.items():
            setattr(requests, name, real)


def resident(address: DataPlaneAddress) -> list[int]:
    """Resident bytes of each storage actor."""
    pages = [
        ray.get_actor(end.actor, namespace=address.namespace).__ray_call__.remote(lambda _: Path("/proc/self/statm").read_text())
        for end in address.storage
    ]
    return [int(text.split()[1]) * 4096 for text in ray.get(pages, timeout=WAIT_S)]


def step(plane: DataPlane, partition: str, number: int, chance: random.Random) -> int:
    """rollout, append, claim, read, as tasks of a run would; any of them may fail or be interrupted. Returns rows read."""
    lengths = [chance.randint(0, 4096) for _ in range(SAMPLES)]
    ids = [torch.full((length,), number, dtype=torch.int64) for length in lengths]
    meta = KVBatchMeta(
        partition_id=partition, keys=tuple(f"{number}-{row}" for row in range(SAMPLES)), sequence_lengths=tuple(lengths),
        tags=tuple({"reward": float(row)} for row in range(SAMPLES)),
    )  # fmt: skip
    try:
        with interrupted_after(0.01) if chance.random() < 0.25 else contextlib.nullcontext():
            plane.put(meta, {"ids": ids, "mask": [row > 0 for row in ids]})
        plane.put(meta, {"logprobs": [torch.ones(length) for length in lengths]})
        claimed = plane.claim(partition, "train", ["ids", "logprobs"], SAMPLES, 10.0)
        assert claimed.keys == meta.keys
        part = meta.subset(chance.sample(range(SAMPLES), SAMPLES // 2))
        columns = plane.get(part, ["ids", "logprobs"])
        assert [len(row) for row in columns["logprobs"]] == list(part.sequence_lengths)
        assert all(bool((row == number).all()) for row in columns["ids"])
        plane.clear(part)  # the rest goes below: blocks are cleared in pieces
        return len(part)
    except (DataPlaneError, Interrupted):
        return 0
    finally:
        plane.clear(meta)


def test_nothing_is_left_after_failures(address: DataPlaneAddress, partition: str) -> None:
    plane, link, chance = connect(address, timeout_s=30), connection(address, 30), random.Random(1)
    plane.register_partition(partition, fields=["ids", "mask", "logprobs"], capacity=2 * SAMPLES, consumers=["train"])
    faults = Faults(link.requests, 0.02)
    rows, warm = 0, list[int]()
    try:
        for number in range(STEPS):
            if number == WARM_UP:
                warm = resident(address)
            try:
                rows += step(plane, partition, number, chance)
            except DataPlaneError:  # the last clear itself
                faults.end(link.requests)
                plane.clear(KVBatchMeta(partition_id=partition, keys=tuple(f"{number}-{row}" for row in range(SAMPLES))))
                faults = Faults(link.requests, 0.02)
    finally:
        faults.end(link.requests)
    assert rows > STEPS * SAMPLES // 4, "most steps got through"
    assert plane.samples(partition) == 0
    assert link.run(link.requests.count(partition), "count", 30) == 0, "no sample without columns either"
    grown = [after / before for before, after in zip(warm, resident(address), strict=True)]
    print(f"{rows} rows read; resident {[size >> 20 for size in warm]} MiB, grown by {grown}")
    assert max(grown) < 1.1
    assert plane.metrics()["data_plane/put/errors"] > 0
