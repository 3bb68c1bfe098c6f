"""What the ledger gives to a training step, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from actors.data_plane.meta import KVBatchMeta


class LedgerError(RuntimeError):
    """Base of the replay buffer's errors; the message names the group and what to do."""


class GroupStateError(LedgerError):
    """The buffer does not hold the group, its state does not allow the change, or the rows are not the reserved ones."""


class SamplerError(LedgerError):
    """A sampler chose a group that it must not; the message names the class and the group."""


@dataclass(frozen=True)
class Claim:
    """Groups taken for one training step.

    Attributes:
        meta: rows of the groups, group by group. version: weight version that the step trains.
        ages: age of each group, in weight versions.
    """

    uids: tuple[str, ...]
    meta: KVBatchMeta
    version: int
    ages: tuple[int, ...]
