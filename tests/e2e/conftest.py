"""Real runs, short ones: one Prefect server for all of them, and two runs of the same recipe and seed.

Servers end with the last test of this package, for they cost CPU time while nobody asks them anything.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from prefect import Flow, Task
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.workers.process import ProcessWorker

import flows.grpo_session
import flows.saving
import flows.session
import flows.sft_session
import flows.training_session
from actors.waiting import find, wait
from flows.grpo import grpo
from flows.service.parts import Record
from flows.service.server import prefect_server
from flows.service.up import worker_command
from tests.conftest import ROOT
from tests.e2e.deployed import PASSWORD, Deployed, gone
from tests.e2e.tick import tick
from tests.homes import prefect_home
from tests.listeners import Listener, watching
from tests.patience import WAIT_S

DEPLOYMENT = "grpo/async"  # the one that the tests run to its end
SHORT = [
    "steps=3", "validate_every=2", "model.hidden_size=64", "model.num_attention_heads=2", "model.num_key_value_heads=1",
    "model.intermediate_size=96", "model.num_hidden_layers=2", "environment.validation_size=12",
    "environment.train_size=500", "rollout.prompts_per_step=4", "rollout.responses_per_prompt=4", "warm_start.steps=20",
    "warm_start.check_every=20", "warm_start.batch_size=16", "policy.batching.micro_batch_size=8", "policy.updates_per_step=1",
    "policy.optimizer.warmup_steps=0",
    "generation.kv_cache_gib=0.125", "generation.max_num_seqs=32",
]  # fmt: skip
# For runs that are compared: on a busy machine to score an answer may take longer than its ten seconds.
PATIENT = "rewards=[{kind: reasoning_gym, timeout_s: 300}]"


def call(namespace: str, actor: str, method: str, *arguments: Any) -> Any:
    """Call a method of a run's actor by its name, and wait."""
    return wait(getattr(find(actor, namespace), method).remote(*arguments), who=actor, what=method, timeout_s=WAIT_S)


@dataclass
class Crossing:
    """What a task run was given and gave back."""

    task: str
    argument_bytes: int
    result_bytes: int
    tensors: int


@dataclass
class Run:
    """A finished run."""

    summary: dict[str, Any]
    directory: Path
    flow_run_id: str
    crossings: list[Crossing] = field(default_factory=list)


class _Recorder:
    """Calls a task, and weighs what crosses into it and out of it."""

    def __init__(self, task: Task[Any, Any], crossings: list[Crossing]) -> None:
        self._task, self._crossings = task, crossings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._task(*args, **kwargs)
        self._note(args, kwargs, result)
        return result

    def submit(self, *args: Any, wait_for: Any = None, **kwargs: Any) -> Any:
        future = self._task.submit(*args, wait_for=wait_for, **kwargs)
        future.add_done_callback(lambda done: self._note(args, kwargs, done.result(raise_on_failure=False)))
        return future

    def _note(self, args: Any, kwargs: Any, result: Any) -> None:
        given, returned = _weigh((args, kwargs)), _weigh(result)
        self._crossings.append(Crossing(self._task.name, given[0], returned[0], given[1] + returned[1]))


def _weigh(value: Any) -> tuple[int, int]:
    tensors = 0

    class Counting(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            nonlocal tensors
            tensors += isinstance(obj, torch.Tensor)
            return NotImplemented

    import io

    buffer = io.BytesIO()
    Counting(buffer).dump(value)
    return buffer.tell(), tensors


@pytest.fixture(scope="session", autouse=True)
def forked_workers(forks: None) -> None:
    """Also those of the commands that these tests start."""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server with a database of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(prefect_home(tmp_path_factory.mktemp("prefect"))))
        patch.delenv("PREFECT_API_URL", raising=False)
        with prefect_server() as url:
            yield url


@pytest.fixture(scope="package")
def run_recorded(server: str, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs a flow on a recipe with overrides, in this process."""

    def run(flow: Flow[Any, Any], recipe: str, *overrides: str) -> Run:
        output = tmp_path_factory.mktemp("runs")
        crossings: list[Crossing] = []
        with pytest.MonkeyPatch.context() as patch:
            for module in (flows.grpo_session, flows.session, flows.sft_session, flows.saving, flows.training_session):
                for name, value in vars(module).copy().items():
                    if isinstance(value, Task):
                        patch.setattr(module, name, _Recorder(value, crossings))
            state = flow(recipe=recipe, overrides=[f"output_dir={output}", *overrides], return_state=True)
        summary = state.result()
        return Run(summary, output / "latest", str(state.state_details.flow_run_id), crossings)

    return run


@pytest.fixture(scope="package")
def run_flow(run_recorded: Callable[..., Run]) -> Callable[..., Run]:
    """Runs GRPO on the short recipe with more overrides."""
    return lambda *overrides: run_recorded(grpo, "arithmetic-cpu", *SHORT, *overrides)


@pytest.fixture(scope="package")
def twins(run_flow: Callable[..., Run]) -> tuple[Run, Run]:
    """The same recipe and seed, twice."""
    return run_flow(PATIENT), run_flow(PATIENT)


@pytest.fixture(scope="package")
def finished(twins: tuple[Run, Run]) -> Run:
    """The first of the twins."""
    return twins[0]


@pytest.fixture(scope="package")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """After `make up`. A schedule begins to tick at once, so that its minute passes beside the other tests."""
    home = tmp_path_factory.mktemp("home")
    machine = Deployed(home, str(home / "runs"), Record(tmp_path_factory.mktemp("ticks")))
    try:
        machine.up()
        with machine.connected():
            start_ticking(machine)
            yield machine
    finally:
        machine.stop_ticking()
        left = [process.pid for part in machine.record.parts.values() for process in part.members()]
        machine.up("--down")
        assert [pid for pid in left if not gone(pid)] == []


def start_ticking(machine: Deployed) -> None:
    """A deployment with a cron schedule, in a pool with a worker of its own: the other pool runs one flow at a time."""
    template = ProcessWorker.get_default_base_job_template()
    machine.client.create_work_pool(WorkPoolCreate(name="ticks", type="process", base_job_template=template))
    with machine.addressed():
        source = tick.from_source(source=str(ROOT), entrypoint="tests/e2e/tick.py:tick")
        source.deploy(name="cron", work_pool_name="ticks", cron="* * * * *", print_next_steps=False)  # type: ignore[union-attr]
    machine.ticks.directory.mkdir(parents=True)
    environment = machine.environment(PREFECT_API_AUTH_STRING=PASSWORD) | {"PREFECT_API_URL": f"{machine.url}/api"}
    machine.ticks.start("worker", machine.url, worker_command("ticks", "ticks"), environment, ROOT)


class Watched(NamedTuple):
    """A run of a deployment.

    Attributes:
        printed: by the command that began it.
        doors: where processes of `make up` listened meanwhile, those of the run among them.
    """

    run: FlowRun
    printed: str
    doors: set[Listener]


@pytest.fixture(scope="package")
def watched(deployed: Deployed) -> Watched:
    """The run of `prefect deployment run ... --watch`, typed where `make up` was."""
    overrides = json.dumps([*SHORT, f"output_dir={deployed.output}"])
    with watching(deployed.pids) as doors:
        done = deployed.command("prefect", "deployment", "run", DEPLOYMENT, "--watch", "-p", f"overrides={overrides}", "-p", "steps=2")
    assert done.returncode == 0, done.stdout + deployed.record.log("worker").read_text()
    return Watched(deployed.runs(DEPLOYMENT)[0], done.stdout, doors)
