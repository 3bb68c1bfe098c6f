"""What can happen to a prompt group, as values. The ledger changes only by these, and its journal receives them.

Admitted ─► Committed ─► Claimed ─► Ended("trained")
   │            ▲            │
   │            └─ Released ─┘
   └─► Cancelled ─► Ended("evicted/..")            Ended(how) may follow any of them; Announced is of the whole ledger

After a resume, Reissued follows Admitted (or Reissued) for each group that was in flight at the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.data_plane.meta import KVBatchMeta


@dataclass(frozen=True)
class Admitted:
    """A place was given.

    Attributes:
        keys: keys of the group's rows in the data plane. version: weight version trained at admission. target_version: see `Group`.
    """

    uid: str
    keys: tuple[str, ...]
    version: int
    target_version: int | None


@dataclass(frozen=True)
class Committed:
    """All rows are written.

    Attributes:
        start_version, end_version: weight versions that sampled the first and the last token.
    """

    uid: str
    meta: KVBatchMeta
    start_version: int
    end_version: int


@dataclass(frozen=True)
class Reissued:
    """A group that was in flight at a checkpoint's cut is generated again after the resume, under the keys of its next attempt.

    Attributes:
        keys: of its rows from now on; none was minted before. version: of the oldest token that it keeps, or the present one if it keeps
            none; the group's start version until the commit. attempt: 1 for the first time.
    """

    uid: str
    keys: tuple[str, ...]
    version: int
    attempt: int


@dataclass(frozen=True)
class Cancelled:
    """In flight and unwanted: its writer is told to stop. `how`: as in `Ended`."""

    uid: str
    how: str


@dataclass(frozen=True)
class Claimed:
    """Taken by the step that trains `version`."""

    uid: str
    version: int


@dataclass(frozen=True)
class Released:
    """Given back untrained."""

    uid: str


@dataclass(frozen=True)
class Ended:
    """Gone, its rows cleared.

    Attributes:
        how: trained, failed, evicted/REASON or dropped/REASON: the name of its counter.
    """

    uid: str
    how: str


@dataclass(frozen=True)
class Announced:
    """The next step trains these weights."""

    version: int


Transition = Admitted | Reissued | Committed | Cancelled | Claimed | Released | Ended | Announced
