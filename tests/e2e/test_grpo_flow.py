"""The synchronous flow on real parts: what it leaves behind, what Prefect saw of it, and that it can be repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.loader import load
from tasks import events
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step
from tasks.reporting.summary import Summary
from tests.e2e.commands import task_runs
from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow


def test_summary_and_files(finished: Run) -> None:
    summary = Summary.read(finished.directory / "summary.json")
    assert summary.status == "completed"
    assert (summary.steps, summary.weight_version) == (3, 3)
    assert finished.summary["accuracy_after"] == summary.accuracy_after is not None
    stages = {"launch", "warm_start", "rollout", "logprob", "ref_logprob", "advantage", "train", "refit", "validate", "export"}
    assert stages <= set(summary.seconds_per_stage)
    assert sum(summary.seconds_per_stage.values()) <= summary.seconds
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "tensorboard", "hf/model.safetensors"):
        assert (finished.directory / name).exists(), name
    assert load(str(finished.directory / "config.yaml")).steps == 3
    assert "accuracy" in (finished.directory / "report.html").read_text()


def test_metrics_of_every_step(finished: Run) -> None:
    rows = by_step(read_lines(finished.directory / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "accuracy/validation" in row] == [0, 2, 3]
    for row in rows[1:]:
        assert row["logprob_error/mean"] < 1e-3
        assert row["weight_version"] == row["step"]
        assert row["data_plane/put/rows"] > 0
        assert row["data_plane/get/bytes"] > 0
        assert {"reward/mean", "kl", "loss", "grad_norm", "tokens_per_s", "time/step"} <= set(row)


def test_no_step_leaves_keys_behind(finished: Run) -> None:
    """Counted when a step's keys have gone. The next step's answers may be there by then; after the last step there is no next."""
    rows = by_step(read_lines(finished.directory / "metrics.jsonl"))[1:]
    left = [row["data_plane/occupancy/train"] for row in rows]
    rollout = load(str(finished.directory / "config.yaml")).rollout
    assert left[-1] == 0
    assert max(left) <= rollout.prompts_per_step * rollout.responses_per_prompt


def test_the_learning_rate_falls_over_the_steps_of_the_run(finished: Run) -> None:
    """From lr 2e-4 to min_lr 2e-5, linearly in three steps; the warm start's steps do not count."""
    rows = by_step(read_lines(finished.directory / "metrics.jsonl"))
    assert [row["lr"] for row in rows[1:]] == pytest.approx([1.4e-4, 0.8e-4, 0.2e-4])


def test_the_same_seed_gives_the_same_run(twins: tuple[Run, Run]) -> None:
    clocks = (
        "time/",
        "tokens_per_s",
        "train_s",
        "tflops",
        "data_plane/",
        "scoring/slowest_s",
        "idle/",
        "replay/claim_wait_s",
        "checkpoint/",
    )
    rows = [read_lines(run.directory / "metrics.jsonl") for run in twins]
    first, second = ([{name: v for name, v in row.items() if not name.startswith(clocks)} for row in run] for run in rows)
    assert first == second
    assert read_lines(twins[0].directory / "samples.jsonl") == read_lines(twins[1].directory / "samples.jsonl")


def test_samples_say_what_the_model_said(finished: Run) -> None:
    samples = read_lines(finished.directory / "samples.jsonl")
    assert {sample["phase"] for sample in samples} == {"before", "train", "validation", "after"}
    assert {sample["weight_version"] for sample in samples if sample["phase"] == "train"} == {0, 1, 2}


def test_the_exported_model_answers_as_the_engine_did(finished: Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished.directory / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(finished.directory / "hf")
    after = [sample for sample in read_lines(finished.directory / "samples.jsonl") if sample["phase"] == "after"]
    assert after
    for sample in after:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": sample["prompt"]}], add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True) == sample["response"]


def test_task_runs_have_readable_names(finished: Run) -> None:
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(finished.flow_run_id)
    stages = ("rollout", "ref-logprob", "advantage", "train", "refit", "clear")
    expected = {f"{stage}-{step}" for stage in stages for step in (1, 2, 3)}
    expected |= {"launch-actors", "warm-start-1-to-20", "validate-0", "export-hf"}
    skipped = {f"logprob-{step}" for step in (1, 2, 3)}
    states = {name: run.state_name for name, run in task_runs(finished.flow_run_id, expected | skipped).items()}
    assert {states[name] for name in expected} == {"Completed"}
    # One on-policy update per rollout: the training pass computes the same log-probabilities, and the UI says so.
    assert {states[name] for name in skipped} == {"Skipped"}
    assert flow_run.name.startswith("grpo-arithmetic-cpu-20")


def test_artifacts(finished: Run) -> None:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[finished.flow_run_id])))
    latest = {artifact.key: artifact for artifact in found}
    shown = (
        "page",
        "progress",
        "rollout",
        "metrics",
        "rewards",
        "validation",
        "slowest",
        "samples",
        "reward",
        "summary",
        "audit",
        "audit-groups",
    )
    assert {f"grpo-{name}" for name in shown} == set(latest)
    assert len(found) == len(latest)  # one of each, rewritten in place
    assert latest["grpo-progress"].data == 100
    assert str(latest["grpo-reward"].data).startswith("data:image/svg+xml;base64,")
    assert [row["step"] for row in json.loads(str(latest["grpo-metrics"].data))] == ["3", "2", "1", "0"]
    assert {row["phase"] for row in json.loads(str(latest["grpo-samples"].data))} == {"before", "train", "validation", "after"}


def test_events(finished: Run) -> None:
    wanted = {
        "event": {"name": [events.STEP_COMPLETED, events.REFIT_COMPLETED]},
        "resource": {"id": [f"grpo.run.{finished.flow_run_id}"]},
    }
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/events/filter", json={"filter": wanted})
    found = answer.json()["events"]
    steps = sorted((event["event"], event["payload"]["step"]) for event in found)
    assert steps == [(name, step) for name in (events.REFIT_COMPLETED, events.STEP_COMPLETED) for step in (1, 2, 3)]
    assert all(f"prefect.flow-run.{finished.flow_run_id}" in json.dumps(event["related"]) for event in found)


def test_no_tensor_passes_through_prefect(finished: Run) -> None:
    seen = {crossing.task for crossing in finished.crossings}
    assert {"rollout", "logprob", "ref_logprob", "advantage", "train", "refit", "validate", "launch"} <= seen
    for crossing in finished.crossings:
        assert crossing.tensors == 0, crossing
        assert max(crossing.argument_bytes, crossing.result_bytes) <= 64 * 1024, crossing


def test_nothing_of_the_run_is_left(finished: Run) -> None:
    namespace = f"grpo-{finished.flow_run_id}"
    assert [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == namespace] == []


def test_latest_points_to_the_run(finished: Run) -> None:
    link = Path(finished.directory)
    assert link.is_symlink()
    assert json.loads((link / "summary.json").read_text())["name"] == link.resolve().name
