"""What the rollout stages return: metadata, numbers, and a few responses that a person can read."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from actors.data_plane.meta import KVBatchMeta
from actors.environments import Environment, Problem


class Sample(BaseModel):
    """One response as a person reads it."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    response: str
    answer: str
    reward: float
    weight_version: int

    @staticmethod
    def of(problem: Problem, text: str, reward: float, weight_version: int) -> Sample:
        """A response to the problem; `weight_version` sampled its first token."""
        return Sample(prompt=problem.question, response=text, answer=problem.answer, reward=reward, weight_version=weight_version)


class Rollout(BaseModel):
    """What the synchronous rollout stage returns: metadata, a few readable samples, and seconds."""

    model_config = ConfigDict(frozen=True)

    meta: KVBatchMeta
    samples: tuple[Sample, ...]
    metrics: dict[str, float]


class Validation(BaseModel):
    """Answers to the held-out problems: means over all of them, and a few to read."""

    model_config = ConfigDict(frozen=True)

    reward: float
    accuracy: float
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, environment: Environment, samples: Sequence[Sample], shown: int) -> Validation:
        """Of all samples, of which the first `shown` are kept."""
        return cls(
            reward=sum(sample.reward for sample in samples) / len(samples),
            accuracy=sum(environment.correct(sample.reward) for sample in samples) / len(samples),
            samples=tuple(samples[:shown]),
        )


class StepReport(BaseModel):
    """What the collector did since the last report, while it generates without pause.

    Attributes:
        samples: of the last groups that were committed.
        metrics: generated_tokens, idle/generator_s (seconds in which no engine had a request), engines/alive.
    """

    model_config = ConfigDict(frozen=True)

    samples: tuple[Sample, ...]
    metrics: dict[str, float]


class Progress(BaseModel):
    """How generation without pause stands.

    Attributes:
        groups, tokens: committed, and generated, since it began. seconds: since it began.
        in_flight: groups being generated or scored.
        log: lines for the run's log since the last call.
        ended: whether it has stopped. error: why, when nobody asked for it.
    """

    model_config = ConfigDict(frozen=True)

    groups: int
    tokens: int
    seconds: float
    in_flight: int
    log: tuple[str, ...]
    ended: bool
    error: str | None
