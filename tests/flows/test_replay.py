"""python -m flows.replay: from which checkpoint and inputs a step is made again, and what it says when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.rollout.inputs import NoInputsError, path_of
from configs.base import ConfigError
from configs.loader import dump
from flows.replay import ON_CPU, main, plan_of
from tasks.reporting.run_dir import RunDirectory
from tests.actors.rollout.test_inputs import inputs_of
from tests.flows.test_resume import config, run


def kept(tmp_path: Path, checkpoints: tuple[int, ...], steps: range, *overrides: str) -> RunDirectory:
    """A directory of a run with these checkpoints, and the inputs of these steps."""
    directory = run(tmp_path, "mine", *checkpoints)
    for step in steps:
        inputs, columns = inputs_of(step, dump(config(tmp_path, *overrides)))
        inputs.write(directory.inputs, columns)
    return directory


def test_from_the_newest_checkpoint_before_the_step(tmp_path: Path) -> None:
    directory = kept(tmp_path, (120, 125, 130), range(121, 134))
    for step, since in ((121, 120), (125, 120), (126, 125), (130, 125), (133, 130)):
        plan = plan_of(directory, step, (), tmp_path)
        assert plan.manifest.step == since
        assert [one.step for one in plan.steps] == list(range(since + 1, step + 1))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (120, "no inputs of step 120: they are kept from step 121 on, after the oldest kept checkpoint"),
        (7, "kept from step 121 on"),
        (140, "no inputs of step 140: .*/inputs has those of steps 121 to 123, steps 126 to 128"),
        (127, "no inputs of step 124, between the checkpoint of step 120 and step 127: .*steps 126 to 128"),
    ],
)
def test_what_there_is_when_a_step_cannot_be_made_again(tmp_path: Path, step: int, message: str) -> None:
    directory = kept(tmp_path, (120,), range(121, 129))
    for lost in (124, 125):
        path_of(directory.inputs, lost).unlink()
    with pytest.raises(NoInputsError, match=message):
        plan_of(directory, step, (), tmp_path)


def test_runs_without_checkpoints_or_inputs(tmp_path: Path) -> None:
    with pytest.raises(NoInputsError, match="the run has no checkpoint"):
        plan_of(kept(tmp_path, (), range(1, 2)), 1, (), tmp_path)
    with pytest.raises(NoInputsError, match=r"has none \(checkpoint.inputs\)"):
        plan_of(kept(tmp_path, (4,), range(0)), 5, (), tmp_path)
    with pytest.raises(ConfigError, match="no directory of a run"):
        plan_of(RunDirectory(tmp_path), 5, (), tmp_path)


def test_how_it_is_computed_may_change_and_what_may_not(tmp_path: Path) -> None:
    gpus = ("policy.dtype=bfloat16", "policy.parallel.context=2", "policy.device=cuda", "policy.batching={mode: padded}")
    directory = kept(tmp_path, (120,), range(121, 123), *gpus)
    plan = plan_of(directory, 122, ON_CPU, tmp_path)
    assert (plan.config.policy.device, plan.config.policy.dtype, plan.config.policy.parallel.world_size) == ("cpu", "float32", 1)
    assert [one.policy.dtype for one in plan.before] == ["bfloat16"]
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.lr: 0\.0002 -> 0\.1 it would be another step"):
        plan_of(directory, 122, ["policy.optimizer.lr=0.1"], tmp_path)


def test_a_run_that_was_made_longer_in_between(tmp_path: Path) -> None:
    directory = kept(tmp_path, (120,), range(121, 125))
    inputs, columns = inputs_of(125, dump(config(tmp_path, "steps=500")))
    inputs.write(directory.inputs, columns)
    assert plan_of(directory, 124, (), tmp_path).manifest.step == 120
    with pytest.raises(NoInputsError, match="made longer"):
        plan_of(directory, 125, (), tmp_path)


def test_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = kept(tmp_path, (120,), range(121, 122))
    assert main([str(directory.root), "--step", "5"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([str(directory.root), "--step", "121", "policy.no_such=1"]) == 2
    assert main([str(tmp_path), "--step", "121"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main([str(directory.root)])
