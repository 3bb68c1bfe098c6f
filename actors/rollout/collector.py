"""The collector: draws prompts, has them answered and scored, and writes the samples into the data plane.

PromptStream ──prompts──► EnginePool ──responses──► EnvironmentActor ──rewards──┐
                                                                                ▼
flow ◄── meta: keys, lengths, tags ──────────────────────── DataPlane.put(columns)

`rollout` answers one step's prompts and returns; between `begin_generating` and `stop_generating` a thread goes on without pause,
and the groups go through the replay buffer (`continuous`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray

from actors import names
from actors.data_plane.connect import DataPlaneAddress, connect
from actors.data_plane.meta import KVBatchMeta, mint_key
from actors.data_plane.metrics import OperationUsage
from actors.environments import Problem, build
from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, GenerationTimeoutError
from actors.heap import freeze_heap
from actors.policy.hf import check_model_dir
from actors.rollout.assemble import TRAIN_FIELDS
from actors.rollout.continuous import Continuous
from actors.rollout.in_flight import InFlight, PromptGroup
from actors.rollout.prompts import PromptEncoder, PromptStream
from actors.rollout.replay import Reservation
from actors.rollout.requests import group_requests
from actors.rollout.samples import Progress, Rollout, StepReport, Validation
from actors.rollout.scoring import Scoring, Written, shown
from actors.rollout.supervised import SampleReader, SampleStream, SupervisedBatches
from actors.rollout.validation import Validator
from actors.waiting import find, wait
from configs.run import RunConfig

_POLL_S = 0.2  # for responses while others are being scored, and the other way round


class Collector:
    """Wrapped by `ray.remote` where the run starts its actors. `progress`, `report` and `stop_generating` may overlap the other calls."""

    def __init__(
        self, config: RunConfig, model_path: str, namespace: str, engines: Sequence[str], environment: str, address: DataPlaneAddress
    ) -> None:
        self._config, self._namespace, self._engines = config, namespace, engines
        self._encoder = PromptEncoder(model_path, config.environment.system_prompt)
        # One for the thread that generates without pause: tokenizers raise "Already borrowed" when two threads encode.
        self._rollout_encoder = PromptEncoder(model_path, config.environment.system_prompt)
        self._environment = build(config.environment, config.seed)
        self._scorer = ray.get_actor(environment, namespace=namespace)
        self._stream = PromptStream(self._environment, config.seed)
        self._plane = connect(address, timeout_s=config.data_plane.timeout_s)
        self._pool = self._new_pool()
        self._partition = "train"
        self._plane.register_partition(self._partition, fields=TRAIN_FIELDS, capacity=config.data_plane.capacity_samples)
        # One stream: the first rollout draws the prompts that follow those of the warm start.
        reader = SampleReader(self._encoder, int(check_model_dir(model_path).max_position_embeddings), "error")
        self._warm_start, self._examples = SupervisedBatches(self._plane, "warm_start"), SampleStream(self._stream, reader)
        self._continuous: Continuous | None = None

    def ready(self) -> str:
        """A line for the log, once the actor can work."""
        freeze_heap()
        return f"{self._environment.size('train')} prompts an epoch"

    def rollout(self, step: int, weight_version: int) -> Rollout:
        """Answer the next `prompts_per_step` prompts `responses_per_prompt` times each. Groups are scored and stored as they finish.

        Raises:
            EngineDiedError: an engine is gone or silent. ActorGoneError, ActorTimeoutError: the environment is.
        """
        started = time.monotonic()
        groups = [self._group(weight_version) for _ in range(self._config.rollout.prompts_per_step)]
        scoring, flying = self._new_scoring(), InFlight()
        for group in groups:
            flying.add(group)
        self._pool.submit([request for group in groups for request in self._requests(group)])
        written: dict[str, Written] = {}
        generated, deadline = started, started + self._config.generation.timeout_s
        while flying:
            scoring.begin(flying.finish(self._pool.collect(_POLL_S)))
            generated = time.monotonic()
            if generated > deadline:
                self._pool.abort([lost for uid in flying.uids() for lost in flying.remove(uid)])
                raise GenerationTimeoutError(f"rollout {step}: not complete after {self._config.generation.timeout_s:.0f} s")
            written |= {done.group.uid: done for done in scoring.written(0.0)}
        while scoring:
            written |= {done.group.uid: done for done in scoring.written(_POLL_S)}
        if self._config.generation.sleep_level:
            self._pool.sleep()  # until the refit
        in_order = [written[group.uid] for group in groups]
        return Rollout(
            meta=KVBatchMeta.concat([done.meta for done in in_order]),
            samples=tuple(shown(done) for done in in_order[: self._config.logged_samples]),
            metrics={
                "generated_tokens": sum(tag["response_length"] for done in in_order for tag in done.meta.tags),
                "generate_s": generated - started,
                "score_and_store_s": time.monotonic() - generated,
            },
        )

    def validate(self, weight_version: int) -> Validation:
        """Answer every validation problem once; reward and accuracy are means over all of them."""
        rollout = self._config.rollout
        validator = Validator(
            self._environment, self._encoder, self._pool, self._rewards, self._config.seed,
            rollout.max_new_tokens, rollout.validation_temperature,
        )  # fmt: skip
        return Validation.of(self._environment, validator.answers(weight_version), self._config.logged_samples)

    # ---- generation without pause ----

    def begin_generating(self) -> None:
        """Start to generate, for the replay buffer; goes on after this call.

        Raises:
            RuntimeError: it has begun already. ActorGoneError: there is no replay buffer.
        """
        if self._continuous is not None:
            raise RuntimeError("generation has begun already")
        self._continuous = Continuous(
            draw=self._draw,
            requests=self._requests,
            rows=self._config.rollout.responses_per_prompt,
            pool=self._new_pool(),  # a pool belongs to one thread
            scoring=self._new_scoring(),
            replay=find(names.REPLAY, self._namespace),
            shown=self._config.logged_samples,
        )

    def progress(self, wait_s: float) -> Progress:
        """`Continuous.progress`."""
        return self._generating().progress(wait_s)

    def report(self) -> StepReport:
        """`Continuous.report`."""
        return self._generating().report()

    def stop_generating(self) -> None:
        """`Continuous.stop`; nothing when it never began."""
        if self._continuous is not None:
            self._continuous.stop()

    # ---- the rest ----

    def supervised(self, step: int) -> KVBatchMeta:
        """The next warm-start batch: prompts of the training stream with the environment's own answers."""
        return self._warm_start.put(self._examples.draw(self._config.warm_start.batch_size), f"warm-start batch {step}")

    def clear(self, meta: KVBatchMeta) -> None:
        """Forget these samples."""
        self._plane.clear(meta)

    def data_plane_metrics(self, others: dict[str, OperationUsage]) -> dict[str, float]:
        """`DataPlane.metrics` of this actor's client and of the given ones."""
        return self._plane.metrics([others])

    def _rewards(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[float]:
        scores = self._scorer.score.remote(list(problems), list(texts))
        rewards: list[float] = wait(scores, who=names.ENVIRONMENT, what="score", timeout_s=self._config.generation.timeout_s)
        return rewards

    def _requests(self, group: PromptGroup) -> list[GenerationRequest]:
        return group_requests(group, self._config.rollout, self._config.seed)

    def _generating(self) -> Continuous:
        if self._continuous is None:
            raise RuntimeError("generation has not begun")
        return self._continuous

    def _new_pool(self) -> EnginePool:
        recover = self._config.mode == "async"  # the replay buffer goes on with the engines that are left
        return EnginePool(self._namespace, self._engines, timeout_s=self._config.generation.timeout_s, recover=recover)

    def _new_scoring(self) -> Scoring:
        return Scoring(self._scorer, self._rollout_encoder, self._plane, self._partition, self._config.generation.timeout_s)

    def _draw(self) -> tuple[str, Problem, list[int]]:
        ((uid, problem),) = self._stream.draw(1)
        return uid, problem, self._rollout_encoder.prompt(problem)

    def _group(self, weight_version: int) -> PromptGroup:
        uid, problem, prompt = self._draw()
        keys = tuple(mint_key(weight_version, uid, row) for row in range(self._config.rollout.responses_per_prompt))
        return PromptGroup(problem, prompt, Reservation(uid, keys, weight_version, None))
