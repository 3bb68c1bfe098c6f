"""Answers to an environment's validation problems, scored: during a training (the collector), or of a model alone (`evaluate`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.environments import Environment, Problem
from actors.generation.pool import EnginePool
from actors.rollout.prompts import PromptEncoder
from actors.rollout.requests import seeded_request
from actors.rollout.samples import Sample


@dataclass(frozen=True)
class Validator:
    """Has every validation problem answered once.

    Attributes:
        score: rewards of (problems, responses). seed: of the run; each problem's request has a seed made of it and the problem's uid.
    """

    environment: Environment
    encoder: PromptEncoder
    pool: EnginePool
    score: Callable[[Sequence[Problem], Sequence[str]], list[float]]
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
        sampling = self.max_new_tokens, self.temperature, self.top_p
        results = self.pool.generate([seeded_request(self.seed, p.uid, self.encoder.prompt(p), *sampling) for p in problems])
        texts = [self.encoder.text(result.token_ids) for result in results]
        rewards = self.score(problems, texts)
        return [Sample.of(p, text, reward, weight_version) for p, text, reward in zip(problems, texts, rewards, strict=True)]
