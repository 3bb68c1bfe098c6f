"""Ranks meet where rank 0 says, and nobody else comes."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from torch.distributed import TCPStore

from actors import rendezvous
from tests.listeners import listeners, reached_from_outside, said_by
from tests.patience import WAIT_S

TIMEOUT_S = 20.0
PEER = """
import sys
from actors import rendezvous
store = rendezvous.store(sys.argv[1], 1, 2, 20.0)
store.set("there", store.get("here") + b" and there")
"""


def peer(place: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PEER, place])


@pytest.mark.parametrize("one_machine", [True, False])
def test_two_processes_meet(one_machine: bool) -> None:
    place = rendezvous.announce(one_machine)
    assert place.startswith("file:///proc/" if one_machine else "tcp://127.0.0.1:")
    with peer(place) as other:  # it may come before rank 0 has made the store
        store = rendezvous.store(place, 0, 2, TIMEOUT_S)
        store.set("here", b"here")
        assert store.get("there") == b"here and there"
        assert other.wait(WAIT_S) == 0


def test_places_differ() -> None:
    places = [rendezvous.announce(one_machine) for one_machine in (True, True, False, False)]
    assert len(set(places)) == 4


def test_a_place_of_a_network_is_rank_0s_that_announced_it() -> None:
    with pytest.raises(KeyError, match="tcp:"):
        rendezvous.store("tcp://127.0.0.1:1", 0, 2, TIMEOUT_S)


def test_a_file_is_no_listener() -> None:
    before = listeners([os.getpid()])
    store = rendezvous.store(rendezvous.announce(), 0, 1, TIMEOUT_S)
    store.set("key", b"value")
    assert listeners([os.getpid()]) == before


def test_from_the_network_nobody_writes() -> None:
    place = rendezvous.announce(one_machine=False)
    port = urlsplit(place).port
    assert port is not None
    store = rendezvous.store(place, 0, 2, TIMEOUT_S)
    assert [door.ip for door in listeners([os.getpid()]) if door.port == port] == ["127.0.0.1"]
    assert reached_from_outside([port]) == []
    assert not store.check(["key"])


def test_a_store_of_torch_alone_takes_writes_from_the_network() -> None:
    """So the test above sees what it looks for."""
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
