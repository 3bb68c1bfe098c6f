"""Engine actors without vLLM that Ray starts again: they answer after a moment, and can be made to die while they load."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch

from actors.generation.engine import Engine, engine_actor_class
from actors.generation.types import GenerationResult
from actors.generation.versions import Segments, TokenVersions
from actors.refit.manifest import WeightLayout
from configs.rollout import GenerationConfig
from tests.patience import WAIT_S

NAMESPACE = "test-engines-return"
WEIGHTS = {"a": torch.zeros(2)}
STEP_S = 0.05


class Answers:
    """An executor whose requests end after their number of tokens, one a step."""

    max_model_len, vocab_size, updating, asleep = 64, 8, "", False

    def __init__(self, sink: Any, dies: Path) -> None:
        self.versions, self._sink, self._dies = TokenVersions(), sink, dies

    def start(self, jobs: Sequence[Any]) -> None:
        for job in jobs:
            ends = threading.Timer(STEP_S * job.tokens, lambda job=job: self._sink.finished(job.key, None, ((self.versions.current, 1),)))
            ends.daemon = True
            ends.start()

    def load(self, infos: Any, version: int, options: Any, timeout_s: float) -> float:
        if self._dies.exists():
            os._exit(1)
        self.versions.loaded(version, time.monotonic())
        return 0.0

    def abort(self, keys: Any) -> None:
        pass

    def died(self) -> bool:
        return False


class StandIn(Engine):
    """Starts at once; after a restart only when there is no file `held`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        super().__init__(GenerationConfig(refit="host", timeout_s=5.0), "nowhere", 0, [1])
        if not self._stale:
            self.ready()

    def ready(self) -> str:
        while self._stale and (self._folder / "held").exists():
            time.sleep(0.05)
        if (self._folder / "broken").exists():
            raise MemoryError("no room for the KV cache")
        self._layout = WeightLayout({name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}, tied=False)
        self._job: Any = lambda key, prompt, tokens: SimpleNamespace(key=key, tokens=tokens)
        self._sampling: Any = SimpleNamespace(
            check_requests=lambda *_: None, sampling_params=lambda request, _: request.max_new_tokens, result=result
        )
        self._executor: Any = Answers(self, self._folder / "dies")
        self._state = "ready"
        return "ready"


def result(_: Any, request_id: str, segments: Segments) -> GenerationResult:
    """The version that answered is its only token."""
    return GenerationResult(request_id, [segments[-1][0]], [0.0], "stop", segments)


class Engines:
    """Starts stand-ins, each with a folder of its own for what shall happen to it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._handles = folder, dict[str, Any]()

    def start(self, count: int, restarts: int = 10) -> list[str]:
        for index in range(count):
            name = f"engine-{index}"
            (self._folder / name).mkdir()
            options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": restarts}
            self._handles[name] = engine_actor_class(StandIn).options(**options).remote(str(self._folder / name))
        self.pids()
        return list(self._handles)

    def tell(self, name: str, what: str) -> Path:
        """A file that the engine looks for."""
        path = self._folder / name / what
        path.touch()
        return path

    def pids(self) -> dict[str, int]:
        """Waits for engines whose processes are starting."""
        refs = {name: handle.__ray_call__.remote(lambda _: os.getpid()) for name, handle in self._handles.items()}
        return dict(zip(refs, ray.get(list(refs.values()), timeout=WAIT_S), strict=True))

    def end(self) -> None:
        for handle in self._handles.values():
            ray.kill(handle)
