"""From prompts to requests, and from results to what rewards see. Pure."""

from __future__ import annotations

import hashlib

from actors.environments.rewards.base import Response
from actors.generation.types import GenerationRequest, GenerationResult
from actors.rollout.in_flight import PromptGroup, request_id
from actors.rollout.prompts import PromptEncoder
from configs.rollout import RolloutConfig


def group_requests(group: PromptGroup, rollout: RolloutConfig, seed: int) -> list[GenerationRequest]:
    """One request for each response that a training group lacks."""
    sampling = rollout.max_new_tokens, rollout.temperature, rollout.top_p
    return [seeded_request(seed, request_id(group.uid, row), group.prompt, *sampling) for row in group.lacking()]


def seeded_request(seed: int, name: str, prompt: list[int], max_new_tokens: int, temperature: float, top_p: float) -> GenerationRequest:
    """A request whose sampling depends on the run's seed and its id alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=int.from_bytes(digest[:4], "big"),
    )


def read_response(encoder: PromptEncoder, result: GenerationResult) -> Response:
    """The response in words."""
    return Response(encoder.text(result.token_ids), len(result.token_ids), result.finish_reason == "length")
