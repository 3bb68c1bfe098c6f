import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.trackers import TENSORBOARD
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step, series
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.run_trackers import RunTrackers
from tests.patience import WAIT_S
from tests.tasks.reporting.runs import step_metrics


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "tiny")


def test_read_gives_what_was_written(directory: RunDirectory) -> None:
    with RunTrackers(directory) as run:
        for step in (1, 2, 3):
            run.metrics(step, step_metrics(step))
            # On disk at once: a run that dies in the next step has lost nothing.
            assert read_lines(directory.metrics)[-1] == {"step": step, **step_metrics(step)}
    assert read_lines(directory.metrics) == [{"step": step, **step_metrics(step)} for step in (1, 2, 3)]


def test_keys_have_one_order(directory: RunDirectory) -> None:
    with RunTrackers(directory) as run:
        run.metrics(1, {"loss": 1.0, "accuracy/validation": 0.5, "kl": 0.25})
    assert directory.metrics.read_text() == '{"step": 1, "accuracy/validation": 0.5, "kl": 0.25, "loss": 1.0}\n'


def test_tensorboard_has_the_same_values(directory: RunDirectory) -> None:
    with RunTrackers(directory, TENSORBOARD) as run:
        for step in (1, 2, 3):
            run.metrics(step, step_metrics(step))
    events = EventAccumulator(str(directory.tensorboard)).Reload()
    assert set(events.Tags()["scalars"]) == set(step_metrics(1))
    for name in step_metrics(1):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, np.float32(step_metrics(step)[name])) for step in (1, 2, 3)]  # TensorBoard keeps float32


def test_values_that_are_not_finite(directory: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), RunTrackers(directory, TENSORBOARD) as run:
        run.metrics(3, {"loss": math.nan, "kl": math.inf, "reward/mean": 0.5})
    assert caplog.messages == [f"step 3: metric {what}: written as null" for what in ("kl is inf", "loss is nan")]
    assert json.loads(directory.metrics.read_text()) == {"step": 3, "kl": None, "loss": None, "reward/mean": 0.5}
    assert EventAccumulator(str(directory.tensorboard)).Reload().Tags()["scalars"] == ["reward/mean"]


def test_numbers_of_other_libraries_become_plain(directory: RunDirectory) -> None:
    with RunTrackers(directory) as run:
        run.metrics(1, {"a": np.float32(0.5), "b": np.int64(3), "c": True, "d": 2**40})
    assert read_lines(directory.metrics) == [{"step": 1, "a": 0.5, "b": 3.0, "c": 1.0, "d": 2**40}]


def test_wrong_input(directory: RunDirectory) -> None:
    with RunTrackers(directory) as run:
        with pytest.raises(TypeError, match="step 2, metric 'loss': 'low' is not a number"):
            run.metrics(2, {"loss": "low"})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="'step'"):
            run.metrics(2, {"step": 2.0})
        run.close(None)
        run.close(None)
    assert read_lines(directory.metrics) == []


def test_a_torn_last_line_is_left_out_and_a_broken_one_is_an_error(directory: RunDirectory) -> None:
    directory.metrics.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_lines(directory.metrics) == [{"step": 1}]
    directory.metrics.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_lines(directory.metrics)


def test_by_step_joins_the_lines_of_a_step() -> None:
    rows = [{"step": 2, "kl": 0.5}, {"step": 0, "accuracy/validation": 0.1}, {"step": 2, "accuracy/validation": 0.2, "kl": None}]
    joined = by_step(rows)
    assert joined == [{"step": 0, "accuracy/validation": 0.1}, {"step": 2, "kl": None, "accuracy/validation": 0.2}]
    assert series(joined, "accuracy/validation") == [(0, 0.1), (2, 0.2)]
    assert series(joined, "kl") == []


def test_reporting_needs_neither_torch_nor_ray_nor_prefect() -> None:
    modules = ", ".join(f"tasks.reporting.{name}" for name in ("html", "metrics", "plots", "run_dir", "samples", "summary", "terminal"))
    code = f"import sys, {modules}; print([name for name in ('torch', 'ray', 'prefect', 'vllm', 'actors') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.strip() == "[]"
