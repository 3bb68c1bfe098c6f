"""The `sft` flow on real parts: losses against transformers', packed against padded, checkpoints, early stop, an end that was asked for."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
import ray
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.checkpoints.store import CheckpointStore
from configs.loader import load
from configs.sft import SftConfig
from flows.sft import sft
from flows.sft_session import SftStep
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step, series
from tasks.reporting.summary import Summary
from tests.e2e.commands import await_none, start_command, task_runs
from tests.e2e.conftest import Run
from tests.e2e.test_resume import numbers
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow

SMALL = [
    "data.environment=null", "data.on_too_long=drop", "model.hidden_size=64", "model.num_attention_heads=2",
    "model.num_key_value_heads=1", "model.intermediate_size=96", "model.num_hidden_layers=2", "batch_size=16",
    "validate_every=3", "checkpoint.keep_last=1", "patience=2",
    # After step 8 the learning rate is 0: validations 12 and 15 are not better than 9.
    "policy.optimizer={lr: 3e-3, decay_steps: 8, decay_style: linear}",
]  # fmt: skip
PACKED = ["policy.batching={mode: packed, tokens_per_micro_batch: 96}", "steps=30"]
PADDED = ["policy.batching={mode: padded, micro_batch_size: 8}", "policy.parallel.data=2", "steps=11"]


def sums(count: int, offset: int) -> list[dict[str, str]]:
    """Prompts and responses of different lengths."""
    pairs = [(i * 7 % 60, i * 11 % 130) for i in range(offset, offset + count)]
    return [{"prompt": f"{a} + {b}", "response": f"{a + b} = {b} + {a}" if a % 3 else str(a + b)} for a, b in pairs]


@dataclass
class Command:
    """A command that has ended well."""

    directory: Path
    printed: str
    mark: str


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in both formats, five of them too long. The 21 validation rows fill no batch, nor do they divide by two replicas."""
    root = tmp_path_factory.mktemp("data")
    for name, content in (("train", [*sums(100, 0), *TOO_LONG]), ("validation", sums(21, 100))):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        parquet.write_table(pyarrow.Table.from_pylist(content), root / f"{name}.parquet")
    return root


TOO_LONG = [{"prompt": f"p{i}", "response": "9" * 80} for i in range(5)]


@pytest.fixture(scope="module")
def packed(run_recorded: Callable[..., Run], data: Path) -> Run:
    """JSON lines, packed; ends early."""
    return run_recorded(sft, "sft-cpu", *SMALL, *files(data, "jsonl"), *PACKED)


