"""From complete groups to rows in the data plane, while others are still being generated.

begin(groups) ──responses──► EnvironmentActor ──verdicts──► written(): one put for the groups whose verdicts came together ──► Written
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from actors import names
from actors.data_plane.interface import DataPlane
from actors.data_plane.meta import KVBatchMeta
from actors.environments import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.rollout.assemble import ROLLOUT_FIELDS, Trajectory, group_rows
from actors.rollout.in_flight import PromptGroup, read_response
from actors.rollout.prompts import PromptEncoder, PromptStream
from actors.rollout.samples import Sample
from actors.waiting import ActorTimeoutError, wait


@dataclass(frozen=True)
class Written:
    """A group whose rows are in the data plane.

    Attributes:
        meta: its rows, in the order of its responses; None: a verdict drops the whole group, and nothing was written.
        responses, verdicts: of each.
    """

    group: PromptGroup
    meta: KVBatchMeta | None
    responses: tuple[Response, ...]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Finished:
    """What the curriculum and the report want to know of a group.

    Attributes:
        verdicts: of each response. sample: the first response, for a person; None: nothing was written.
    """

    problem: Problem
    verdicts: tuple[Verdict, ...]
    sample: Sample | None

    @classmethod
    def of(cls, written: Written) -> Finished:
        """Of a group that was scored."""
        group = written.group
        first = Sample.of(group.problem, written.responses[0], written.verdicts[0], group.in_order()[0].weight_version_start)
        return cls(group.problem, written.verdicts, None if written.meta is None else first)


class Scoring:
    """Groups between their last token and the data plane. Call from one thread.

    Args:
        scorer: handle of the environment actor.
        timeout_s: longest wait for the verdicts of one `begin`.
        replaces: groups that a verdict drops are not written, because others take their place; otherwise their rows are masked.
        overlong_filtering: as of `group_rows`.
    """

    def __init__(
        self, scorer: Any, encoder: PromptEncoder, plane: DataPlane, partition_id: str, timeout_s: float, *,
        replaces: bool, overlong_filtering: bool,
    ) -> None:  # fmt: skip
        self._scorer, self._encoder, self._plane, self._partition_id = scorer, encoder, plane, partition_id
        self._timeout_s, self._replaces, self._overlong_filtering = timeout_s, replaces, overlong_filtering
        self._pending: dict[Any, tuple[list[tuple[PromptGroup, tuple[Response, ...]]], float]] = {}

    def __len__(self) -> int:
        return sum(len(groups) for groups, _ in self._pending.values())

    def groups(self) -> tuple[PromptGroup, ...]:
        """Those that are being scored, in the order of `begin`."""
        return tuple(group for groups, _ in self._pending.values() for group, _ in groups)

    def begin(self, groups: Sequence[PromptGroup]) -> None:
        """Send groups that were completed together to the environment, in one call; does not wait."""
        if not groups:
            return
        sent = [(group, tuple(read_response(self._encoder, result) for result in group.in_order())) for group in groups]
        problems = [group.problem for group, responses in sent for _ in responses]
        ref = self._scorer.score.remote(problems, [response for _, responses in sent for response in responses])
        self._pending[ref] = sent, time.monotonic() + self._timeout_s

    def written(self, wait_s: float) -> list[Written]:
        """Write the groups that have been scored, after waiting for the first up to `wait_s` seconds. Those that are dropped come as well.

        Groups that are there together share one put: with short responses a put costs more than its bytes.

        Raises:
            ActorGoneError, ActorTimeoutError: the environment died, or is stuck. ScoringError: too many responses have no reward.
            DataPlaneError: nothing was written.
        """
        if not self._pending:
            return []
        done, _ = ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
        if done:
            done, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        scored = []
        for ref in done:
            sent, _ = self._pending.pop(ref)
            verdicts = iter(wait(ref, who=names.ENVIRONMENT, what="score", timeout_s=self._timeout_s))
            scored += [(group, responses, tuple(next(verdicts) for _ in responses)) for group, responses in sent]
        now = time.monotonic()
        if late := [sent[0][0].uid for sent, deadline in self._pending.values() if now > deadline]:
            raise ActorTimeoutError(f"score: no answer from {names.ENVIRONMENT} within {self._timeout_s:.0f} s for prompt {late[0]!r}")
        return self._write(scored)

    def _write(self, scored: Sequence[tuple[PromptGroup, tuple[Response, ...], tuple[Verdict, ...]]]) -> list[Written]:
        parts = {
            group.uid: group_rows(
                self._partition_id,
                group.reservation,
                [Trajectory.single_turn(group.prompt, result) for result in group.in_order()],
                [response.truncated for response in responses],
                verdicts,
                group.problem.source,
                overlong_filtering=self._overlong_filtering,
            )
            for group, responses, verdicts in scored
            if not (self._replaces and any(verdict.drop == "group" for verdict in verdicts))
        }
        metas: dict[str, KVBatchMeta] = {}
        if parts:
            columns = {name: [value for _, part in parts.values() for value in part[name]] for name in ROLLOUT_FIELDS}
            meta = self._plane.put(KVBatchMeta.concat([part for part, _ in parts.values()]), columns)
            start = 0
            for uid, (part, _) in parts.items():
                metas[uid] = meta.slice(start, start + len(part))
                start += len(part)
        return [Written(group, metas.get(group.uid), responses, verdicts) for group, responses, verdicts in scored]


def observe(stream: PromptStream, done: Finished) -> None:
    """Tell the curriculum how the group did; responses without a verdict on success say nothing."""
    known = [verdict.success for verdict in done.verdicts if verdict.outcome == "scored" and verdict.success is not None]
    if known:
        stream.observe(done.problem, sum(known) / len(known))
