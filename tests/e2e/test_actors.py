"""The run's actors without Prefect: after every refit both engines agree, and a lost actor is named at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors import names
from actors.data_plane.connect import connect
from actors.data_plane.meta import KVBatchMeta
from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, UpdateOptions
from actors.preflight import check, prepare_model
from actors.rollout.ledger_actor import ClaimReply
from actors.rollout.ledger_types import Claim
from actors.waiting import ActorGoneError
from configs.loader import load
from configs.run import RunConfig
from tasks.advantage import advantage
from tasks.handles import RunActors
from tasks.launch import launch, stop
from tests.e2e.conftest import SHORT, call
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow
NAMESPACE = "grpo-e2e-actors"


@dataclass
class Running:
    """Started actors and what they were started from."""

    config: RunConfig
    model_path: str
    actors: RunActors

    def call(self, actor: str, method: str, *arguments: Any) -> Any:
        return call(NAMESPACE, actor, method, *arguments)

    def rollout(self, version: int) -> Claim:
        """The groups of the step that trains this version."""
        self.call(names.LEDGER, "set_version", version)
        reply: ClaimReply = self.call(names.LEDGER, "claim", self.config.rollout.prompts_per_step, WAIT_S - 5)
        assert reply.claim is not None
        return reply.claim


@pytest.fixture(scope="module")
def running(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = load("arithmetic-cpu", [*SHORT, "policy.parallel.data=2", "policy.recompute_logprobs=always", "policy.optimizer.lr=3e-3"])
    model_path = prepare_model(config, tmp_path_factory.mktemp("model"))
    check(config, model_path)
    actors = launch.fn(config, model_path, NAMESPACE)
    running = Running(config, model_path, actors)
    running.call(names.COLLECTOR, "begin_generating")
    yield running
    stop(NAMESPACE, actors.address)


def step(running: Running, number: int) -> tuple[Claim, KVBatchMeta, dict[str, float]]:
    """One GRPO step on the actors themselves."""
    claim = running.rollout(number - 1)
    batch = claim.meta
    running.call(names.POLICY, "logprob", batch, "policy_logprobs")
    running.call(names.POLICY, "logprob", batch, "reference_logprobs", True)
    batch = batch.with_fields("policy_logprobs", "reference_logprobs")
    batch = advantage.fn(running.actors.address, number, batch, running.config.policy.loss, None, 30.0).meta
    return claim, batch, running.call(names.POLICY, "train", batch, "grpo")


def supervise(running: Running, number: int) -> None:
    """One supervised step: an untrained model earns no reward, so GRPO alone would hardly move its weights."""
    batch = running.call(names.COLLECTOR, "supervised", number)
    running.call(names.POLICY, "train", batch, "sft")
    running.call(names.COLLECTOR, "clear", batch)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(out[0, len(prompt) :].tolist())


def test_both_engines_agree_after_every_refit(running: Running, tmp_path: Path) -> None:
    """Greedy continuations equal transformers' on the exported weights; log-probabilities of sampled tokens agree."""
    running.call(names.POLICY, "snapshot_reference")
    plane = connect(running.actors.address, timeout_s=30)
    tokenizer = AutoTokenizer.from_pretrained(running.model_path)
    texts = ["Calculate 3 + 4 + 5.", "Calculate 9 + 9 + 9.", "Calculate 0"]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    exported = []
    for number in (1, 2, 3):
        claim, batch, metrics = step(running, number)
        assert metrics["logprob_error/mean"] < 1e-3
        columns = plane.get(batch, ["token_mask", "generation_logprobs", "policy_logprobs"])
        for mask, generated, trained in zip(*columns.values(), strict=True):
            assert (generated - trained)[mask].abs().max() < 1e-3
        supervise(running, number)
        refit = running.call(names.POLICY, "refit", running.actors.engines, UpdateOptions())
        assert refit["weight_version"] == number
        running.call(names.POLICY, "save_hf", str(tmp_path / str(number)))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(number), dtype=torch.float32).eval()
        requests = [GenerationRequest(f"greedy-{i}", prompt, 8, 0.0, 1.0, 0) for i, prompt in enumerate(prompts)]
        for engine in running.actors.engines:
            results = EnginePool(NAMESPACE, [engine], timeout_s=WAIT_S).generate(requests)
            assert [result.token_ids for result in results] == [greedy(model, prompt, 8) for prompt in prompts]
        exported.append(model.model.embed_tokens.weight.detach().clone())
        running.call(names.LEDGER, "trained", claim.uids)
    assert not any(torch.equal(a, b) for a, b in pairwise(exported))  # each refit brought other weights


def test_the_partition_is_empty_after_the_steps_cleared_theirs(running: Running) -> None:
    plane = connect(running.actors.address, timeout_s=30)
    assert plane.samples("train") == 0
    assert plane.samples("warm_start") == 0


def test_a_lost_worker_is_named_at_once(running: Running) -> None:
    """Last in this module: the run is broken afterwards."""
    batch = running.rollout(3).meta
    ray.kill(ray.get_actor("policy-worker-1", namespace=NAMESPACE))
    started = time.monotonic()
    with pytest.raises(ActorGoneError, match="policy-worker-1"):
        running.call(names.POLICY, "logprob", batch, "policy_logprobs")
    assert time.monotonic() - started < 60


def test_stop_leaves_nothing(running: Running) -> None:
    stop(NAMESPACE, running.actors.address)
    deadline = time.monotonic() + 30
    while left := [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
