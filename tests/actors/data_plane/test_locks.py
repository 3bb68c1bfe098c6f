"""Nobody outside the run sends the queue anything: neither from the network, nor as another user, nor with keys of another run."""

from __future__ import annotations

import os
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
import zmq

from actors.data_plane.address import ClientKeys, DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.interface import DataPlaneGoneError
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.transfer_queue import locks
from actors.waiting import find
from configs.run import DataPlaneConfig
from tests.actors.conftest import StartQueue
from tests.actors.data_plane.test_runs import wait_until
from tests.listeners import attack, listeners, said_by
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keyed(start_queue: StartQueue) -> DataPlaneAddress:
    """What a cluster gets that other machines may join."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "choose", locks.Keys)
        return start_queue("test-locks-keys", DataPlaneConfig(prometheus_port=0, num_storage_units=2))


@pytest.fixture(scope="module")
def local(address: DataPlaneAddress) -> DataPlaneAddress:
    """What a cluster on loopback gets, as that of the tests."""
    return address


@pytest.fixture(params=["keyed", "local"])
def opened(request: pytest.FixtureRequest) -> DataPlaneAddress:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def sockets(address: DataPlaneAddress) -> list[str]:
    return [f"tcp://{end.host}:{port}" for end in (address.controller, *address.storage) for _, port in end.ports]


def run_of_another(stranger: zmq.Socket[bytes], server: bytes) -> None:
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.curve_serverkey = server


def test_the_attack_works_where_there_is_no_lock(tmp_path: Path, keyed: DataPlaneAddress) -> None:
    """As the run's client: so the tests below see what they look for."""
    keys = keyed.keys
    assert keys is not None

    def member(stranger: zmq.Socket[bytes]) -> None:
        stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = keys.public, keys.secret, keys.server

    assert len(sockets(keyed)) == 4  # of the controller two
    attack(sockets(keyed), tmp_path / "ran", member)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4, "four commands")


def test_a_stranger_runs_nothing(tmp_path: Path, keyed: DataPlaneAddress) -> None:
    keys = keyed.keys
    assert keys is not None
    attack(sockets(keyed), tmp_path / "without-keys")
    attack(sockets(keyed), tmp_path / "keys-of-another-run", lambda stranger: run_of_another(stranger, keys.server))
    assert list(tmp_path.iterdir()) == []


def test_a_client_talks_to_no_other_server(keyed: DataPlaneAddress) -> None:
    """One that listens at the controller's address when the controller has gone, and knows the clients' keys."""
    assert keyed.keys is not None
    false = replace(keyed, keys=replace(keyed.keys, server=zmq.curve_keypair()[0]))
    with pytest.raises(DataPlaneGoneError, match="did not answer within 1 s"):
        connect(false, timeout_s=1)


def test_no_socket_on_a_network(local: DataPlaneAddress) -> None:
    for end in (local.controller, *local.storage):
        pid = ray.get(find(end.actor, local.namespace).__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT_S)
        assert [door.ip for door in listeners([pid])] == ["::ffff:127.0.0.1"]  # Ray's own, which asks for the token
        assert {Path(end.host, str(port)).is_socket() for _, port in end.ports} == {True}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try it as another user")
def test_another_user_does_not_reach_the_sockets(local: DataPlaneAddress) -> None:
    path = f"{local.controller.host}/{dict(local.controller.ports)['request_handle_socket']}"
    code = "socket.socket(socket.AF_UNIX).connect(sys.argv[1]); print('reached')"
    assert said_by(os.getuid(), code, path) == "reached\n"
    assert "PermissionError" in said_by(65534, code, path)


def test_reads_and_writes(opened: DataPlaneAddress) -> None:
    plane = connect(opened, timeout_s=60)
    plane.register_partition("locked", fields=["x"])
    rows = [torch.arange(n) for n in (3, 0, 2_000_000)]
    meta = plane.put(KVBatchMeta(partition_id="locked", keys=("a", "b", "c")), {"x": rows})
    assert all(map(torch.equal, plane.get(meta, ["x"])["x"], rows))
    plane.clear(meta)


def test_metrics_come_from_every_storage_unit(keyed: DataPlaneAddress) -> None:
    """The controller asks them, as a client."""

    def shown() -> bool:
        with urllib.request.urlopen(f"http://{keyed.metrics}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        return all(end.server_id in text for end in keyed.storage)

    wait_until(shown, "metrics of the storage units")


def test_keys_are_not_printed(keyed: DataPlaneAddress) -> None:
    assert isinstance(keyed.keys, ClientKeys)
    for secret in (keyed.keys.secret, keyed.keys.secret.decode()):
        assert str(secret) not in f"{keyed} {keyed.keys} {keyed!r} {keyed.keys!r}"
    assert "=" not in repr(locks.Keys())
    logs = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parent.parent / "logs"
    told = [path for path in logs.rglob("*") if path.is_file() and keyed.keys.secret in path.read_bytes()]
    assert told == []
