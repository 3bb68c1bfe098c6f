"""Prompt groups while their responses are being generated. Pure: no Ray, no clock.

add ──► waiting for responses ──last result──► complete (handed out once)
                 └──remove: cancelled, or a response that no engine could finish──► gone
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.environments import Problem
from actors.generation.types import GenerationResult
from actors.rollout.transitions import Admitted


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

    def missing(self) -> list[str]:
        """Request ids of the responses that are still being generated."""
        return [request_id(self.uid, row) for row in self.lacking()]

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
        """Requests of this group are about to be submitted, for the responses that it lacks.

        Raises:
            ValueError: the uid is in flight already.
        """
        if group.uid in self._groups:
            raise ValueError(f"group {group.uid!r} is in flight already")
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
        group = self._groups.pop(uid, None)
        missing = group.missing() if group else []
        for lost in missing:
            del self._rows[lost]
        return missing

    def groups_of(self, request_ids: Iterable[str]) -> list[str]:
        """Uids of the groups in flight that these requests belong to, each once."""
        return list(dict.fromkeys(self._rows[lost][0] for lost in request_ids if lost in self._rows))


def request_id(uid: str, row: int) -> str:
    """The id of the request for one response to a prompt."""
    return f"{uid}/{row}"
