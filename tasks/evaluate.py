"""validate, evaluate: answers to the held-out problems, during a training and of a finished model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect import task

from actors import names
from actors.environments import Problem, build
from actors.environments.actor import EnvironmentActor
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.generation.pool import EnginePool
from actors.models.hf import check_model_dir
from actors.rollout.collector import Collector
from actors.rollout.prompts import PromptEncoder
from actors.rollout.samples import Sample, Validation
from actors.rollout.validation import OWN_SET, Validator
from configs.evaluate import EvaluateConfig
from configs.secrets import know
from tasks.call import RETRIED, STAGE, ask


@task(name="validate", task_run_name="validate-{step}", **RETRIED)
def validate(namespace: str, step: str, weight_version: int, timeout_s: float, name: str = OWN_SET) -> Validation:
    """What the engines' present weights achieve on a validation set. `step` is a number or a label such as warm-start-20."""
    return ask(namespace, names.COLLECTOR, timeout_s, Collector.validate, weight_version, name)


@dataclass(frozen=True)
class Shard:
    """Problems of a validation set for engines of one model.

    Attributes:
        model: label of the model. name: of the set.
        engines: names of the engines that answer, which answer nothing else meanwhile.
        part, parts: which of how many parts of the set.
    """

    model: str
    name: str
    engines: tuple[str, ...]
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        of_set = "" if self.name == OWN_SET else f"-{self.name}"
        return f"{self.model}{of_set}" + (f"-{self.part + 1}of{self.parts}" if self.parts > 1 else "")


@dataclass(frozen=True)
class Answers:
    """What came of a shard: the answers to each problem, in the order of the problems, and the seconds that they took."""

    shard: Shard
    samples: list[tuple[Sample, ...]]
    seconds: float


@task(name="evaluate", task_run_name="evaluate-{shard}", **STAGE)
def evaluate_shard(shard: Shard, namespace: str, config: EvaluateConfig, secrets: Mapping[str, str]) -> Answers:
    """The problems of a shard are answered by its engines, and scored. May run in a Ray worker.

    Args:
        secrets: what the references of the sources of problems refer to, where this process cannot look.

    Raises:
        EngineDiedError, PromptTooLongError, ActorGoneError, ActorTimeoutError.
    """
    know(secrets)
    started = time.monotonic()
    source, sampling, path = config.sources[shard.name], config.sampling, config.models[shard.model]

    def score(problems: Sequence[Problem], responses: Sequence[Response]) -> list[Verdict]:
        return ask(namespace, names.ENVIRONMENT, config.deadlines.score, EnvironmentActor.score, problems, responses)

    validator = Validator(
        build(source, config.seed),
        PromptEncoder(path, source.system_prompt, source.chat_template_kwargs),
        EnginePool(namespace, shard.engines, timeout_s=config.generation.timeout_s),
        score,
        config.seed,
        sampling.max_new_tokens,
        sampling.temperature,
        sampling.top_p,
        config.validation.samples_per_prompt,
        config.prompt_room(int(check_model_dir(path).max_position_embeddings)),
        source.on_too_long,
    )
    samples = validator.answers(0, shard.part, shard.parts)
    return Answers(shard, samples, time.monotonic() - started)
