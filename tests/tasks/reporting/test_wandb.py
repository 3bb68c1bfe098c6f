"""Weights & Biases: its offline mode, and a server that is not there. Skipped where it is not installed (the extra `wandb`)."""

from __future__ import annotations

import json
import multiprocessing
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs import settings
from configs.trackers import TrackerConfig, WandbConfig
from tasks.reporting.run_dir import RunDirectory
from tests.conftest import ROOT
from tests.patience import WAIT_S
from tests.tasks.reporting.test_trackers import cut, steps_of

wandb = pytest.importorskip("wandb")
OFFLINE = (TrackerConfig(wandb=WandbConfig(mode="offline", project="p", tags=("t",))),)
BLOCK, HEADER = 32768, 7


def records(run: Path) -> list[Any]:
    """Of an offline run's file, when W&B's own process has written the last of them."""
    (path,) = run.glob("*.wandb")
    deadline = time.monotonic() + WAIT_S
    while True:
        found = list(parsed(path))
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def parsed(path: Path) -> Iterator[Any]:
    """LevelDB's log format, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if at + HEADER + length > len(data):
            return
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # full, last
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(run: Path) -> list[dict[str, Any]]:
    """The rows that `wandb sync` would send."""
    rows = []
    for record in records(run):
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append(items)
    return rows


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine W&B's own process takes longer to start than a run waits for it."""
    for wait in ("_END_S", "_CUT_S"):
        monkeypatch.setattr(f"tasks.reporting.trackers.run_trackers.{wait}", WAIT_S)


@pytest.mark.usefixtures("patient")
def test_a_run_and_one_that_goes_on_after_a_cut(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    steps_of(directory, OFFLINE, [1, 2, 3], None)
    cut(directory, 1)
    time.sleep(1.0)  # W&B calls its directories by the second
    directory.report.write_text("<html>")
    steps_of(directory, OFFLINE, [2, 3, 4], "completed", loss=2.0)
    first, second = sorted((directory.root / "wandb").glob("offline-run-*"))
    identity = json.loads((directory.trackers / "wandb.json").read_text())["run"]
    assert first.name.endswith(identity)
    assert second.name.endswith(identity)
    rows = history(first) + history(second)
    points = [(row["_step"], row["loss"], row["accuracy/validation"]) for row in rows]
    assert points == [(1, 1.0, 0.1), (2, 0.5, 0.2), (3, 1 / 3, 0.3), (4, 0.5, 0.4)]
    assert all(row["samples/train/_type"] == "table-file" for row in rows)
    assert rows[-1]["report/_type"] == "html-file"
    (table,) = (second / "files/media/table/samples").iterdir()
    shown = json.loads(table.read_text())
    assert dict(zip(shown["columns"], shown["data"][0], strict=True))["response"] == "r4"


@pytest.mark.usefixtures("patient")
def test_the_configuration_goes_there_and_the_machine_does_not(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    steps_of(directory, OFFLINE, [1], "failed")
    (run,) = (directory.root / "wandb").glob("offline-run-*")
    (begun,) = [record.run for record in records(run) if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config.pop("_wandb", None) is not None
    assert config == {"steps": 9, "a.b": "x", "url": "https://${env:KEY}@host", "recipe": "r", "prefect.flow_run": "id"}
    assert (begun.project, begun.display_name, begun.job_type, list(begun.tags)) == ("p", "tiny", "grpo", ["t"])
    assert not list(run.rglob("*.patch"))
    assert not list(run.rglob("output.log"))
    assert [record.exit.exit_code for record in records(run) if record.HasField("exit")] == [1]


CODE = """
import sys
from pathlib import Path
from configs import settings; settings.apply_defaults()
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers import wandb as ours
from tests.tasks.reporting.test_trackers import steps_of
from configs.trackers import TrackerConfig, WandbConfig
if __name__ == "__main__":
    ours._START_S = 1.0
    steps_of(RunDirectory(Path(sys.argv[1])), (TrackerConfig(wandb=WandbConfig()),), [1], "completed")
"""


def test_without_its_server_the_run_ends_and_so_does_the_process(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    away = settings.child_environment(WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", CODE, str(directory.root)], env=away, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0
    assert "tracker wandb: CommError" in done.stderr
    assert len(directory.metrics.read_text().splitlines()) == 2


def test_without_a_key_nobody_is_asked_for_one(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    nobody = settings.child_environment(WANDB_API_KEY="", HOME=str(tmp_path), NETRC=str(tmp_path / "netrc"), PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", CODE, str(directory.root)], env=nobody, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("tracker")]
    assert line.startswith("tracker wandb: UsageError: No API key configured. Use `wandb login` to log in.; left out, the run goes on")


def test_nothing_is_told_to_its_makers() -> None:
    assert not wandb.env.error_reporting_enabled()


def test_a_process_that_multiprocessing_spawned_ends(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    child = multiprocessing.get_context("spawn").Process(target=steps_of, args=(directory, OFFLINE, [1], "completed"))
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0
    assert len(list((directory.root / "wandb").glob("offline-run-*"))) == 1
