"""A machine after `make up`, in a home directory of the tests' own: a server with a password, Ray, worker, deployments."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from configs import settings
from flows.service.parts import Record, look
from tests.conftest import ROOT
from tests.patience import WAIT_S

PASSWORD = "tests:opens-this-server-4471"
LIST_ACTORS = """
import json, sys
from configs import settings
settings.apply_defaults()
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps(ray.util.list_named_actors(all_namespaces=True)))
"""


@dataclass
class Deployed:
    """What `make up` started."""

    home: Path
    output: str
    ticks: Record  # the worker of the schedule that ticks every minute
    client: SyncPrefectClient = field(init=False)

    @property
    def record(self) -> Record:
        return Record(self.home)

    @property
    def url(self) -> str:
        return self.record.parts["server"].address

    @contextmanager
    def addressed(self) -> Iterator[None]:
        """Prefect's functions in this process mean this server inside the block."""
        with temporary_settings({PREFECT_API_URL: f"{self.url}/api", PREFECT_API_AUTH_STRING: PASSWORD}):
            yield

    @contextmanager
    def connected(self) -> Iterator[None]:
        """`client` can be used inside the block. One for all tests: each would read the certificates anew."""
        with self.addressed():
            client = get_client(sync_client=True)
        with client as self.client:
            yield

    def environment(self, **extra: str) -> dict[str, str]:
        """Of a person's shell in the home directory: nothing there names the server or the cluster.

        Its Ray starts a fork server of its own, as a person's does, so all workers are in its session. (The tests' server is in theirs.)
        """
        own = {
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
            "PYTHONPATH": settings.python_path(ROOT),
            "GRPO_FLOWS_FORKS": "",
        }
        values = settings.child_environment(**own, **extra)
        return {name: value for name, value in values.items() if name not in {"PREFECT_API_URL", "RAY_ADDRESS", "PREFECT_UI_API_URL"}}

    def command(self, *arguments: str, timeout_s: float = 2 * WAIT_S) -> subprocess.CompletedProcess[str]:
        """A module's; to Prefect's own, the password is given as `make up` says."""
        password = {"PREFECT_API_AUTH_STRING": PASSWORD} if arguments[0] == "prefect" else {}
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.home,
            env=self.environment(**password),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )

    def up(self, *arguments: str) -> str:
        done = self.command("flows.service.up", "--home", str(self.home), *arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def stop_ticking(self) -> None:
        """No more runs of the schedule."""
        for name in list(self.ticks.parts):
            self.ticks.stop(name, signal.SIGINT, 10)

    def begin(self, deployment: str, **parameters: Any) -> FlowRun:
        """A run of the deployment, which the worker picks up."""
        found = self.client.read_deployment_by_name(deployment)
        return self.client.create_flow_run_from_deployment(found.id, parameters=parameters)

    def cancel(self, run: FlowRun) -> None:
        """As the button in the UI does."""
        self.client.set_flow_run_state(run.id, Cancelling())

    def runs(self, deployment: str) -> list[FlowRun]:
        """Of the deployment."""
        found = self.client.read_deployment_by_name(deployment)
        return self.client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[found.id])))

    def state(self, run: FlowRun) -> tuple[str, str]:
        """(type, message) of the run's state."""
        state = self.client.read_flow_run(run.id).state
        assert state is not None
        return state.type.value, state.message or ""

    def crashes(self, run: FlowRun) -> list[float]:
        """Unix times at which the run became Crashed, in order."""
        states = self.client.read_flow_run_states(run.id)
        return sorted(state.timestamp.timestamp() for state in states if state.is_crashed())

    def pid(self, run: FlowRun) -> int:
        """The flow's process. Prefect's worker tells the server of it some time after it has started it."""
        found: list[str] = []

        def told() -> bool:
            pid = self.client.read_flow_run(run.id).infrastructure_pid
            found[:] = [str(pid)] if pid else []
            return bool(found)

        await_true("the process's number", told, WAIT_S)
        return int(found[0])

    def pids(self) -> list[int]:
        """Of all parts, and of all that they started."""
        return [process.pid for part in self.record.parts.values() for process in part.members()]

    def actor_processes(self) -> list[str]:
        """Titles of the processes in the cluster that an actor has made its own."""
        titles = []
        for process in self.record.parts["ray"].members():
            try:
                title = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[0]
            except OSError:
                continue
            if title.startswith("ray::") and not title.startswith(("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")):
                titles.append(title)
        return titles

    def forks(self) -> list[str]:
        """Titles of the processes in the cluster that are forks of its fork server."""
        found = []
        for member in self.record.parts["ray"].members():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(member.pid)
                if (parent := process.parent()) and "actors.forks.server" in parent.cmdline():
                    found.append(" ".join(process.cmdline()).strip())
        return found

    def actors(self) -> list[str]:
        """Names of the actors that Ray knows, of every run."""
        address = self.record.parts["ray"].address
        done = subprocess.run(
            [sys.executable, "-c", LIST_ACTORS, address], cwd=ROOT, env=self.environment(), capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr
        return [actor["name"] for actor in json.loads(done.stdout)]


def await_true(what: str, check: Callable[[], object], timeout_s: float) -> None:
    """Until the check holds."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def gone(pid: int) -> bool:
    """Whether no such process runs."""
    return look(pid) is None
