"""Asynchronous GRPO: a run of the flow with hostile rewards; and actors without Prefect, of which an engine and the environment die."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import ray
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from actors import names
from actors.data_plane.connect import connect
from actors.generation.types import UpdateOptions
from actors.preflight import check, prepare_model
from actors.rollout.assemble import ROLLOUT_FIELDS
from actors.rollout.ledger_actor import ClaimReply
from actors.rollout.samples import Progress
from actors.waiting import ActorGoneError
from configs.loader import load
from flows.grpo import grpo
from tasks.launch import launch, stop
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step
from tests.e2e.commands import task_runs
from tests.e2e.conftest import SHORT, Run, call
from tests.listeners import title
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow
NAMESPACE = "grpo-e2e-async"


REWARDS = (
    "[{kind: reasoning_gym}, {kind: python, name: careless, weight: 0.001, timeout_s: 0.5, import_path: 'tests.e2e.careless:reward'}, "
    "{kind: length, weight: 0.1, cache_tokens: 2}]"
)
HOSTILE = [f"rewards={REWARDS}", "scoring.on_timed_out=drop_sample", "scoring.on_failed=drop_group", "scoring.tolerance=1"]


@pytest.fixture(scope="module")
def finished(run_recorded: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose responses are long enough for updates to come in between, whose rewards hang, die and raise, and which has a teacher."""
    larger = load("arithmetic-cpu-async", [*SHORT, "model.num_hidden_layers=3"])
    changes = [
        f"policy.teacher.path={prepare_model(larger, tmp_path_factory.mktemp('teacher') / 'model')}",
        "policy.teacher.top_k=full",
        "steps=6",
        "validate_every=6",
        "rollout.max_new_tokens=40",
        "rollout.dynamic_sampling=true",
        "asynchronous.max_trajectory_age_steps=2",
        "environment.on_too_long=drop",
        "validation.confidence=0.9",
    ]
    return run_recorded(grpo, "arithmetic-cpu-async", *SHORT, *HOSTILE, *changes)


def test_every_step_trains_groups_that_are_young_enough(finished: Run) -> None:
    steps = [
        row for line in (finished.directory / "metrics.jsonl").read_text().splitlines() if "staleness/mean" in (row := json.loads(line))
    ]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0]["staleness/max"] == 0
    assert all(row["staleness/max"] <= 2 for row in steps)
    assert all(row.get("replay/trained", 0) <= 4 * row["step"] for row in steps)
    assert steps[-1]["replay/claimed"] - steps[-1].get("replay/dropped/zero_variance", 0) >= 4 * 6
    assert any(row["staleness/mean"] > 0 for row in steps)
    assert all(0 <= row["importance/effective_sample_fraction"] <= 1 + 1e-6 for row in steps)  # float32 sums
    assert all(row["idle/trainer_s"] >= 0 and row["idle/generator_s"] >= 0 for row in steps)
    assert [row["weight_version"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert finished.summary["status"] == "completed"


def test_the_kl_is_that_to_the_teacher_from_the_first_step_on(finished: Run) -> None:
    rows = [row for row in read_lines(finished.directory / "metrics.jsonl") if "kl" in row]
    assert len(rows) == 6
    assert all(row["kl"] > 0.01 for row in rows)  # to its own first weights it would be 0 in the first


def test_the_task_of_generation_stays_open_and_says_how_it_stands(finished: Run) -> None:
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[finished.flow_run_id])), limit=200
        )
    by_name = task_runs(finished.flow_run_id, {"generate", *(f"rollout-{step}" for step in range(1, 7))})
    generate = by_name["generate"]
    assert generate.state_name == "Completed"
    claims = [run for name, run in by_name.items() if name.startswith("rollout-")]
    assert len(claims) == 6
    assert generate.start_time <= min(run.end_time for run in claims)
    assert generate.end_time >= max(run.end_time for run in claims)
    progress = [artifact for artifact in artifacts if artifact.key == "grpo-rollout"]
    assert len(progress) == 1
    assert "groups/s" in progress[0].description
    assert "staleness" in progress[0].description
    assert all(crossing.tensors == 0 for crossing in finished.crossings)


