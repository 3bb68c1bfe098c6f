"""From prompts to requests. Pure."""

from __future__ import annotations

import hashlib

from actors.generation.types import GenerationRequest
from actors.rollout.in_flight import PromptGroup, request_id
from configs.rollout import RolloutConfig


class Requests:
    """Sampling parameters of the run; each response has a random seed of its own, made of the run's seed and the request's id."""

    def __init__(self, rollout: RolloutConfig, seed: int) -> None:
        self._rollout, self._seed = rollout, seed

    def sampled(self, group: PromptGroup) -> list[GenerationRequest]:
        """One request per row of a training group."""
        rollout = self._rollout
        rows = range(len(group.reservation.keys))
        return [self._request(request_id(group.uid, row), group.prompt, rollout.temperature, rollout.top_p) for row in rows]

    def greedy(self, uid: str, prompt: list[int]) -> GenerationRequest:
        """The request for a validation answer."""
        return self._request(uid, prompt, self._rollout.validation_temperature, 1.0)

    def _request(self, name: str, prompt: list[int], temperature: float, top_p: float) -> GenerationRequest:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return GenerationRequest(
            request_id=name,
            prompt_token_ids=prompt,
            max_new_tokens=self._rollout.max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=int.from_bytes(digest[:4], "big"),
        )
