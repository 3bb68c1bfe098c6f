"""Which stages run again, and after which errors. That they do: tests/e2e/test_monitoring.py."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
from prefect import Task
from prefect.client.schemas import State
from prefect.states import Failed

import tasks
from actors.data_plane.interface import DataPlaneGoneError, UnknownKeyError
from actors.generation.types import EngineDiedError, EngineFailedError, GenerationTimeoutError, RequestError
from actors.waiting import ActorGoneError, ActorTimeoutError
from configs.base import ConfigError
from tasks.call import transient
from tasks.train import train

AGAIN = {
    "logprob", "ref_logprob", "advantage", "refit", "validate", "validation-loss", "clear", "export-hf",
}  # fmt: skip
ONCE = {
    "settle", "train", "warm-start", "rollout", "batch", "launch", "begin-grpo", "begin-warm-start", "checkpoint", "publish-checkpoint",
    "restore", "pass-over",
}  # fmt: skip


def all_tasks() -> dict[str, list[Task[Any, Any]]]:
    found: dict[str, list[Task[Any, Any]]] = {}
    for module in pkgutil.iter_modules(tasks.__path__, "tasks."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Task):
                found.setdefault(value.name, []).append(value)
    return found


def test_only_what_can_be_repeated_is() -> None:
    found = all_tasks()
    assert found.keys() >= AGAIN | ONCE
    for name, same_name in found.items():
        for one in same_name:
            assert (one.retries > 0) == (name in AGAIN), name
            assert (one.retry_condition_fn is transient) == (name in AGAIN), name


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ActorTimeoutError("silent"), True),
        (GenerationTimeoutError("slow"), True),
        (DataPlaneGoneError("no answer"), True),
        (ActorGoneError("dead"), False),
        (EngineDiedError("engine-0", "dead"), False),
        (EngineFailedError("vLLM raised"), False),
        (RequestError("empty prompt"), False),
        (UnknownKeyError("cleared"), False),
        (ConfigError("typo"), False),
        (TimeoutError("of something else"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_worth_another_try(error: Exception, again: bool) -> None:
    state: State[Any] = Failed(data=error)
    assert transient(train, None, state) is again  # type: ignore[arg-type]
