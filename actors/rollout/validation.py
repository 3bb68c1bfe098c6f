"""Answers to held-out problems, scored: during a training (the collector), or of a model alone (`evaluate`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.environments import Environment, Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.generation.pool import EnginePool
from actors.rollout.in_flight import read_response, seeded_request
from actors.rollout.prompts import OnTooLong, PromptEncoder, fit
from actors.rollout.samples import Sample
from configs.validation import OWN_SET as OWN_SET


@dataclass(frozen=True)
class Validator:
    """Has every validation problem of an environment answered `samples_per_prompt` times.

    Attributes:
        score: verdicts on (problems, responses). seed: of the run; each request has a seed made of it and the request's name.
        room: most tokens of a prompt. on_too_long: what becomes of a longer one.
    """

    environment: Environment
    encoder: PromptEncoder
    pool: EnginePool
    score: Callable[[Sequence[Problem], Sequence[Response]], list[Verdict]]
    seed: int
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    samples_per_prompt: int = 1
    room: int = 2**31
    on_too_long: OnTooLong = "refuse"

    def answers(self, weight_version: int, part: int = 0, parts: int = 1) -> list[tuple[Sample, ...]]:
        """The answers to each problem, in the order of the problems.

        Args:
            part, parts: which of how many parts of the problems, of which all together are as one.

        Raises:
            EngineDiedError: an engine is gone or silent. PromptTooLongError. What `score` raises.
        """
        rows = range(self.samples_per_prompt)
        problems = held_out_problems(self.environment)
        problems = problems[len(problems) * part // parts : len(problems) * (part + 1) // parts]
        sampling = self.max_new_tokens, self.temperature, self.top_p
        encoded = [(problem, fit(problem, self.encoder.prompt(problem), self.room, self.on_too_long)) for problem in problems]
        problems = [problem for problem, ids in encoded if ids is not None]
        # The first answer's seed, which hangs on its name, is the same however many there are.
        named = [(f"{problem.uid}#{row}" if row else problem.uid, ids) for problem, ids in encoded if ids is not None for row in rows]
        results = self.pool.generate([seeded_request(self.seed, name, ids, *sampling) for name, ids in named])
        responses = [read_response(self.encoder, result) for result in results]
        asked = [problem for problem in problems for _ in rows]
        verdicts = self.score(asked, responses)
        samples = [Sample.of(*one, weight_version) for one in zip(asked, responses, verdicts, strict=True)]
        return [tuple(samples[start : start + len(rows)]) for start in range(0, len(samples), len(rows))]


def held_out_problems(environment: Environment) -> list[Problem]:
    """All of the environment's validation split."""
    return [environment.problem("validation", index) for index in range(environment.size("validation"))]
