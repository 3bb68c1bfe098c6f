"""KVBatchMeta: what travels between tasks in place of tensors. Pure, frozen, a few KB.

rollout ── meta(keys, lengths, tags) ──► logprob ── same meta ──► train ── same meta ──► clear
                                every stage adds columns under the same keys
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, model_validator


def mint_key(weight_version: int, prompt_uid: str, index: int, attempt: int = 0) -> str:
    """The key of one sample: minted once, at rollout. Never parse it; the parts also ride in `tags`.

    Args:
        attempt: how often the group was issued again after a resume.
    """
    key = f"v{weight_version}_p{prompt_uid}_g{index}"
    return f"{key}_a{attempt}" if attempt else key


class KVBatchMeta(BaseModel, frozen=True, extra="forbid"):
    """A batch by reference.

    Attributes:
        partition_id: the data-plane partition that holds the rows.
        task_name: who made this meta (for messages and metrics).
        keys: one per sample, unique.
        fields: columns known to be written for every key.
        sequence_lengths: tokens of each sample (prompt + response), aligned with `keys`.
        tags: small plain values of each sample (reward, prompt uid, ...), aligned with `keys`.
        extra_info: values about the batch as a whole.
    """

    partition_id: str
    task_name: str = ""
    keys: tuple[str, ...]
    fields: frozenset[str] = frozenset()
    sequence_lengths: tuple[int, ...] = ()
    tags: tuple[dict[str, Any], ...] = ()
    extra_info: dict[str, Any] = {}

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        n = len(self.keys)
        if len(set(self.keys)) != n:
            doubled = next(key for key in self.keys if self.keys.count(key) > 1)
            raise ValueError(f"partition {self.partition_id!r}: key {doubled!r} occurs twice")
        for name in ("sequence_lengths", "tags"):
            given = len(getattr(self, name))
            if given not in (0, n):
                raise ValueError(f"partition {self.partition_id!r}: {given} {name} for {n} keys")
        return self

    def __len__(self) -> int:
        return len(self.keys)

    def subset(self, rows: Sequence[int]) -> KVBatchMeta:
        """The given rows, in the given order.

        Raises:
            IndexError: a row outside the batch.
        """
        # Through the constructor: a doubled row must fail here, not in the queue.
        return KVBatchMeta(
            partition_id=self.partition_id,
            task_name=self.task_name,
            keys=tuple(self.keys[row] for row in rows),
            fields=self.fields,
            sequence_lengths=tuple(self.sequence_lengths[row] for row in rows) if self.sequence_lengths else (),
            tags=tuple(self.tags[row] for row in rows) if self.tags else (),
            extra_info=self.extra_info,
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Rows start <= i < stop."""
        return self.subset(range(len(self))[start:stop])

    def with_fields(self, *fields: str) -> KVBatchMeta:
        """The same rows with more columns known."""
        return self.model_copy(update={"fields": self.fields | set(fields)})

    @staticmethod
    def claimed(
        partition_id: str, consumer: str, fields: Sequence[str], samples: Sequence[tuple[str, int | None, dict[str, Any] | None]]
    ) -> KVBatchMeta:
        """What a claim returns: of each sample its key, and its length and tags if they are known."""
        keys, lengths, tags = zip(*samples, strict=True)
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=consumer,
            keys=keys,
            fields=frozenset(fields),
            sequence_lengths=() if None in lengths else lengths,
            tags=tuple(tag or {} for tag in tags) if any(tag is not None for tag in tags) else (),
        )

    @staticmethod
    def concat(metas: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Rows of all, in order; fields known for all of them.

        Raises:
            ValueError: nothing to join, different partitions, or tags/lengths on some only.
        """
        if not metas:
            raise ValueError("concat of no metas")
        partitions = sorted({meta.partition_id for meta in metas})
        if len(partitions) > 1:
            raise ValueError(f"concat across partitions: {', '.join(map(repr, partitions))}")
        filled = [meta for meta in metas if len(meta)] or list(metas[:1])
        return KVBatchMeta(
            partition_id=partitions[0],
            task_name=filled[0].task_name,
            keys=tuple(key for meta in filled for key in meta.keys),
            fields=frozenset.intersection(*(meta.fields for meta in filled)),
            sequence_lengths=tuple(n for meta in filled for n in meta.sequence_lengths),
            tags=tuple(tag for meta in filled for tag in meta.tags),
            extra_info=filled[0].extra_info,
        )
