"""The queue as a run's own: seen by its processes, apart from other runs, and loud when something of it dies."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.data_plane import transfer_queue as queue
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.interface import DataPlaneError, DataPlaneGoneError, UnknownFieldError, UnknownKeyError, UnknownPartitionError
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.transfer_queue.connection import connection
from configs.run import DataPlaneConfig
from tests.actors.conftest import StartQueue
from tests.patience import WAIT_S

ROOT = Path(__file__).parents[3]
BOUND_S = 20.0  # a death is noticed in about 2 s; the rest is for a busy machine
pytestmark = pytest.mark.slow


def written(address: DataPlaneAddress, partition: str) -> KVBatchMeta:
    plane = connect(address, timeout_s=60)
    plane.register_partition(partition, fields=["x", "y"], consumers=["train"])
    meta = KVBatchMeta(partition_id=partition, keys=("a", "b", "c"))
    return plane.put(meta, {"x": [torch.arange(n) for n in (3, 0, 2)]})


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.1)


def alive(namespace: str, name: str) -> bool:
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True


def test_importing_connect_does_not_import_the_library() -> None:
    code = "import sys, actors.data_plane.connect; print('transfer_queue' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_without_a_cluster_it_says_so() -> None:
    code = (
        "from actors.data_plane.transfer_queue import start; from configs.run import DataPlaneConfig; import ray\n"
        "try: start('n', DataPlaneConfig())\n"
        "except Exception as error: print(type(error).__name__, ray.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["DataPlaneError", "False"]


def test_other_processes_read_and_write(address: DataPlaneAddress, partition: str) -> None:
    meta = written(address, partition)
    assert pickle.loads(pickle.dumps(address)) == address

    @ray.remote(num_cpus=0)
    class Doubler:
        def double(self, address: DataPlaneAddress, meta: KVBatchMeta) -> KVBatchMeta:
            plane = connect(address, timeout_s=60)
            columns = plane.get(meta, ["x"])
            return plane.put(meta, {"y": [row * 2 for row in columns["x"]]})

    @ray.remote(num_cpus=0)
    def read(address: DataPlaneAddress, meta: KVBatchMeta) -> list[list[int]]:
        return [row.tolist() for row in connect(address, timeout_s=60).get(meta, ["y"])["y"]]

    doubled = ray.get(Doubler.remote().double.remote(address, meta), timeout=WAIT_S)  # type: ignore[attr-defined]
    assert doubled.fields == {"x", "y"}
    assert [row.tolist() for row in connect(address, timeout_s=60).get(doubled, ["y"])["y"]] == [[0, 2, 4], [], [0, 2]]
    assert ray.get(read.remote(address, doubled.subset([2, 0])), timeout=WAIT_S) == [[0, 2], [0, 2, 4]]


def test_a_client_leaves_torch_threads_alone(address: DataPlaneAddress, partition: str) -> None:
    torch.set_num_threads(1)
    meta = written(address, partition)
    connect(address, timeout_s=60).get(meta, ["x"])
    assert torch.get_num_threads() == 1


def test_two_runs_on_one_cluster(address: DataPlaneAddress, partition: str, start_queue: StartQueue) -> None:
    with pytest.raises(DataPlaneError, match="already"):
        queue.start(address.namespace, DataPlaneConfig())
    meta = written(address, partition)
    other = start_queue("test-data-plane-other", DataPlaneConfig(prometheus_port=0))
    with pytest.raises(UnknownPartitionError):
        connect(other, timeout_s=60).get(meta, ["x"])
    plane = connect(other, timeout_s=60)
    plane.register_partition(partition, fields=["x"])
    plane.put(KVBatchMeta(partition_id=partition, keys=("a",)), {"x": [torch.tensor(7)]})
    assert plane.samples(partition) == 1

    assert address.metrics is None
    assert other.metrics is not None
    assert other.metrics.startswith("127.0.0.1:")
    with urllib.request.urlopen(f"http://{other.metrics}/metrics", timeout=30) as answer:
        assert 'tq_controller_request_total{op_type="NOTIFY_DATA_UPDATE"} 1.0' in answer.read().decode()

    queue.stop(other)
    queue.stop(other)
    with pytest.raises(DataPlaneGoneError):
        plane.samples(partition)
    with pytest.raises(DataPlaneGoneError):
        connect(other, timeout_s=10)
    assert connect(address, timeout_s=60).samples(partition) == 3
    assert connect(address, timeout_s=60).get(meta, ["x"])["x"][0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("victim", ["data_plane_controller", "data_plane_storage_0"])
def test_a_dead_actor_is_an_error_in_bounded_time(victim: str, start_queue: StartQueue, tmp_path: Path) -> None:
    address = start_queue(tmp_path.name, DataPlaneConfig())  # a namespace of its own, also when repeated
    meta = written(address, "p")
    plane = connect(address, timeout_s=60)
    pid = ray.get(ray.get_actor(victim, namespace=address.namespace).__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT_S)
    os.kill(pid, signal.SIGKILL)
    fresh = KVBatchMeta(partition_id="p", keys=("d", "e", "f"))
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: plane.get(meta, ["x"]),
        "put": lambda: plane.put(fresh, {"x": [torch.arange(2)] * 3}),
        "clear": lambda: plane.clear(meta),
        "claim": lambda: plane.claim("p", "train", ["y"], 3, timeout_s=60),
    }
    for name, call in calls.items():
        started = time.monotonic()
        with pytest.raises(DataPlaneGoneError, match=rf"{name} .*{victim} died"):
            call()
        assert time.monotonic() - started < BOUND_S, name


def test_a_silent_actor_is_an_error_at_the_deadline(address: DataPlaneAddress, partition: str) -> None:
    meta = written(address, partition)
    actor = ray.get_actor("data_plane_controller", namespace=address.namespace)
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        while not all("T (stopped)" in (task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()):
            time.sleep(0.01)  # on a busy machine a thread may still answer
        started = time.monotonic()
        with pytest.raises(DataPlaneGoneError, match=r"get x of 3 samples.*no answer .* within 3 s"):
            connect(address, timeout_s=3).get(meta, ["x"])
        assert time.monotonic() - started < BOUND_S
        with pytest.raises(DataPlaneGoneError, match=r"claim 3 samples.*no answer from data_plane_controller within"):
            connect(address, timeout_s=60).claim(partition, "train", ["x"], 3, timeout_s=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(connect(address, timeout_s=60).get(meta, ["x"])["x"]) == 3  # and it recovers
    claimed = connect(address, timeout_s=60).claim(partition, "train", ["x"], 3, timeout_s=30)
    assert claimed.keys == meta.keys, "what the late answer took went back"


@pytest.mark.parametrize("stage", ["store", "publish"])
def test_a_put_that_fails_midway_leaves_nothing(address: DataPlaneAddress, partition: str, stage: str, monkeypatch: Any) -> None:
    plane, requests = connect(address, timeout_s=60), connection(address, 60).requests
    meta = written(address, partition)
    real = getattr(requests, stage)

    async def broken(*arguments: Any) -> None:
        if stage == "store":
            await real(*arguments)
        raise OSError("injected")

    monkeypatch.setattr(requests, stage, broken)
    grown = KVBatchMeta(partition_id=partition, keys=(*meta.keys, "new"), tags=({"n": 1},) * 4, sequence_lengths=(1,) * 4)
    for _ in range(2):
        with pytest.raises(DataPlaneError, match=rf"put 4 samples into partition '{partition}'.*injected"):
            plane.put(grown, {"y": [torch.tensor(1)] * 4})
    monkeypatch.undo()
    assert plane.samples(partition) == 3
    with pytest.raises(UnknownFieldError, match="'y' is not written for key 'a'"):
        plane.get(meta, ["y"])
    with pytest.raises(UnknownKeyError, match="'new'"):
        plane.get(grown, ["y"])
    claimed = plane.claim(partition, "train", ["x"], 3, timeout_s=60)
    assert (claimed.keys, claimed.tags, claimed.sequence_lengths) == (meta.keys, (), ())
    plane.put(grown, {"y": [torch.tensor(2)] * 4})
    assert plane.get(grown, ["y"])["y"] == [torch.tensor(2)] * 4


def test_a_taken_prometheus_port(ray_session: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DataPlaneError, match=rf"data_plane.prometheus_port = {port}"):
            queue.start("test-data-plane-port", DataPlaneConfig(prometheus_port=port))
    wait_until(lambda: not alive("test-data-plane-port", "data_plane_storage_0"), "the actors of a failed start to end")


def test_the_queue_ends_with_its_driver(ray_session: None) -> None:
    namespace = "test-data-plane-driver"
    code = (
        "import sys, time, ray; from actors.data_plane.transfer_queue import start; from configs.run import DataPlaneConfig\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        f"start({namespace!r}, DataPlaneConfig()); print('up', flush=True); time.sleep(600)"
    )
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", code, address], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline().strip() == "up"
        assert alive(namespace, "data_plane_controller")
    finally:
        driver.kill()
        driver.wait(timeout=30)
    names = ("data_plane_controller", "data_plane_storage_0")
    wait_until(lambda: not any(alive(namespace, name) for name in names), "the actors of a killed driver to end")
