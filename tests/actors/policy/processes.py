"""Worker processes for tests, forked from one server that has the imports behind it: torch and Megatron load once, not per process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

# Importing them starts no thread and no process group: forks could not use either.
_PRELOAD = [
    "pytest",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "actors.policy.model",
    "actors.policy.optimizer",
    "actors.policy.state",
    "actors.models.weight_table",
    "tests.actors.policy.program",
]


def run(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """`function(rank, *arguments)` in `count` processes. Raises what the first of them raised."""
    method = "spawn" if torch.cuda.is_available() else "forkserver"  # a fork of a process that has touched CUDA cannot use it
    multiprocessing.set_forkserver_preload(_PRELOAD)
    torch.multiprocessing.start_processes(function, arguments, nprocs=count, join=True, start_method=method)
