"""Trackers: what each place has after a run, after a cut, and when it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from configs.base import ConfigError
from configs.loader import dump, load
from configs.trackers import TENSORBOARD, OwnTrackerConfig, TrackerConfig, check_installed, labels
from tasks.reporting.jsonl import read_lines
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers import outbox
from tasks.reporting.trackers.base import About, Row, Status, Tracker, table
from tasks.reporting.trackers.run_trackers import RunTrackers
from tests.conftest import ROOT
from tests.patience import WAIT_S
from tests.tasks.reporting.runs import Said


class Listening(Tracker):
    """Keeps what it is told in `there`, which outlives it as a server would."""

    there: ClassVar[list[tuple[Any, ...]]] = []
    failing: ClassVar[int] = 0  # the next so many calls raise

    def __init__(self, token: str = "") -> None:
        self.token = token

    def open(self, about: About, before: str | None) -> str:
        self._fail()
        self.there.append(("open", about.step, before, self.token))
        return before or "one"

    def metrics(self, step: int, values: Mapping[str, float | None], at: float) -> None:
        self._fail()
        if 666 in values.values():
            raise ValueError("no such number")
        self.there.append((step, dict(values)))

    def samples(self, step: int, phase: str, rows: Sequence[Row]) -> None:
        self._fail()
        self.there.append((step, phase, [row["response"] for row in rows]))

    def close(self, status: Status | None) -> None:
        self._fail()
        self.there.append(("close", status))

    def _fail(self) -> None:
        if Listening.failing:
            Listening.failing -= 1
            raise ConnectionError("https://me:secret@host is away")


LISTENING = (TrackerConfig(python=OwnTrackerConfig(import_path=f"{__name__}:Listening")),)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(Listening, "there", [])
    monkeypatch.setattr(Listening, "failing", 0)
    monkeypatch.setattr(outbox, "_WAITS_S", ())
    monkeypatch.setattr(outbox, "_LONGEST_WAIT_S", 0.0)
    return RunDirectory.create(tmp_path, "tiny")


type Trackers = tuple[TrackerConfig, ...]


def steps_of(directory: RunDirectory, trackers: Trackers, steps: Sequence[int], status: Status | None, loss: float = 1.0) -> None:
    """A start of a run that makes these steps; each is validated after it."""
    about = About(directory.root, "tiny", "grpo", "r", "id", {"steps": 9, "a.b": "x", "url": "https://${env:KEY}@host"})
    with RunTrackers(directory, trackers, about) as run:
        for step in steps:
            run.metrics(step, {"loss": loss / step, "kl": float("nan")})
            run.samples(step, "train", [Said("p", f"r{step}", "a", 0.5, step)])
            run.metrics(step, {"accuracy/validation": step / 10})
        run.close(status)


def cut(directory: RunDirectory, step: int) -> None:
    """As the restoring of a checkpoint leaves the lines."""
    for path in (directory.metrics, directory.samples):
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
        path.write_text("".join(f"{line}\n" for line in kept))


def test_how_a_recipe_names_them(tmp_path: Path) -> None:
    given = "[tensorboard, {mlflow: {url: 'http://127.0.0.1:1'}}, {mlflow: {}}, {wandb: {mode: offline, tags: [a]}}]"
    config = load("arithmetic-cpu", [f"trackers={given}"])
    assert labels(config.trackers) == ["tensorboard", "mlflow", "mlflow-2", "wandb"]
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(str(tmp_path / "again.yaml")) == config
    assert type(config).model_validate(config.model_dump()) == config  # as from a manifest
    assert load("arithmetic-cpu").trackers == load("arithmetic-cpu", ["trackers=[{tensorboard: }]"]).trackers == TENSORBOARD
    assert load("arithmetic-cpu", ["trackers=[]"]).trackers == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[mlfow]", "did you mean 'mlflow'"),
        ("[{wandb: {projekt: x}}]", "did you mean 'project'"),
        ("[{wandb: {}, mlflow: {}}]", "name one of tensorboard, mlflow, wandb, python"),
        ("[tensorboard, tensorboard]", "tensorboard is there twice"),
        ("[{mlflow: {url: 'http://me:secret@host'}}]", "refer to it"),
        ("[{python: {import_path: 'a:B', options: {api_key: k}}}]", "refer to it"),
        ("[{python: {import_path: nothing}}]", "package.module:Name"),
    ],
)
def test_wrong_ones(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load("arithmetic-cpu", [f"trackers={given}"])
    assert said in str(raised.value)
    assert "me:secret" not in str(raised.value)


def test_a_package_that_is_missing_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check_installed(load("arithmetic-cpu", ["trackers=[wandb]"]).trackers)
    with pytest.raises(ConfigError, match=r"no 'Lisening'; did you mean 'Listening'"):
        check_installed((TrackerConfig(python=OwnTrackerConfig(import_path=f"{__name__}:Lisening")),))


def test_all_get_the_same_and_values_that_are_not_finite_stay_out(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_TOKEN", "hush!")
    own = TrackerConfig(python=OwnTrackerConfig(import_path=f"{__name__}:Listening", options={"token": "${env:TRACKER_TOKEN}"}))
    steps_of(directory, (*TENSORBOARD, own), [1], "completed")
    assert Listening.there == [
        ("open", -1, None, "hush!"), (1, {"loss": 1.0}), (1, "train", ["r1"]), (1, {"accuracy/validation": 0.1}), ("close", "completed"),
    ]  # fmt: skip
    assert read_lines(directory.metrics) == [{"step": 1, "kl": None, "loss": 1.0}, {"step": 1, "accuracy/validation": 0.1}]
    assert shown(directory, "loss") == [(1, 1.0)]
    ((_, (columns, cells)),) = shown(directory, "samples/train")
    assert dict(zip(columns, cells, strict=True))[b"response"] == b"r1"


def test_a_resumed_run_goes_on_with_the_same_one_and_doubles_nothing(directory: RunDirectory) -> None:
    steps_of(directory, LISTENING, [1, 2, 3], None)
    cut(directory, 1)
    del Listening.there[:]
    steps_of(directory, LISTENING, [2, 3, 4], "completed", loss=2.0)
    assert Listening.there == [
        ("open", 1, "one", ""), (4, {"loss": 0.5}), (4, "train", ["r4"]), (4, {"accuracy/validation": 0.4}), ("close", "completed"),
    ]  # fmt: skip


def test_what_was_not_sent_before_the_end_is_sent_by_the_next_start(directory: RunDirectory) -> None:
    steps_of(directory, (), [1, 2], None)  # as if the place had been away all the time
    steps_of(directory, LISTENING, [3], "completed")
    assert [call[0] for call in Listening.there] == ["open", 1, 1, 2, 2, 1, 2, 3, 3, 3, "close"]
    assert Listening.there[0] == ("open", 2, None, "")


def in_the_next_second() -> None:
    """TensorBoard reads the files of a second in the order of their names: the tenth of a process before its ninth."""
    now = int(time.time())
    while int(time.time()) == now:
        time.sleep(0.01)


def test_tensorboard_forgets_what_came_after_the_checkpoint(directory: RunDirectory) -> None:
    steps_of(directory, TENSORBOARD, [1, 2, 3], None)
    cut(directory, 1)
    in_the_next_second()
    steps_of(directory, TENSORBOARD, [2], "completed", loss=4.0)
    assert shown(directory, "loss") == [(1, 1.0), (2, 2.0)]
    assert [step for step, _ in shown(directory, "samples/train")] == [1, 2]
    directory.metrics.unlink()  # it begins again
    in_the_next_second()
    steps_of(directory, TENSORBOARD, [1], "completed", loss=3.0)
    assert shown(directory, "loss") == [(1, 3.0)]


def test_tensorboard_of_a_run_that_goes_on_in_another_directory_has_all_steps(directory: RunDirectory, tmp_path: Path) -> None:
    steps_of(directory, TENSORBOARD, [1, 2], None)
    elsewhere = RunDirectory.create(tmp_path, "elsewhere")
    for path in (directory.metrics, directory.samples, directory.trackers / "tensorboard.json"):  # what a checkpoint has
        (target := elsewhere.root / path.relative_to(directory.root)).parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    steps_of(elsewhere, TENSORBOARD, [3], "completed")
    assert [step for step, _ in shown(elsewhere, "loss")] == [1, 2, 3]
    assert [step for step, _ in shown(elsewhere, "samples/train")] == [1, 2, 3]


def shown(directory: RunDirectory, name: str) -> list[tuple[int, Any]]:
    """What TensorBoard's own reader has of a tag."""
    events = EventAccumulator(str(directory.tensorboard)).Reload()
    return [(event.step, make_ndarray(event.tensor_proto).tolist()) for event in events.Tensors(name)]


