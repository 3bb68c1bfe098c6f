"""From complete groups to rows in the data plane, while others are still being generated.

begin(groups) ──texts──► EnvironmentActor ──rewards──► written(): one put for the groups whose rewards came together ──► Written
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
from actors.rollout.assemble import group_rows
from actors.rollout.in_flight import PromptGroup
from actors.rollout.prompts import PromptEncoder
from actors.rollout.samples import Sample
from actors.waiting import ActorTimeoutError, wait


@dataclass(frozen=True)
class Written:
    """A group whose rows are in the data plane.

    Attributes:
        meta: its rows, in the order of its responses. texts, rewards: of each response.
    """

    group: PromptGroup
    meta: KVBatchMeta
    texts: tuple[str, ...]
    rewards: tuple[float, ...]


class Scoring:
    """Groups between their last token and the data plane. Call from one thread.

    Args:
        scorer: handle of the environment actor.
        timeout_s: longest wait for the rewards of one `begin`.
    """

    def __init__(self, scorer: Any, encoder: PromptEncoder, plane: DataPlane, partition_id: str, timeout_s: float) -> None:
        self._scorer, self._encoder, self._plane, self._partition_id = scorer, encoder, plane, partition_id
        self._timeout_s = timeout_s
        self._pending: dict[Any, tuple[list[tuple[PromptGroup, tuple[str, ...]]], float]] = {}

    def __len__(self) -> int:
        return sum(len(groups) for groups, _ in self._pending.values())

    def begin(self, groups: Sequence[PromptGroup]) -> None:
        """Send groups that were completed together to the environment, in one call; does not wait."""
        if not groups:
            return
        sent = [(group, tuple(self._encoder.text(result.token_ids) for result in group.in_order())) for group in groups]
        problems = [group.problem for group, texts in sent for _ in texts]
        ref = self._scorer.score.remote(problems, [text for _, texts in sent for text in texts])
        self._pending[ref] = sent, time.monotonic() + self._timeout_s

    def written(self, wait_s: float) -> list[Written]:
        """Write the groups that have been scored, after waiting for the first up to `wait_s` seconds.

        Groups that are there together share one put: with short responses a put costs more than its bytes.

        Raises:
            ActorGoneError, ActorTimeoutError: the environment died, or a verifier is stuck. DataPlaneError: nothing was written.
        """
        if not self._pending:
            return []
        done, _ = ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
        if done:
            done, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        scored = []
        for ref in done:
            sent, _ = self._pending.pop(ref)
            rewards = iter(wait(ref, who=names.ENVIRONMENT, what="score", timeout_s=self._timeout_s))
            scored += [(group, texts, tuple(next(rewards) for _ in texts)) for group, texts in sent]
        now = time.monotonic()
        if late := [sent[0][0].uid for sent, deadline in self._pending.values() if now > deadline]:
            raise ActorTimeoutError(f"score: no answer from {names.ENVIRONMENT} within {self._timeout_s:.0f} s for prompt {late[0]!r}")
        return self._write(scored)

    def _write(self, scored: Sequence[tuple[PromptGroup, tuple[str, ...], tuple[float, ...]]]) -> list[Written]:
        if not scored:
            return []
        rows = [
            group_rows(self._partition_id, group.reservation.version, group.uid, group.prompt, group.in_order(), rewards)
            for group, _, rewards in scored
        ]
        columns = {name: [value for _, part in rows for value in part[name]] for name in rows[0][1]}
        meta = self._plane.put(KVBatchMeta.concat([part for part, _ in rows]), columns)
        starts = [0]
        for part, _ in rows:
            starts.append(starts[-1] + len(part))
        return [
            Written(group, meta.slice(start, stop), texts, rewards)
            for (group, texts, rewards), start, stop in zip(scored, starts, starts[1:], strict=False)
        ]


def shown(written: Written) -> Sample:
    """The group's first response, for a person."""
    return Sample.of(written.group.problem, written.texts[0], written.rewards[0], written.meta.tags[0]["start_version"])
