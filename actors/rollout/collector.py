"""The collector: draws prompts, has them answered and scored, and writes the samples into the data plane.

PromptStream ──prompts──► EnginePool ──responses──► EnvironmentActor ──rewards──┐
                                                                                ▼
flow ◄── meta: keys, lengths, tags ──────────────────────── DataPlane.put(columns)
"""

from __future__ import annotations

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
from actors.rollout.validation import Sample, Validation, Validator, request, sample, scored
from configs.run import RunConfig


class Rollout(BaseModel):
    """What the rollout stage returns: metadata, a few readable samples, and seconds."""

    model_config = ConfigDict(frozen=True)

    meta: KVBatchMeta
    samples: tuple[Sample, ...]
    metrics: dict[str, float]


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
            samples=tuple(sample(problems[row], texts[row], rewards[row], weight_version) for row in shown),
            metrics={"generated_tokens": tokens, "generate_s": generated - started, "score_and_store_s": time.monotonic() - generated},
        )

    def validate(self, weight_version: int) -> Validation:
        """Answer every validation problem once; reward and accuracy are means over all of them."""
        rollout = self._config.rollout
        validator = Validator(
            self._environment, self._encoder, self._pool, self._rewards, self._config.seed,
            rollout.max_new_tokens, rollout.validation_temperature,
        )  # fmt: skip
        return Validation.of(self._environment, validator.answers(weight_version), self._config.logged_samples)

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
        return request(self._config.seed, request_id, prompt, self._config.rollout.max_new_tokens, temperature, top_p)

    def _rewards(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
        rewards: list[float] = ray.get(self._scorer.score.remote(list(problems), list(texts)), timeout=self._config.generation.timeout_s)
        return rewards

    def _score(self, problems: Sequence[Problem], results: Sequence[GenerationResult]) -> tuple[list[str], list[float]]:
        return scored(self._encoder, self._rewards, problems, results)

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