def test_one_that_fails_for_a_while_gets_everything_and_one_line_says_so(directory: RunDirectory) -> None:
    said: list[str] = []
    Listening.failing = 7
    with RunTrackers(directory, LISTENING, say=said.append) as run:
        run.metrics(1, {"loss": 1.0})
        (box,) = run._outboxes
        while not Listening.there:  # the run itself has not noticed
            box._thread.join(0.01)
        Listening.failing = 3
        run.metrics(2, {"loss": 0.5})
        while Listening.there[-1][0] != 2:
            box._thread.join(0.01)
        run.close("failed")
    assert Listening.there == [("open", -1, None, ""), (1, {"loss": 1.0}), (2, {"loss": 0.5}), ("close", "failed")]
    assert said == ["tracker python: ConnectionError: https://***@host is away; trying again, the run goes on"] * 2  # one for each time


def test_one_that_stays_away_is_given_up_and_the_run_goes_on(directory: RunDirectory) -> None:
    said: list[str] = []
    Listening.failing = 10**9
    with RunTrackers(directory, LISTENING, say=said.append) as run:
        (box,) = run._outboxes
        run.metrics(1, {"loss": 1.0})
        while not box._lost:
            box._thread.join(0.01)
        run.close("completed")
    assert len(said) == 2
    assert "given up (try 20)" in said[1]
    assert Listening.failing == 10**9 - 20
    assert read_lines(directory.metrics) == [{"step": 1, "loss": 1.0}]
    Listening.failing = 0
    steps_of(directory, LISTENING, [2], "completed")  # when it is back, the next start sends the rest
    assert [call[0] for call in Listening.there][:2] == ["open", 1]


