"""Prompts as requests, and prompt groups while their responses are being generated. Pure: no Ray, no clock.

add ──► waiting for responses ──last result──► complete (handed out once)
                 └──remove: cancelled, or a response that no engine could finish──► gone
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.environments import Problem
from actors.environments.rewards.base import Response
from actors.generation.types import GenerationRequest, GenerationResult
from actors.rollout.prompts import PromptEncoder
from actors.rollout.transitions import Admitted
from configs.rollout import RolloutConfig


@dataclass
class PromptGroup:
    """One prompt and the responses that it has so far, by row."""

    problem: Problem
    prompt: list[int]
    reservation: Admitted
    results: dict[int, GenerationResult] = field(default_factory=dict)

    @property
    def uid(self) -> str:
        return self.reservation.uid

    def in_order(self) -> list[GenerationResult]:
        """The responses by row, once all are there."""
        return [self.results[row] for row in range(len(self.reservation.keys))]

    def lacking(self) -> list[int]:
        """Rows that have no response yet."""
        return [row for row in range(len(self.reservation.keys)) if row not in self.results]


class InFlight:
    """Groups by uid, and which row of which group each request answers."""

    def __init__(self) -> None:
        self._groups: dict[str, PromptGroup] = {}
        self._rows: dict[str, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def uids(self) -> tuple[str, ...]:
        """Of the groups in flight, the oldest first."""
        return tuple(self._groups)

    def groups(self) -> tuple[PromptGroup, ...]:
        """The groups in flight, the oldest first."""
        return tuple(self._groups.values())

    def add(self, group: PromptGroup) -> None:
        """Requests of this group, for the responses that it lacks, are about to be submitted. The ledger gives no place to a uid that is
        in flight.
        """
        self._groups[group.uid] = group
        self._rows |= {request_id(group.uid, row): (group.uid, row) for row in group.lacking()}

    def finish(self, results: Iterable[GenerationResult]) -> list[PromptGroup]:
        """Take responses in. Returns the groups that are complete now, and in flight no more.

        A response of a removed group is ignored: it had ended before it could be stopped.
        """
        complete = []
        for result in results:
            uid, row = self._rows.pop(result.request_id, (None, 0))
            if uid is None:
                continue
            group = self._groups[uid]
            group.results[row] = result
            if len(group.results) == len(group.reservation.keys):
                complete.append(self._groups.pop(uid))
        return complete

    def remove(self, uid: str) -> list[str]:
        """Forget a group, if it is in flight. Returns the request ids that still run."""
        self._groups.pop(uid, None)
        missing = [lost for lost, (owner, _) in self._rows.items() if owner == uid]
        for lost in missing:
            del self._rows[lost]
        return missing

    def groups_of(self, request_ids: Iterable[str]) -> list[str]:
        """Uids of the groups in flight that these requests belong to, each once."""
        return list(dict.fromkeys(self._rows[lost][0] for lost in request_ids if lost in self._rows))


def request_id(uid: str, row: int) -> str:
    """The id of the request for one response to a prompt."""
    return f"{uid}/{row}"


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
