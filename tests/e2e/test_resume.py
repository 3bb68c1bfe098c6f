"""Runs that are interrupted go on where they were saved, and compute what they would have computed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from actors.checkpoints.manifest import manifest_name
from actors.checkpoints.store import CheckpointStore
from actors.forks.client import ADDRESS
from actors.rollout.audit import audit
from actors.rollout.inputs import StepInputs, path_of, steps_in
from actors.rollout.journal import parse
from actors.storage import Folder
from configs import settings
from configs.base import ConfigError
from flows.fork import fork
from flows.grpo import grpo
from flows.grpo_session import GrpoStep
from flows.replay import main as replay_command
from flows.replay import replay
from flows.resume import Mark
from tasks.reporting.jsonl import read_lines
from tasks.reporting.replay import Replayed, as_text
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.summary import Summary
from tests.conftest import ROOT
from tests.e2e.commands import said_until, start_command
from tests.e2e.conftest import PATIENT, SHORT, Run
from tests.object_store import ObjectStore, objects
from tests.patience import WAIT_S

__all__ = ["objects"]
pytestmark = pytest.mark.slow

CLOCKS = (
    "time/", "tokens_per_s", "train_s", "tflops", "data_plane/", "scoring/slowest_s", "idle/", "replay/claim_wait_s", "checkpoint/",
)  # fmt: skip
OFTEN = ["checkpoint.every_steps=1", "checkpoint.keep_last=9", PATIENT]


def numbers(directory: Path) -> list[dict[str, Any]]:
    """What a run computed at each step, without what clocks say."""
    joined: dict[int, dict[str, Any]] = {}
    for row in read_lines(directory / "metrics.jsonl"):
        joined.setdefault(row["step"], {}).update({name: v for name, v in row.items() if not name.startswith(CLOCKS)})
    return [joined[step] for step in sorted(joined)]


def samples(directory: Path) -> list[dict[str, Any]]:
    """What the model said."""
    return [{name: v for name, v in row.items() if name != "seconds"} for row in read_lines(directory / "samples.jsonl")]


def kill(actor: str) -> None:
    """SIGKILL the process of a named actor; there is one run in this process."""
    (found,) = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["name"] == actor]
    handle = ray.get_actor(actor, namespace=found["namespace"])
    os.kill(ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT_S), signal.SIGKILL)


At = Callable[[int, str, Callable[[], None]], None]


@contextmanager
def planning(monkeypatch: pytest.MonkeyPatch) -> Iterator[At]:
    """Do something once, before a stage of a step: `at(2, "submit_train", what)`."""
    plans: dict[tuple[int, str], list[Callable[[], None]]] = {}

    def plan(step: int, stage: str, what: Callable[[], None]) -> None:
        plans.setdefault((step, stage), []).append(what)
        original = getattr(GrpoStep, stage)

        def staged(self: GrpoStep, *arguments: Any) -> Any:
            for waiting in plans.pop((self.number, stage), []):
                waiting()
            return original(self, *arguments)

        monkeypatch.setattr(GrpoStep, stage, staged)

    yield plan
    assert not plans, "never came to it"


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[At]:
    """As `planning`, for the test."""
    with planning(monkeypatch) as plan:
        yield plan


@pytest.fixture(scope="module")
def disturbed(run_flow: Callable[..., Run], twins: tuple[Run, Run]) -> Run:
    """A run that loses its parts one after the other, first before there is a checkpoint. (Beside the twins: one process makes it.)"""
    assert twins
    with pytest.MonkeyPatch.context() as patch, planning(patch) as at:
        at(1, "wait_for_rollout", lambda: kill("collector"))
        at(2, "submit_logprob", lambda: kill("policy-worker-0"))
        at(2, "submit_refit", lambda: kill("engine-0"))
        at(3, "wait_for_rollout", lambda: kill("ledger"))
        at(3, "submit_clear", lambda: kill("data_plane_storage_0"))
        run = run_flow(*OFTEN)
        return replace(run, directory=run.directory.resolve())  # not `latest`: forks come after it


def test_a_run_that_loses_its_parts_has_the_metrics_of_one_that_does_not(disturbed: Run, finished: Run) -> None:
    run = disturbed
    assert numbers(run.directory) == numbers(finished.directory)
    assert samples(run.directory) == samples(finished.directory)
    assert Summary.read(run.directory / "summary.json").status == "completed"
    assert 3 <= len(read_lines(run.directory / "losses.jsonl")) <= 5  # two that die in one stage are one loss


def test_its_journal_tells_of_every_group(disturbed: Run) -> None:
    """12 groups, each trained once; what was done twice is void."""
    found = audit(parse((disturbed.directory / "journal.jsonl").read_bytes()))
    assert found.clean
    assert found.finished
    assert found.ends == {"trained": 12}
    assert len(found.voided) == len(read_lines(disturbed.directory / "losses.jsonl"))


def test_a_fork_is_compared_with_its_parent_step_by_step(disturbed: Run, server: str) -> None:
    assert server
    same = fork(str(disturbed.directory), at=1)
    assert {one["metric"]: one["change"] for one in same["changes"]} == dict.fromkeys((one["metric"] for one in same["changes"]), 0.0)
    assert {one["steps"] for one in same["changes"]} >= {2}
    assert same["changed"] == ()
    changes = ["policy.optimizer.lr=1e-2", "rollout.dynamic_sampling=true", "rollout.max_num_gen_batches=1"]
    other = fork(str(disturbed.directory), at=1, overrides=changes)
    assert set(other["changed"]) == {
        "policy.optimizer.lr: 0.0002 -> 0.01", "rollout.dynamic_sampling: False -> True", "rollout.max_num_gen_batches: 4 -> 1",
    }  # fmt: skip
    child = max(disturbed.directory.parent.glob("*/comparison.json"), key=lambda path: path.stat().st_mtime).parent
    assert numbers(child)[:2] == numbers(disturbed.directory)[:2]
    assert numbers(child)[2] != numbers(disturbed.directory)[2]
    again = {one.name: one.again for one in Replayed.model_validate(replay(str(child), 3)).metrics}
    assert again["groups/trained"] == numbers(child)[3]["groups/trained"] < 4  # without those that dynamic sampling left out


def test_a_run_goes_on_in_another_layout(disturbed: Run, finished: Run, run_flow: Callable[..., Run]) -> None:
    """Two replicas go on where one was: the same samples, and the same numbers but for the order of sums."""
    where = disturbed.directory / "checkpoints" / manifest_name(1)
    ours = numbers(run_flow(*OFTEN, f"resume={where}", "policy.parallel.data=2").directory)
    theirs = numbers(finished.directory)
    assert ours[:2] == theirs[:2]
    for name in ("loss", "kl", "entropy", "grad_norm", "reward/mean", "response_length/mean", "tokens"):
        assert ours[2][name] == pytest.approx(theirs[2][name], rel=1e-3, abs=1e-6), name
    assert ours[3]["logprob_error/max"] < 1e-4


def test_a_step_is_made_again_to_the_bit(disturbed: Run, server: str) -> None:
    """Right after a checkpoint. The inputs of step 1 are gone: the oldest checkpoint is as old."""
    assert server
    assert steps_in(disturbed.directory / "inputs") == [2, 3]
    found = Replayed.model_validate(replay(str(disturbed.directory), 2))
    assert (found.since, found.verdict, found.bounds.column.largest, found.here) == (1, "bit-equal", 0, found.before)
    columns = {one.name: one for one in found.columns}
    assert columns.keys() == {"generation_logprobs", "reference_logprobs", "advantages"}  # one update a step: no policy_logprobs
    assert columns["reference_logprobs"].values > columns["advantages"].values == 16
    assert columns["generation_logprobs"].verdict != "beyond"
    logged = numbers(disturbed.directory)[2]
    again = {one.name: one.again for one in found.metrics}
    assert again.keys() >= {"loss", "kl", "grad_norm", "lr", "entropy", "reward/mean", "logprob_error/mean", "tokens", "updates"}
    assert again == {name: logged[name] for name in again}


def test_a_step_is_made_again_on_another_layout(disturbed: Run, server: str) -> None:
    assert server
    found = Replayed.model_validate(replay(str(disturbed.directory), 3, ["policy.parallel.data=2"]))
    assert (found.since, found.verdict, found.bounds.column.largest) == (2, "within", 1e-4)
    assert found.here != found.before
    assert all(one.again == pytest.approx(one.logged, rel=1e-5, abs=1e-6) for one in found.metrics)


def test_a_step_is_made_again_from_an_older_checkpoint_and_names_the_value_that_is_another(
    disturbed: Run, server: str, tmp_path: Path
) -> None:
    """Two steps after it, and one log-probability of the reference was changed since."""
    assert server
    directory = Path(shutil.copytree(disturbed.directory, tmp_path / "copy"))
    mark = Mark.read(directory)
    assert mark is not None
    Mark(flow_run=mark.flow_run, checkpoints=str(directory / "checkpoints")).write(RunDirectory(directory))
    (directory / "checkpoints" / "step-000002.json").unlink()
    inputs = StepInputs.read(path_of(directory / "inputs", 3))
    columns = inputs.columns(directory / "inputs")
    place = int(columns["token_mask"][5].nonzero()[1])
    columns["reference_logprobs"][5][place] += 0.25
    inputs.write(directory / "inputs", columns)

    found = Replayed.model_validate(replay(str(directory), 3))
    assert (found.since, found.verdict) == (1, "beyond")
    assert {one.verdict for one in found.metrics} == {"bit-equal"}
    (first,) = [one.first for one in found.columns if one.verdict == "beyond"]
    assert first is not None
    assert (first.group, first.response, first.position) == (inputs.meta.tags[5]["prompt_uid"], 1, place)
    assert first.token == columns["input_ids"][5][place]
    assert first.logged - first.again == pytest.approx(0.25, abs=1e-6)
    assert f"response 1, token {place} {first.text!r}" in as_text(found)
    assert replay_command([str(directory), "--step", "1"]) == 2


def test_ctrl_c_saves_the_step_and_the_run_goes_on_in_its_directory(
    run_flow: Callable[..., Run], finished: Run, at: At, tmp_path: Path
) -> None:
    at(2, "submit_logprob", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        grpo(recipe="arithmetic-cpu", overrides=[f"output_dir={tmp_path}", *SHORT, PATIENT])
    (directory,) = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert Summary.read(directory / "summary.json").status == "cancelled"
    assert (directory / "hf" / "model.safetensors").is_file()
    assert CheckpointStore(str(directory / "checkpoints"), tmp_path).steps() == [2]
    exported = subprocess.run(
        [sys.executable, "-m", "flows.export", str(directory), "--to", str(tmp_path / "exported")],
        cwd=ROOT, env=settings.child_environment(GRPO_FLOWS_FORKS=""), capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert "the weights after step 2" in exported.stdout, exported.stderr
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "exported", directory / "hf"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())
    shutil.rmtree(tmp_path / "exported")
    with pytest.raises(ConfigError, match=r"other settings.*seed: 0 -> 1"):
        grpo(recipe="arithmetic-cpu", overrides=[f"output_dir={tmp_path}", *SHORT, PATIENT, f"resume={directory}", "seed=1"])

    grpo(recipe="arithmetic-cpu", overrides=[f"output_dir={tmp_path}", *SHORT, PATIENT, f"resume={directory}"])
    assert numbers(directory) == numbers(finished.directory)
    assert samples(directory) == samples(finished.directory)
    assert {path.name for path in tmp_path.iterdir()} == {directory.name, "latest"}


def test_a_killed_command_goes_on_elsewhere(finished: Run, server: str, objects: ObjectStore, tmp_path: Path) -> None:
    """SIGKILL during step 3; the checkpoints, in an object store, are the only thing that is left."""
    url = f"{objects.bucket()}/saved"
    (tmp_path / "a").mkdir()
    overrides, forks = [*SHORT, *OFTEN, f"checkpoint.url={url}"], {ADDRESS: settings.get(ADDRESS) or ""}
    command = start_command("grpo", tmp_path / "a", uuid.uuid4().hex, *overrides, server=server, **forks)
    said = said_until(command, "step 2/")
    deadline = time.monotonic() + WAIT_S
    while not CheckpointStore(url, tmp_path).steps():
        assert command.poll() is None, said
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.kill()
    command.wait(WAIT_S)
    summary = grpo(recipe="arithmetic-cpu", overrides=[f"output_dir={tmp_path}/b", *overrides])
    assert summary["steps"] == 3
    assert numbers(tmp_path / "b" / "latest") == numbers(finished.directory)
    here, there = tmp_path / "b" / "latest" / "hf", Folder(f"{url}/hf", "checkpoint.url")
    assert {name: there.read(name) for name in there.names()} == {path.name: path.read_bytes() for path in here.iterdir()}
