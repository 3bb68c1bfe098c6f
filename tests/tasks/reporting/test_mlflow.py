"""MLflow: against a server of its own on loopback. Skipped where MLflow is not installed (the extra `mlflow`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs import settings
from configs.trackers import TENSORBOARD, MlflowConfig, TrackerConfig
from flows.service.server import free_port
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers import outbox
from tasks.reporting.trackers.run_trackers import RunTrackers
from tests.patience import WAIT_S
from tests.tasks.reporting.test_trackers import Trackers, cut, steps_of

mlflow = pytest.importorskip("mlflow")


class Server:
    """`mlflow server`, with its store in a folder; it may go away and come back."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = mlflow.MlflowClient(tracking_uri=self.url)
        self.start()

    def start(self) -> None:
        store = ("--backend-store-uri", f"sqlite:///{self._folder}/store.db", "--artifacts-destination", f"{self._folder}/artifacts")
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1", *store]
        self._log = (self._folder / "log").open("ab")
        environment = settings.child_environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
        self._process = subprocess.Popen(
            command, cwd=self._folder, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # the command leaves its server behind
        self._process.wait(WAIT_S)
        self._log.close()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def run(self, experiment: str) -> Any:
        """The one run of the experiment."""
        found = self.client.get_experiment_by_name(experiment)
        (run,) = self.client.search_runs([found.experiment_id])
        return run

    def await_points(self, experiment: str, count: int) -> None:
        """Until the experiment's run has so many values of the loss."""
        deadline = time.monotonic() + WAIT_S
        while not self.client.get_experiment_by_name(experiment) or len(self.points(self.run(experiment), "loss")) < count:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def points(self, run: Any, name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.client.get_metric_history(run.info.run_id, name)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.stop()


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    """A name that no other test has, nor an earlier run of the same one."""
    return tmp_path.name


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "tiny")


def trackers(server: Server, experiment: str) -> Trackers:
    return (TrackerConfig(mlflow=MlflowConfig(url=server.url, experiment=experiment)),)


def test_a_run_and_one_that_goes_on_after_a_cut(server: Server, experiment: str, directory: RunDirectory, tmp_path: Path) -> None:
    there = trackers(server, experiment)
    directory.report.write_text("<html>")
    steps_of(directory, there, [1, 2, 3], None)
    cut(directory, 1)
    (directory.trackers / "mlflow.json").write_text(  # as in a checkpoint on another machine: it knows of step 1 alone
        json.dumps({"run": server.run(experiment).info.run_id, "sent": {"samples:train": 3}})
    )
    steps_of(directory, there, [2, 3, 4], "completed", loss=2.0)
    run = server.run(experiment)
    assert server.points(run, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.5)]
    assert server.points(run, "accuracy/validation") == [(step, step / 10) for step in (1, 2, 3, 4)]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    assert run.data.params == {"steps": "9", "a.b": "x", "url": "https://${env:KEY}@host"}
    assert run.data.tags["prefect.flow_run"] == "id"
    kept = json.loads(Path(server.client.download_artifacts(run.info.run_id, "samples/train-000000.json", str(tmp_path))).read_text())
    assert [dict(zip(kept["columns"], row, strict=True))["response"] for row in kept["data"]] == ["r1", "r2", "r3", "r4"]
    assert {"report.html", "samples"} <= {found.path for found in server.client.list_artifacts(run.info.run_id)}


def test_nothing_is_told_to_its_makers() -> None:
    assert mlflow.environment_variables.MLFLOW_DISABLE_TELEMETRY.get()


def test_a_run_that_somebody_has_deleted_is_begun_again_with_all_of_it(server: Server, experiment: str, directory: RunDirectory) -> None:
    there = trackers(server, experiment)
    steps_of(directory, there, [1], None)
    server.client.delete_run(server.run(experiment).info.run_id)
    steps_of(directory, there, [2], "failed")
    run = server.run(experiment)
    assert (server.points(run, "loss"), run.info.status) == ([(1, 1.0), (2, 0.5)], "FAILED")


def test_a_server_that_goes_away_and_comes_back(
    server: Server, experiment: str, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_TRIES", 10**6)
    monkeypatch.setattr(outbox, "_WAITS_S", ())
    monkeypatch.setattr(outbox, "_LONGEST_WAIT_S", 0.1)
    said: list[str] = []
    with RunTrackers(directory, (*TENSORBOARD, *trackers(server, experiment)), say=said.append) as run:
        run.metrics(1, {"loss": 1.0})
        server.await_points(experiment, 1)
        server.stop()
        run.metrics(2, {"loss": 0.5})
        while not said:
            time.sleep(0.05)
        server.start()
        server.await_points(experiment, 2)
        run.close("completed")
    assert server.points(server.run(experiment), "loss") == [(1, 1.0), (2, 0.5)]
    assert len(said) == 1
    assert said[0].startswith("tracker mlflow: ")
    assert said[0].endswith("trying again, the run goes on")