def test_rewards_that_hang_die_and_raise_are_counted_and_their_groups_replaced(finished: Run) -> None:
    rows = by_step(read_lines(finished.directory / "metrics.jsonl"))
    assert finished.summary["status"] == "completed"
    steps = [row for row in rows if row["step"] > 0]
    assert all(1 <= row["groups/trained"] <= 4 for row in steps)  # a group of dropped samples is not trained on
    assert max(row.get("replay/failed", 0) for row in rows) > 0
    scored = [row for row in steps if "scoring/dropped" in row]  # a step whose groups were all ready before it scored none
    assert scored
    for row in scored:
        for label in ("reasoning_gym", "careless", "length"):
            assert {f"rewards/{label}/{name}" for name in ("timed_out", "failed", "no_opinion")} <= set(row)
        assert row["scoring/dropped"] >= row["scoring/timed_out"] + row["scoring/failed"] - 1e-9
    assert sum(row["rewards/careless/timed_out"] for row in scored) > 0
    assert sum(row["rewards/careless/failed"] for row in scored) > 0
    assert all(row["rewards/reasoning_gym/timed_out"] == row["rewards/length/failed"] == 0 for row in scored)
    assert rows[0]["accuracy/validation/low"] <= rows[0]["accuracy/validation"] <= rows[0]["accuracy/validation/high"]
    assert finished.summary["timed_out"] > 0


def test_a_person_sees_which_and_why(finished: Run) -> None:
    slowest = read_lines(finished.directory / "slowest.jsonl")
    assert {"timed_out", "failed"} <= {line["outcome"] for line in slowest}
    assert {line["label"] for line in slowest if line["outcome"] == "timed_out"} == {"careless"}
    assert any("no value within 0.5 s" in line["error"] for line in slowest)
    assert any("its process ended" in line["error"] for line in slowest) or any(
        "ValueError: <b>no</b>" in line["error"] for line in slowest
    )
    report = (finished.directory / "report.html").read_text()
    assert "careless" in report
    assert "<b>no</b>" not in report
    samples = read_lines(finished.directory / "samples.jsonl")
    assert {sample["outcome"] for sample in samples} >= {"scored"}
    assert json.loads((finished.directory / "summary.json").read_text())["sets"]["validation"]["gain"]


def test_no_scoring_process_is_left(finished: Run) -> None:
    ours = psutil.Process().children(recursive=True)
    assert [process.pid for process in ours if "actors.environments.scoring.zygote" in title(process)] == []


@pytest.fixture(scope="module")
def running(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., object]]:
    """The actors of a run with two engines, version 0; calls them by name."""
    config = load(
        "arithmetic-cpu-async",
        [*SHORT, "generation.num_engines=2", "rollout.max_new_tokens=40", "generation.timeout_s=180", "policy.loss.kl_coef=0"],
    )
    model_path = prepare_model(config, tmp_path_factory.mktemp("model"))
    check(config, model_path)
    actors = launch.fn(config, model_path, NAMESPACE)
    plane = connect(actors.address, timeout_s=30)

    def ask(actor: str, method: str, *arguments: object) -> object:
        return getattr(plane, method)(*arguments) if actor == "plane" else call(NAMESPACE, actor, method, *arguments)

    yield ask
    stop(NAMESPACE, actors.address)


@pytest.mark.parametrize("actor", ["engine-0", "policy-worker-0", names.POLICY, names.COLLECTOR, names.ENVIRONMENT, names.LEDGER])
def test_the_garbage_collector_leaves_alone_what_an_actor_s_start_made(running: Callable[..., object], actor: str) -> None:
    handle = ray.get_actor(actor, namespace=NAMESPACE)
    # A function of this module would have the actor import it, and with it Prefect.
    frozen, others = ray.get(handle.__ray_call__.remote(lambda _: (gc.get_freeze_count(), len(gc.get_objects()))), timeout=WAIT_S)
    assert frozen > 10 * others


def claim(ask: Callable[..., object], groups: int = 4) -> ClaimReply:
    reply = ask(names.LEDGER, "claim", groups, 50.0)
    assert isinstance(reply, ClaimReply)
    return reply


def claim_for_ever(ask: Callable[..., object]) -> None:
    while (reply := claim(ask)).claim is not None:
        ask(names.LEDGER, "trained", reply.claim.uids)


