"""The flow that `benchmarks.control_plane` deploys: the real `grpo` flow, whose actors compute nothing.

real   flow, session, steps, tasks, data plane, policy group with its compiled graph and plans, environment
stub   collector (metadata of 64 x 8 samples, no tokens), policy worker, engine: each returns at once, or after its share of a second
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
from prefect import flow

import actors.policy.group
import tasks.launch
from actors import names
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.usage import OperationUsage
from actors.environments import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.generation.types import UpdateOptions, WeightUpdate
from actors.node import own_id
from actors.policy.executors import Request
from actors.policy.group import PolicyGroup
from actors.rollout.assemble import ROLLOUT_FIELDS, TRAIN_FIELDS
from actors.rollout.samples import Progress, Sample, StepReport, Validation
from actors.rollout.transitions import Admitted, Committed
from configs.run import RunConfig
from configs.validation import ValidationConfig
from flows.grpo import grpo
from flows.grpo_session import GrpoSession
from flows.session import run_name

QUICK_STEPS, SLOW_STEPS = 40, 10  # compute takes no time, then a second
SHARES = {"rollout": 0.5, "logprob": 0.1, "train_steps": 0.25, "update_weights": 0.05}  # seconds; logprob comes twice
TIMES = "step_starts.json"  # of each step: when it began, and how much CPU time the machine had used and lost to its host by then


def _compute(stage: str, step: int) -> None:
    if step > QUICK_STEPS:
        time.sleep(SHARES[stage])


_SAMPLE = Sample.of(Problem("p", "p", "a"), Response("r", 1, False), Verdict(0.0, "scored", False), 0)


class StubCollector:
    """Commits the groups of a step as soon as the ledger gives places for them; no row of them is written."""

    def __init__(
        self, config: RunConfig, model_path: str, namespace: str, engines: list[str], environment: str, address: DataPlaneAddress, _: Any
    ) -> None:
        self._rollout, self._namespace = config.rollout, namespace
        self._plane = connect(address, timeout_s=config.data_plane.timeout_s)
        self._plane.register_partition("train", fields=TRAIN_FIELDS)
        self._shown = config.logged_samples
        self._began = time.monotonic()
        self._stopping, self._error = threading.Event(), ""

    def ready(self) -> str:
        return "stub"

    def begin_generating(self) -> None:
        self._thread = threading.Thread(target=self._generate, daemon=True)
        self._thread.start()

    def _generate(self) -> None:
        ledger = ray.get_actor(names.LEDGER, namespace=self._namespace)
        try:
            for step in itertools.count(1):
                self._answer(ledger, step)
        except Exception as error:  # noqa: BLE001  (the real loop's way)
            self._error = f"{type(error).__name__}: {error}"
            ray.get(ledger.abandon.remote(self._error))
        finally:
            self._stopping.set()

    def _answer(self, ledger: Any, step: int) -> None:
        uids = [f"basic_arithmetic-{step}-{prompt}" for prompt in range(self._rollout.prompts_per_step)]
        given: tuple[Admitted, ...] = ()
        while not given:
            if self._stopping.is_set():
                raise InterruptedError("it was stopped")
            given = ray.get(ledger.reserve.remote(uids, self._rollout.responses_per_prompt, 1.0)).given
        _compute("rollout", step)
        ray.get(ledger.commit.remote([Committed(place.uid, self._meta(place), place.version, place.version) for place in given]))

    def _meta(self, place: Admitted) -> KVBatchMeta:
        tags = tuple(
            {
                "prompt_uid": place.uid,
                "weight_version": place.version,
                "weight_versions": 1,
                "reward": float(row % 3 == 0),
                "dropped": False,
                "masked": False,
                "response_length": 5,
                "truncated": False,
            }
            for row in range(len(place.keys))
        )
        return KVBatchMeta(
            partition_id="train", task_name="rollout", keys=place.keys, sequence_lengths=(20,) * len(place.keys), tags=tags
        ).with_fields(*ROLLOUT_FIELDS)

    def progress(self, wait_s: float) -> Progress:
        ended = self._stopping.wait(wait_s)
        error = self._error if "it was stopped" not in self._error else ""
        seconds = time.monotonic() - self._began
        return Progress(groups=0, tokens=0, seconds=seconds, in_flight=0, log=(), ended=ended, error=error or None)

    def report(self) -> StepReport:
        return StepReport(samples=(_SAMPLE,) * self._shown, metrics={})

    def stop_generating(self) -> None:
        self._stopping.set()

    def validate(self, weight_version: int, name: str) -> Validation:
        return Validation.of([[_SAMPLE]], ValidationConfig(), shown=1)

    def data_plane_metrics(self, others: dict[str, OperationUsage]) -> dict[str, float]:
        return self._plane.metrics([others])


class StubWorker:
    """Answers every stage."""

    def __init__(self, *_: Any) -> None:
        self._trained = 0

    def ping(self) -> None: ...
    def ready(self) -> None: ...
    def release_memory(self) -> None: ...

    def execute(self, packed: bytes) -> bytes:
        return Request.answer(packed, self._run)

    def _run(self, request: Request) -> Any:
        if request.method == "warm_up":
            return None
        metrics = dict.fromkeys(("loss", "kl", "grad_norm", "clip_fraction", "logprob_error/mean", "logprob_error/max"), 0.1)
        if request.method == "train_steps":
            self._trained += 1
            _compute("train_steps", self._trained)
            return [metrics] * len(request.arguments[0])
        if self._trained:
            _compute(request.method, self._trained + 1)
        return metrics

    def node_id(self) -> str:
        return own_id()

    def announce(self) -> str:
        return "nobody meets"

    def setup(self, place: str) -> dict[str, Any]:
        return {"device": "stub", "parameters": 0, "optimizer": "stub", "cuda_graphs": "no CUDA graphs"}

    def data_plane_usage(self) -> dict[str, OperationUsage]:
        return {}

    def call(self, method: str, *arguments: Any) -> dict[str, Any] | None:
        if method == "save_hf":
            Path(arguments[0]).mkdir()
        return {} if method == "export_weights" else None


class StubPolicyGroup(PolicyGroup):
    """The real group over stub workers."""

    worker = StubWorker

    def __init__(self, *args: Any) -> None:
        with patch.object(actors.policy.group, "PolicyWorkerActor", self.worker):
            super().__init__(*args)


class StubEngine:
    """Takes weights."""

    def __init__(self, *_: Any) -> None: ...

    def ready(self) -> str:
        return "stub"

    def update_weights(self, weights: Any, version: int, options: UpdateOptions) -> WeightUpdate:
        _compute("update_weights", version)
        return WeightUpdate(bytes=0, pause_s=0.0)


@contextmanager
def stubbed(
    group: type[StubPolicyGroup] = StubPolicyGroup, collector: type[StubCollector] = StubCollector, engine: type[StubEngine] = StubEngine
) -> Iterator[None]:
    """Runs that are launched inside have these actors."""
    with ExitStack() as stack:
        for name, stub in (
            ("Collector", collector),
            ("PolicyGroup", group),
            ("engine_actor_class", lambda: ray.remote(engine)),
        ):
            stack.enter_context(patch.object(tasks.launch, name, stub))
        yield


@flow(name="control-plane", flow_run_name=run_name, validate_parameters=False)
def control_plane(recipe: str, overrides: list[str]) -> None:
    """The `grpo` flow with stubs; when each step began is left beside its metrics."""
    # Prefect loads this file under another name, by which actors in other processes could not import the stubs.
    import benchmarks.control_plane_flow as stubs

    starts: list[tuple[float, float, float]] = []
    step = GrpoSession.step
    directory: list[Path] = []

    @contextmanager
    def noted(self: GrpoSession, number: int) -> Iterator[Any]:
        directory[:] = [self.directory.root]
        cpu = psutil.cpu_times()
        starts.append((time.monotonic(), cpu.user + cpu.nice + cpu.system, getattr(cpu, "steal", 0.0)))
        with step(self, number) as stage:
            yield stage

    with stubs.stubbed(), patch.object(GrpoSession, "step", noted):
        grpo.fn(recipe, overrides)
    (directory[0] / TIMES).write_text(json.dumps(starts))