def test_what_is_refused_is_left_out(directory: RunDirectory) -> None:
    said: list[str] = []
    with RunTrackers(directory, LISTENING, say=said.append) as run:
        run.metrics(1, {"loss": 666.0})
        run.metrics(2, {"loss": 1.0})
        run.close("completed")
    assert Listening.there[1:] == [(2, {"loss": 1.0}), ("close", "completed")]
    assert said[0] == "tracker python: ValueError: no such number; left out, the run goes on"
    assert "1 writes are missing there" in said[1]


def test_a_tracker_that_hangs_does_not_keep_the_process(directory: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import time\nfrom tasks.reporting.trackers.base import Tracker\n"
        "class Hangs(Tracker):\n"
        "    def open(self, about, before): time.sleep(10**6)\n"
        "    def metrics(self, *_): pass\n    def samples(self, *_): pass\n    def close(self, *_): pass\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom configs.trackers import OwnTrackerConfig, TrackerConfig\n"
        "from tasks.reporting.run_dir import RunDirectory\nfrom tasks.reporting.trackers import run_trackers\n"
        "run_trackers._CUT_S = 0.1\n"
        "one = TrackerConfig(python=OwnTrackerConfig(import_path='hanging:Hangs'))\n"
        "with run_trackers.RunTrackers(RunDirectory(Path(sys.argv[2])), (one,), say=print) as run:\n"
        "    run.metrics(1, {'loss': 1.0})\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(directory.root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert "tracker python: does not answer" in done.stdout


def test_the_example_of_the_page(directory: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(# my_tracker\.py\n.*?)```", (ROOT / "docs/trackers.md").read_text(), re.DOTALL)
    (directory.root / "my_tracker.py").write_text(block)
    monkeypatch.syspath_prepend(directory.root)
    one = (TrackerConfig(python=OwnTrackerConfig(import_path="my_tracker:Printed")),)
    for status in (None, "completed"):
        with RunTrackers(directory, one) as run:
            run.metrics(1 if status is None else 2, {"reward/mean": 0.5, "kl": 0.1})
            run.close(status)  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == ["tiny begins", "1: 0.500", "to be continued", "tiny goes on", "2: 0.500", "completed"]


def test_samples_as_a_table() -> None:
    assert table([{"a": 1, "r": {"x": 0.5}}, {"a": 2, "b": "c"}]) == (["a", "r", "b"], [[1, '{"x": 0.5}', None], [2, None, "c"]])
