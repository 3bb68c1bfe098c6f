"""Answers to an environment's validation problems, scored: during a training (the collector), or of a model alone (`evaluate`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from actors.environments import Environment, Problem
from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, GenerationResult
from actors.rollout.prompts import PromptEncoder

Score = Callable[[Sequence[Problem], Sequence[str]], list[float]]


class Sample(BaseModel):
    """One response as a person reads it."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    response: str
    answer: str
    reward: float
    weight_version: int


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


@dataclass(frozen=True)
class Validator:
    """Has every validation problem answered once.

    Attributes:
        score: rewards of (problems, responses). seed: of the run; each problem's request has a seed made of it and the problem's uid.
    """

    environment: Environment
    encoder: PromptEncoder
    pool: EnginePool
    score: Score
    seed: int
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0

    def answers(self, weight_version: int) -> list[Sample]:
        """One sample per problem, in their order.

        Raises:
            EngineDiedError: an engine is gone or silent.
        """
        problems = [self.environment.problem("validation", i) for i in range(self.environment.size("validation"))]
        requests = [request(self.seed, p.uid, self.encoder.prompt(p), self.max_new_tokens, self.temperature, self.top_p) for p in problems]
        texts, rewards = scored(self.encoder, self.score, problems, self.pool.generate(requests))
        return [sample(p, text, reward, weight_version) for p, text, reward in zip(problems, texts, rewards, strict=True)]


def request(seed: int, request_id: str, prompt: list[int], max_new_tokens: int, temperature: float, top_p: float) -> GenerationRequest:
    """A request whose sampling depends on the run's seed and its id alone."""
    digest = hashlib.sha256(f"{seed}/{request_id}".encode()).digest()
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=int.from_bytes(digest[:4], "big"),
    )


def scored(
    encoder: PromptEncoder, score: Score, problems: Sequence[Problem], results: Sequence[GenerationResult]
) -> tuple[list[str], list[float]]:
    """(texts, rewards) of the responses."""
    texts = [encoder.text(result.token_ids) for result in results]
    return texts, score(problems, texts)


def sample(problem: Problem, text: str, reward: float, weight_version: int) -> Sample:
    """A response for a person."""
    return Sample(prompt=problem.question, response=text, answer=problem.answer, reward=reward, weight_version=weight_version)
