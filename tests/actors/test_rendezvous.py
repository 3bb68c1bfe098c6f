"""Ranks meet where rank 0 says, and nobody else comes."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
import ray
from torch.distributed import DistStoreError, TCPStore

from actors import rendezvous
from tests.listeners import listeners, reached_from_outside, said_by
from tests.patience import WAIT_S, kill

TIMEOUT_S = 20.0
PEER = """
import sys
from actors import rendezvous
from tests.patience import WAIT_S
store = rendezvous.store(sys.argv[1], 2, WAIT_S)
store.set("there", store.get("here") + b" and there")
"""


def test_two_processes_meet_at_a_file() -> None:
    place = rendezvous.announce()
    assert place.startswith("file:///proc/")
    with subprocess.Popen([sys.executable, "-c", PEER, place]) as other:  # it may come before rank 0 has made the store
        store = rendezvous.store(place, 2, WAIT_S)
        store.set("here", b"here")
        assert store.get("there") == b"here and there"
        assert other.wait(WAIT_S) == 0


def test_places_differ() -> None:
    assert rendezvous.announce() != rendezvous.announce()


class Rank:
    """Of a gloo group, and all that this process listens at before and after."""

    def __init__(self) -> None:
        from actors import node

        node.bind_collectives()

    def meets(self, board: Any, rank: int) -> list[float]:
        import torch
        from torch import distributed

        distributed.init_process_group("gloo", store=rendezvous.store(board, 2, TIMEOUT_S), rank=rank, world_size=2)
        sums = []
        for group in (None, distributed.new_group([0, 1])):
            value = torch.tensor(1.0 + rank)
            distributed.all_reduce(value, group=group)
            sums.append(value.item())
        distributed.barrier()
        distributed.destroy_process_group()
        return sums

    def listens_because_of(self, board: Any) -> int:
        before = listeners([os.getpid()])
        store = rendezvous.store(board, 1, TIMEOUT_S)
        store.set("key", "value")
        assert store.get("key") == b"value"
        return len(listeners([os.getpid()]) - before)


def test_two_processes_meet_at_a_board_and_nobody_listens_for_it(ray_session: None) -> None:
    board = rendezvous.board()
    ranks = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(2)]
    try:
        assert ray.get([rank.meets.remote(board, number) for number, rank in enumerate(ranks)], timeout=WAIT_S) == [[3.0, 3.0]] * 2
        assert ray.get(ranks[0].listens_because_of.remote(board), timeout=WAIT_S) == 0
    finally:
        for actor in (board, *ranks):
            ray.kill(actor)


def test_a_board_is_a_store(ray_session: None) -> None:
    board = rendezvous.board()
    first, second = (rendezvous.store(board, 2, TIMEOUT_S) for _ in range(2))
    first.set("key", b"value")
    assert second.get("key") == b"value"
    assert first.check(["key"])
    assert not first.check(["key", "other"])
    assert [first.add("count", 2), second.add("count", 3)] == [2, 5]
    assert second.delete_key("key")
    assert not second.delete_key("key")
    with pytest.raises(DistStoreError, match=r"other: no rank has written this within 0\.2 s"):
        first.wait(["other"], datetime.timedelta(seconds=0.2))
    kill(board)
    with pytest.raises(DistStoreError, match="where the ranks meet"):
        first.wait(["count"], datetime.timedelta(seconds=TIMEOUT_S))


def test_a_file_is_no_listener() -> None:
    before = listeners([os.getpid()])
    store = rendezvous.store(rendezvous.announce(), 1, TIMEOUT_S)
    store.set("key", b"value")
    assert listeners([os.getpid()]) == before


def test_a_store_of_torch_alone_takes_writes_from_the_network() -> None:
    """So it is used nowhere."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)
    outside = reached_from_outside([store.port])
    for address, port in outside[:1]:  # none on a machine without a network card
        TCPStore(address, port, 2, False, timeout).set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try it as another user")
def test_another_user_does_not_open_the_file() -> None:
    path = urlsplit(rendezvous.announce()).path
    code = "open(sys.argv[1], 'ab'); print('opened')"
    assert said_by(os.getuid(), code, path) == "opened\n"
    assert "PermissionError" in said_by(65534, code, path)
