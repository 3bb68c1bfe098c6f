"""Workers of vLLM meet where nobody listens; its sockets lie in a folder of this user's."""

from __future__ import annotations

import multiprocessing
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from vllm.utils.network_utils import get_open_zmq_ipc_path

from actors.generation import vllm_executors, vllm_meeting
from actors.generation.engine import prepare_process
from actors.node import is_private
from configs import settings
from configs.rollout import GenerationConfig


def _prepared(end: Any) -> None:
    prepare_process(GenerationConfig())
    path = get_open_zmq_ipc_path().removeprefix("ipc://")
    folder = Path(path).parent
    end.send((len(path), is_private(folder), stat.S_IMODE(folder.stat().st_mode), settings.get("GLOO_SOCKET_IFNAME")))


def test_sockets_of_the_core_are_this_users() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_prepared, args=(there,))
    process.start()
    length, private, mode, interface = here.recv()
    process.join()
    assert length <= 107
    assert private
    assert mode == 0o700
    assert interface == "lo"


def test_one_worker_meets_itself_at_a_file() -> None:
    """Several do so likewise: tests/gpu/test_refit.py has engines of two GPUs."""
    executor: Any = object.__new__(vllm_meeting.OneWorker)  # its constructor loads a model
    executor.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))
    place, rank, _ = executor._distributed_args()
    url = urlsplit(place)
    assert (url.scheme, rank) == ("file", 0)
    assert Path(url.path).read_bytes() == b""


def test_vllm_finds_the_executors_by_name() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for workers, expected in ((1, vllm_meeting.OneWorker), (2, vllm_meeting.SeveralWorkers)):
        arguments = vllm_executors.engine_arguments(GenerationConfig(tensor_parallel_size=workers), "model", 0, "host")
        assert resolve_obj_by_qualname(arguments["distributed_executor_backend"]) is expected
        assert "gpu_memory_utilization" not in arguments  # on a CPU nothing asks for it
