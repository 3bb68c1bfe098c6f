"""vLLM's executors, whose workers meet at a file of this user's: vLLM's own rendezvous listens on every address of the machine.

vLLM imports this module by name, in the process of the engine core.
"""

from __future__ import annotations

from unittest.mock import patch
from uuid import uuid4

from vllm.v1.executor import multiproc_executor, uniproc_executor

from actors import rendezvous


class OneWorker(uniproc_executor.UniProcExecutor):
    """vLLM's "uni"."""

    def _distributed_args(self) -> tuple[str, int, int]:
        with patch.object(uniproc_executor, "get_distributed_init_method", _place):
            return super()._distributed_args()


class SeveralWorkers(multiproc_executor.MultiprocExecutor):
    """vLLM's "mp"."""

    def _init_executor(self) -> None:
        with patch.object(multiproc_executor, "get_distributed_init_method", _place):
            super()._init_executor()


def _place(host: str, port: int) -> str:
    return f"{rendezvous.announce()}?name=:{uuid4().hex}"  # on a CPU workers share memory under what follows the last colon
