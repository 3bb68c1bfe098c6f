"""The collector: draws prompts, has them answered and scored, and writes the samples into the data plane.

PromptStream ──prompts──► EnginePool ──responses──► EnvironmentActor ──rewards──┐
                                                                                ▼
flow ◄── meta: keys, lengths, tags ──────────────────────── DataPlane.put(columns)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict

from actors.data_plane.connect import DataPlaneAddress, connect
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.metrics import OperationUsage
from actors.environments import Problem, build
from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, GenerationResult
from actors.policy.hf import check_model_dir
from actors.rollout.assemble import TRAIN_FIELDS, group_meta, token_columns
from actors.rollout.prompts import PromptEncoder, PromptStream
from actors.rollout.supervised import SampleReader, SampleStream, SupervisedBatches
from configs.run import RunConfig


class Sample(BaseModel):
    """One response as a person reads it."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    response: str
    answer: str
    reward: float
    weight_version: int


class Rollout(BaseModel):
    """What the rollout stage returns: metadata, a few readable samples, and seconds."""

    model_config = ConfigDict(frozen=True)

    meta: KVBatchMeta
    samples: tuple[Sample, ...]
    metrics: dict[str, float]


class Validation(BaseModel):
    """Greedy answers to the held-out problems."""

    model_config = ConfigDict(frozen=True)

    reward: float
    accuracy: float
    samples: tuple[Sample, ...]


class Collector:
    """Wrapped by `ray.remote` where the run starts its actors."""

    def __init__(
        self, config: RunConfig, model_path: str, namespace: str, engines: Sequence[str], environment: str, address: DataPlaneAddress
    ) -> None:
        self._config = config
        self._encoder = PromptEncoder(model_path, config.environment.system_prompt)
        self._environment = build(config.environment, config.seed)
        self._scorer = ray.get_actor(environment, namespace=namespace)
        self._stream = PromptStream(self._environment, config.seed)
        self._plane = connect(address, timeout_s=config.data_plane.timeout_s)
        self._pool = EnginePool(namespace, engines, timeout_s=config.generation.timeout_s)
        self._partition = "train"
        self._plane.register_partition(self._partition, fields=TRAIN_FIELDS, capacity=config.data_plane.capacity_samples)
        # One stream: the first rollout draws the prompts that follow those of the warm start.
        reader = SampleReader(self._encoder, int(check_model_dir(model_path).max_position_embeddings), "error")
        self._warm_start, self._examples = SupervisedBatches(self._plane, "warm_start"), SampleStream(self._stream, reader)

    def ready(self) -> str:
        """A line for the log, once the actor can work."""
        return f"{self._environment.size('train')} prompts an epoch"

    def rollout(self, step: int, weight_version: int) -> Rollout:
        """Answer the next `prompts_per_step` prompts `responses_per_prompt` times each, and store the samples.

        Raises:
            EngineDiedError: an engine is gone or silent. RayActorError: the environment is.
        """
        started = time.monotonic()
        rollout, group = self._config.rollout, self._config.rollout.responses_per_prompt
        drawn = self._stream.draw(rollout.prompts_per_step)
        prompts = [self._encoder.prompt(problem) for _, problem in drawn]
        requests = [
            self._request(f"{uid}/{index}", prompt, rollout.temperature, rollout.top_p)
            for (uid, _), prompt in zip(drawn, prompts, strict=True)
            for index in range(group)
        ]
        results = self._pool.generate(requests)
        generated = time.monotonic()
        problems = [problem for _, problem in drawn for _ in range(group)]
        texts, rewards = self._score(problems, results)
        meta = self._store([uid for uid, _ in drawn], prompts, results, rewards, weight_version)
        shown = range(0, min(len(requests), self._config.logged_samples * group), group)
        tokens = sum(len(result.token_ids) for result in results)
        return Rollout(
            meta=meta,
            samples=tuple(_sample(problems[row], texts[row], rewards[row], weight_version) for row in shown),
            metrics={"generated_tokens": tokens, "generate_s": generated - started, "score_and_store_s": time.monotonic() - generated},
        )

    def validate(self, weight_version: int) -> Validation:
        """Answer every validation problem once; reward and accuracy are means over all of them."""
        rollout = self._config.rollout
        problems = [self._environment.problem("validation", i) for i in range(self._environment.size("validation"))]
        requests = [self._request(p.uid, self._encoder.prompt(p), rollout.validation_temperature, 1.0) for p in problems]
        texts, rewards = self._score(problems, self._pool.generate(requests))
        correct = sum(self._environment.correct(reward) for reward in rewards)
        return Validation(
            reward=sum(rewards) / len(rewards),
            accuracy=correct / len(rewards),
            samples=tuple(
                _sample(problem, text, reward, weight_version)
                for problem, text, reward in list(zip(problems, texts, rewards, strict=True))[: self._config.logged_samples]
            ),
        )

    def supervised(self, step: int) -> KVBatchMeta:
        """The next warm-start batch: prompts of the training stream with the environment's own answers."""
        return self._warm_start.put(self._examples.draw(self._config.warm_start.batch_size), f"warm-start batch {step}")

    def clear(self, meta: KVBatchMeta) -> None:
        """Forget these samples."""
        self._plane.clear(meta)

    def data_plane_metrics(self, others: dict[str, OperationUsage]) -> dict[str, float]:
        """`DataPlane.metrics` of this actor's client and of the given ones."""
        return self._plane.metrics([others])

    def _request(self, request_id: str, prompt: list[int], temperature: float, top_p: float) -> GenerationRequest:
        digest = hashlib.sha256(f"{self._config.seed}/{request_id}".encode()).digest()
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            max_new_tokens=self._config.rollout.max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=int.from_bytes(digest[:4], "big"),
        )

    def _score(self, problems: Sequence[Problem], results: Sequence[GenerationResult]) -> tuple[list[str], list[float]]:
        texts = [self._encoder.text(result.token_ids) for result in results]
        rewards: list[float] = ray.get(self._scorer.score.remote(list(problems), texts), timeout=self._config.generation.timeout_s)
        return texts, rewards

    def _store(
        self,
        uids: Sequence[str],
        prompts: Sequence[list[int]],
        results: Sequence[GenerationResult],
        rewards: Sequence[float],
        weight_version: int,
    ) -> KVBatchMeta:
        """Write the responses of all prompts in one put: they were all finished together."""
        group = len(results) // len(uids)
        tags: list[dict[str, Any]] = [
            {"reward": reward, "response_length": len(result.token_ids), "truncated": result.finish_reason == "length"}
            for result, reward in zip(results, rewards, strict=True)
        ]
        repeated = [prompt for prompt in prompts for _ in range(group)]
        lengths = [len(prompt) + len(result.token_ids) for prompt, result in zip(repeated, results, strict=True)]
        metas = []
        for number, uid in enumerate(uids):
            rows = slice(number * group, (number + 1) * group)
            metas.append(group_meta(self._partition, "rollout", weight_version, uid, lengths[rows], tags[rows]))
        columns = token_columns(repeated, [r.token_ids for r in results], [r.logprobs for r in results])
        return self._plane.put(KVBatchMeta.concat(metas), columns)


def _sample(problem: Problem, text: str, reward: float, weight_version: int) -> Sample:
    return Sample(prompt=problem.question, response=text, answer=problem.answer, reward=reward, weight_version=weight_version)