@pytest.fixture(scope="module")
def padded(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Parquet, padded, over two replicas; ends when its steps are done. By the command line, with servers of its own."""
    output, mark = tmp_path_factory.mktemp("command"), uuid.uuid4().hex
    command = start_command("sft", output, mark, *SMALL, *files(data, "parquet"), *PADDED)
    printed, _ = command.communicate(timeout=WAIT_S)
    assert command.returncode == 0, printed
    return Command(output / "latest", printed, mark)


def files(data: Path, suffix: str) -> list[str]:
    return [f"data.train={data}/train.{suffix}", f"data.validation={data}/validation.{suffix}"]


def steps_saved(run: Run | Command) -> list[int]:
    return CheckpointStore(str(run.directory / "checkpoints"), run.directory).steps()


def rows(run: Run | Command) -> list[dict[str, Any]]:
    return by_step(read_lines(run.directory / "metrics.jsonl"))


def test_the_loss_falls_and_every_step_reports_its_rate(packed: Run) -> None:
    steps = rows(packed)
    assert [row["step"] for row in steps] == list(range(16))
    validation = dict(series(steps, "loss/validation"))
    assert list(validation) == [0, 3, 6, 9, 12, 15]
    assert validation[9] < validation[6] < validation[3] < validation[0] - 0.5
    losses = [row["loss"] for row in steps[1:]]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1
    for row in steps[1:]:
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["time/step"])
        assert row["tflops_per_worker"] == pytest.approx(row["tflops"] / row["train_s"])


def test_early_stop(packed: Run) -> None:
    summary = Summary.read(packed.directory / "summary.json")
    assert (summary.flow, summary.status, summary.steps, summary.stopped_because) == ("sft", "completed", 15, "early_stop")
    validation = dict(series(rows(packed), "loss/validation"))
    assert validation[9] == validation[12] == validation[15]
    assert (summary.validation_loss_before, summary.validation_loss_after) == (validation[0], validation[15])
    assert (summary.best_step, summary.validation_loss_best) == (9, validation[9])


def test_a_run_that_does_all_its_steps_validates_the_last(padded: Command) -> None:
    summary = Summary.read(padded.directory / "summary.json")
    assert (summary.status, summary.steps, summary.stopped_because) == ("completed", 11, "steps")
    assert list(dict(series(rows(padded), "loss/validation"))) == [0, 3, 6, 9, 11]
    assert steps_saved(padded) == [9, 11]  # the best and the last


def test_the_command_says_how_it_goes_and_leaves_no_process(padded: Command) -> None:
    assert "Prefect UI: http://127.0.0.1:" in padded.printed
    assert "step 11/11" in padded.printed
    assert "report.html" in padded.printed
    await_none(padded.mark, 60)


def test_files_and_totals(packed: Run) -> None:
    summary = Summary.read(packed.directory / "summary.json")
    steps = rows(packed)
    assert summary.tokens == sum(row["tokens"] for row in steps[1:])
    assert {"launch", "batch", "train", "validate", "checkpoint", "export"} == set(summary.seconds_per_stage)
    assert load(str(packed.directory / "config.yaml"), (), SftConfig).steps == 30
    report = (packed.directory / "report.html").read_text()
    assert "<h3>Loss</h3>" in report
    assert "<h3>Reward</h3>" not in report
    # Two epochs and a bit: 15 x 16 samples of 100 that fit; the five that do not were met twice.
    assert steps[-1]["dropped_samples"] >= 10


def test_the_validation_loss_is_that_of_transformers(packed: Run, data: Path) -> None:
    """Of the best checkpoint, which was exported; row by row, from the text."""
    path = packed.directory / "hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    total, tokens = 0.0, 0
    for line in (data / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        messages = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        response = [*tokenizer.encode(row["response"], add_special_tokens=False), tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + response
        with torch.no_grad():
            loss = model(torch.tensor([prompt + response]), labels=torch.tensor([labels])).loss
        total += float(loss) * len(response)
        tokens += len(response)
    assert dict(series(rows(packed), "loss/validation"))[9] == pytest.approx(total / tokens, abs=1e-4)


def test_packed_and_padded_give_the_same_losses(packed: Run, padded: Command) -> None:
    """And JSON lines and Parquet, and one replica and two."""
    for ours, theirs in zip(rows(packed), rows(padded), strict=False):
        for name in {"loss", "loss/validation", "response_tokens", "tokens", "grad_norm", "dropped_samples"} & set(ours):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), (ours["step"], name)


def test_only_the_newest_and_the_best_checkpoint_stay(packed: Run) -> None:
    assert steps_saved(packed) == [9, 15]


def test_a_run_that_was_asked_to_end_goes_on_as_if_it_had_not(
    packed: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in step 7, between validations; the resumed run also ends early, after the same step."""
    original = SftStep.wait_for_batch

    def interrupted(self: SftStep) -> Any:
        if self.number == 7:
            signal.raise_signal(signal.SIGINT)
        return original(self)

    overrides = [*SMALL, *files(data, "jsonl"), *PACKED, f"output_dir={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setattr(SftStep, "wait_for_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sft(recipe="sft-cpu", overrides=overrides)
    (directory,) = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert CheckpointStore(str(directory / "checkpoints"), tmp_path).steps() == [6, 7]
    AutoModelForCausalLM.from_pretrained(directory / "hf")

    sft(recipe="sft-cpu", overrides=[*overrides, f"resume={directory}"])
    assert numbers(directory) == numbers(packed.directory)
    ours, whole = (Summary.read(one / "summary.json") for one in (directory, packed.directory))
    assert (ours.steps, ours.stopped_because, ours.best_step) == (whole.steps, whole.stopped_because, whole.best_step)
    assert (directory / "hf" / "model.safetensors").read_bytes() == (packed.directory / "hf" / "model.safetensors").read_bytes()


def test_task_runs_and_artifacts(packed: Run) -> None:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[packed.flow_run_id])))
        flow_run = client.read_flow_run(packed.flow_run_id)
    expected = {f"{stage}-{step}" for stage in ("batch", "train", "clear") for step in range(1, 16)}
    expected |= {f"validation-loss-{step}" for step in (0, 3, 6, 9, 12, 15)} | {
        f"{prefix}checkpoint-{step}" for step in (3, 6, 9, 12, 15) for prefix in ("", "publish-")
    }
    expected |= {"launch-actors", "export-hf"}
    runs = task_runs(packed.flow_run_id, expected)
    assert {name: run.state_name for name, run in runs.items()} == dict.fromkeys(expected, "Completed")
    assert flow_run.name.startswith("sft-sft-cpu-20")
    latest = {artifact.key: artifact for artifact in found}
    assert set(latest) == {"sft-page", "sft-progress", "sft-metrics", "sft-loss", "sft-summary"}
    assert latest["sft-progress"].data == 50


def test_no_tensor_passes_through_prefect_and_nothing_is_left(packed: Run) -> None:
    stages = {"batch", "train", "validation-loss", "checkpoint", "publish-checkpoint", "export-hf", "launch", "clear"}
    assert stages == {crossing.task for crossing in packed.crossings}
    for crossing in packed.crossings:
        assert crossing.tensors == 0, crossing
        assert max(crossing.argument_bytes, crossing.result_bytes) <= 64 * 1024, crossing
    namespace = f"grpo-{packed.flow_run_id}"
    assert [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == namespace] == []