def train_one(ask: Callable[..., object], engines: list[str], version: int) -> None:
    """Claim, train, refit in flight."""
    reply = claim(ask)
    assert reply.claim is not None
    columns = ask("plane", "get", reply.claim.meta, list(ROLLOUT_FIELDS))
    assert isinstance(columns, dict)
    for tag, versions in zip(reply.claim.meta.tags, columns["weight_versions"], strict=True):
        sampled = versions[versions >= 0].tolist()
        assert (sampled[0], sampled[-1]) == (tag["start_version"], tag["end_version"])
        assert sampled == sorted(sampled)
        assert len(set(sampled)) == tag["weight_versions"]
    batch = ask("plane", "put", reply.claim.meta, {"advantages": [torch.tensor(float(tag["reward"])) for tag in reply.claim.meta.tags]})
    ask(names.POLICY, "train", batch, "grpo")
    refit = ask(names.POLICY, "refit", engines, UpdateOptions("in_flight", False, recover=True))
    assert refit["weight_version"] == version  # type: ignore[index]
    ask(names.LEDGER, "trained", reply.claim.uids)
    ask(names.LEDGER, "set_version", version)


def standing(ask: Callable[..., object]) -> tuple[Progress, float]:
    """How the collector stands, and how many engines serve."""
    progress, report = ask(names.COLLECTOR, "progress", 0.0), ask(names.COLLECTOR, "report")
    assert isinstance(progress, Progress)
    assert (progress.ended, progress.error) == (False, None)
    return progress, report.metrics["engines/alive"]  # type: ignore[attr-defined]


def test_a_run_goes_on_without_an_engine_which_comes_back_and_ends_without_its_environment(running: Callable[..., object]) -> None:
    ask, engines, version = running, names.engines(2), 1
    ask(names.COLLECTOR, "begin_generating")
    train_one(ask, engines, version)
    ray.kill(ray.get_actor("engine-1", namespace=NAMESPACE), no_restart=False)
    progress, alive = standing(ask)
    while not any("engine-1 is gone; its requests go to engine-0" in line for line in progress.log):
        version += 1
        train_one(ask, engines, version)
        progress, alive = standing(ask)
    assert alive == 1
    ask(names.COLLECTOR, "validate", version)
    deadline = time.monotonic() + WAIT_S
    while "engine-1 is back" not in progress.log:
        assert time.monotonic() < deadline
        version += 1
        train_one(ask, engines, version)
        progress, alive = standing(ask)
    assert alive == 2
    health = call(NAMESPACE, "engine-1", "health")
    assert (health.state, health.stale, health.weight_version) == ("ready", False, version)

    for engine in engines:
        ray.kill(ray.get_actor(engine, namespace=NAMESPACE), no_restart=False)
    dropped = claim(ask).claim
    assert dropped is not None
    ask(names.LEDGER, "drop", dropped.uids, "zero_variance")  # others take their place: the buffer may be full, and the engines idle
    deadline, said = time.monotonic() + WAIT_S, tuple[str, ...]()
    while not any(line.endswith(" is back") for line in said):  # nobody trains: the collector asks for their weights
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
        progress, alive = standing(ask)
        said = (*said, *progress.log)
    while alive < 2:  # the slower one, if it was not there yet, gets them with a step
        assert time.monotonic() < deadline, said
        version += 1
        train_one(ask, engines, version)
        _, alive = standing(ask)
    assert {call(NAMESPACE, engine, "health").weight_version for engine in engines} == {version}
    train_one(ask, engines, version + 1)

    ray.kill(ray.get_actor(names.ENVIRONMENT, namespace=NAMESPACE))
    killed = time.monotonic()
    with pytest.raises(ActorGoneError, match="environment"):
        claim_for_ever(ask)
    assert time.monotonic() - killed < 60
    progress = ask(names.COLLECTOR, "progress", 5.0)
    assert isinstance(progress, Progress)
    assert progress.ended
    assert "environment" in str(progress.error)
    ask(names.COLLECTOR, "stop_generating")
    ask(names.LEDGER, "close")
    assert ask("plane", "samples", "train") == 0
