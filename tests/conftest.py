"""One Ray for the session, on loopback, with nothing but this repository on its path. No test uses a server that runs already."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import hypothesis
import psutil
import pytest

from configs import settings

settings.apply_defaults()
settings.set_for_process(PREFECT_API_URL="")  # else the prefect.toml of a `make up` in this directory would name one
settings.set_for_process(GRPO_FLOWS_DEFAULTS="")  # offline, as if by the user's will: no test asks a hub outside

import ray  # noqa: E402  (after the settings: they are read at import)
from ray._private.node import Node  # noqa: E402

import benchmarks  # noqa: E402
import tests  # noqa: E402
from actors.forks.server import running  # noqa: E402
from tasks.cluster import bare_head, chosen_agent_ports, forked_workers, own_node, raylet  # noqa: E402
from tasks.scratch import remove_semaphores  # noqa: E402

# An actor of a test's class would else import the test's module, and with it pytest, Prefect and whatever the test is about.
for package in (tests, benchmarks):
    ray.cloudpickle.register_pickle_by_value(package)
# Ray would start sixteen workers at once, which no actor takes: theirs have another environment.
settings.set_for_process(RAY_enable_worker_prestart="0")

# A shell starts background commands with SIGINT ignored, and children inherit that. Ray cancels a task by an interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
SHARED = ("deployed", "twins", "engine", "results")  # fixtures of the session that take long

# The machines are shared: how long an example takes says nothing about the code.
hypothesis.settings.register_profile("shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shared")


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray's workers are forks of one process, in the clusters that this process starts and in those of its children: see actors/forks."""
    with running(tmp_path_factory.mktemp("forks")):
        yield


@pytest.fixture(scope="session")
def ray_session(forks: None) -> Iterator[None]:
    """A cluster of this session's own; tests keep apart by namespace."""
    began = time.time_ns()
    with forked_workers(), bare_head(), chosen_agent_ports(), patch.object(Node, "start_log_monitor"):
        ray.init(
            address="local",
            num_cpus=16,  # logical: actors of several rooms live side by side, most of them idle
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            log_to_driver=False,
            namespace="tests",
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": {"PYTHONPATH": settings.python_path(ROOT)}},
        )
    pid = raylet()
    yield
    ray.shutdown()
    remove_semaphores(pid, began)  # a thousand, which Ray leaves


@pytest.fixture(scope="session")
def log_monitor(ray_session: None) -> None:
    """Ray's log monitor, through which a run gets its actors' lines. It reads the log files of all tests twice a second, so it runs only
    once a test looks at lines.
    """
    own_node().start_log_monitor()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are skipped where there is no GPU; whole runs come after the parts that they are made of.

    `make test` runs two processes: files are the units, and tests that share something expensive stay together. There the longest come
    first (whole runs, then what is marked slow), so that both processes end at about the same time.
    """
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        shared = next((name for name in SHARED if name in getattr(item, "fixturenames", ())), None)
        # By its path, not its name: a namesake elsewhere would lead out of tests/e2e, and its servers end there.
        item.add_marker(pytest.mark.xdist_group(shared or item.nodeid.partition("::")[0]))
    items.sort(
        key=lambda item: ("e2e" in item.path.parts, item.get_closest_marker("slow") is not None), reverse=hasattr(config, "workerinput")
    )


def _cpu_s() -> float:
    """Seconds that all processes of this machine have computed."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


_BEGAN = _cpu_s()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """At the end of a whole run: what it cost, whoever's processes it was (Ray's and Prefect's are no children of pytest's)."""
    terminalreporter.write_line(f"CPU time of this machine meanwhile: {_cpu_s() - _BEGAN:.0f} s")


class _FailuresAtOnce:
    """Writes the end of each failure when it comes: pytest lists them at the end, which a run that is cut short does not reach."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"failed: {report.nodeid} ({report.when})")
            self._terminal.write_line("\n".join(report.longreprtext.splitlines()[-20:]))


@pytest.hookimpl(trylast=True)  # after the terminal's reporter
def pytest_configure(config: pytest.Config) -> None:
    """With one process, or in the one that the others of `make test` report to."""
    if (terminal := config.pluginmanager.get_plugin("terminalreporter")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(terminal))


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary directory of this process and its children; its name is short, for Ray's sockets lie in it."""
    with (
        tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as path,
        settings.variables(TMPDIR=path),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", path)
        yield Path(path)
