"""The collector: draws prompts, has them answered and scored, and writes the samples into the data plane.

PromptStream ──prompts──► EnginePool ──responses──► EnvironmentActor ─verdicts──┐
                                                                                ▼
flow ◄── meta: keys, lengths, tags ──────────────────────── DataPlane.put(columns)

`rollout` answers one step's prompts and returns; between `begin_generating` and `stop_generating` a thread goes on without pause,
and the groups go through the replay buffer (`continuous`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from actors import names
from actors.data_plane.connect import DataPlaneAddress, connect
from actors.data_plane.meta import KVBatchMeta, mint_key
from actors.data_plane.metrics import OperationUsage
from actors.environments import Problem, build
from actors.environments.dataset.problems import prompt_digest
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.environments.scoring.verdict import metrics as scoring_metrics
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
from actors.rollout.samples import SLOWEST, Progress, Rollout, SlowSample, StepReport, Validation, slowest
from actors.rollout.scoring import Scoring, Written, observe, shown
from actors.rollout.supervised import SampleReader, SampleStream, SupervisedBatches
from actors.rollout.validation import OWN_SET, Validator, held_out_problems
from actors.waiting import ActorTimeoutError, find, wait
from configs.environment import EnvironmentConfig
from configs.run import RunConfig

_POLL_S = 0.2  # for responses while others are being scored, and the other way round


class Collector:
    """Wrapped by `ray.remote` where the run starts its actors. `progress`, `report` and `stop_generating` may overlap the other calls."""

    def __init__(
        self, config: RunConfig, model_path: str, namespace: str, engines: Sequence[str], environment: str, address: DataPlaneAddress
    ) -> None:
        self._config, self._namespace, self._engines = config, namespace, engines
        # One for the thread that generates without pause: tokenizers raise "Already borrowed" when two threads encode.
        self._encoder, self._rollout_encoder = (_encoder(model_path, config.environment) for _ in range(2))
        self._environment = build(config.environment, config.seed)
        self._sets = {
            name: (build(source, config.seed), _encoder(model_path, source)) for name, source in config.validation.sets.items()
        } | {OWN_SET: (self._environment, self._encoder)}
        self._validating = threading.Lock()
        self._scorer = ray.get_actor(environment, namespace=namespace)
        self._room = config.prompt_room(int(check_model_dir(model_path).max_position_embeddings))
        on_too_long = config.environment.on_too_long
        self._stream = PromptStream(
            self._environment,
            config.seed,
            encoder=self._rollout_encoder,
            room=self._room,
            on_too_long="drop" if on_too_long == "refuse" else on_too_long,  # refused is what can be seen before the start
            curriculum=config.environment.curriculum,
            held_out={
                prompt_digest(one) for name, (source, _) in self._sets.items() if name != OWN_SET for one in held_out_problems(source)
            },
        )
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
        return "streamed prompts" if self._stream.size is None else f"{self._stream.size} prompts an epoch"

    def rollout(self, step: int, weight_version: int) -> Rollout:
        """Answer the next `prompts_per_step` prompts `responses_per_prompt` times each. Groups are scored and stored as they finish.

        Raises:
            EngineDiedError: an engine is gone or silent. ActorGoneError, ActorTimeoutError: the environment is.
            ScoringError: too many responses have no reward.
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
        for done in in_order:  # in the order of drawing, so that a curriculum is deterministic
            observe(self._stream, done)
        verdicts = [verdict for done in in_order for verdict in done.verdicts]
        return Rollout(
            meta=KVBatchMeta.concat([done.meta for done in in_order if done.meta is not None]),
            samples=tuple(shown(done) for done in in_order[: self._config.logged_samples]),
            slowest=slowest((SlowSample.of(done.group.problem.uid, verdict) for done in in_order for verdict in done.verdicts), SLOWEST),
            metrics=scoring_metrics(verdicts)
            | self._stream.metrics()
            | {
                "generated_tokens": sum(response.tokens for done in in_order for response in done.responses),
                "time/generate": generated - started,
                "time/score_and_store": time.monotonic() - generated,
            },
        )

    def validate(self, weight_version: int, name: str = OWN_SET) -> Validation:
        """Answer every problem of the validation set.

        Raises:
            As `rollout`. ActorTimeoutError: a validation whose caller gave up is still running.
        """
        config, rollout = self._config, self._config.rollout
        environment, encoder = self._sets[name]
        if not self._validating.acquire(timeout=config.deadlines.validation):
            raise ActorTimeoutError(f"validate: the validation before has not ended within {config.deadlines.validation:.0f} s")
        try:
            validator = Validator(
                environment, encoder, self._pool, self._verdicts, config.seed,
                rollout.max_new_tokens, rollout.validation_temperature,
                samples_per_prompt=config.validation.samples_per_prompt, room=self._room, on_too_long=config.environment.on_too_long,
            )  # fmt: skip
            return Validation.of(validator.answers(weight_version), config.validation, shown=config.logged_samples, slow=SLOWEST)
        finally:
            self._validating.release()

    # ---- generation without pause ----

    def begin_generating(self) -> None:
        """Start to generate, for the replay buffer; goes on after this call.

        Raises:
            RuntimeError: it has begun already. ActorGoneError: there is no replay buffer.
        """
        if self._continuous is not None:
            raise RuntimeError("generation has begun already")
        self._continuous = Continuous(
            stream=self._stream,
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

    def _verdicts(self, problems: Sequence[Problem], responses: Sequence[Response]) -> list[Verdict]:
        scores: Any = self._scorer.score.remote(list(problems), list(responses))
        verdicts: list[Verdict] = wait(scores, who=names.ENVIRONMENT, what="score", timeout_s=self._config.deadlines.score)
        return verdicts

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
        replaces = self._config.mode == "async"  # the replay buffer admits others
        return Scoring(
            self._scorer, self._rollout_encoder, self._plane, self._partition, self._config.deadlines.score, replaces=replaces
        )  # fmt: skip

    def _group(self, weight_version: int) -> PromptGroup:
        (drawn,) = self._stream.draw_encoded(1)
        keys = tuple(mint_key(weight_version, drawn.uid, row) for row in range(self._config.rollout.responses_per_prompt))
        return PromptGroup(drawn.problem, drawn.token_ids, Reservation(drawn.uid, keys, weight_version, None))


def _encoder(model_path: str, source: EnvironmentConfig) -> PromptEncoder:
    return PromptEncoder(model_path, source.system_prompt, source.chat_template_kwargs)
