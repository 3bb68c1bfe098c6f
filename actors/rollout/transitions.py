"""What can happen to a prompt group, as values: the only way in which the ledger changes, and what a journal of it would hold.

Admitted ─► Committed ─► Claimed ─► Ended("trained")
   │            ▲            │
   │            └─ Released ─┘
   └─► Cancelled ─► Ended("evicted/..")            Ended(how) may follow any of them; Announced is of the whole ledger
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from actors.data_plane.meta import KVBatchMeta


@dataclass(frozen=True)
class Admitted:
    """A place was given.

    Attributes:
        keys: under which the group's rows must be written. version: being trained when it was admitted. target_version: see `Group`.
    """

    uid: str
    keys: tuple[str, ...]
    version: int
    target_version: int | None


@dataclass(frozen=True)
class Committed:
    """All rows are written. Attributes: versions that sampled the first and the last token."""

    uid: str
    meta: KVBatchMeta
    start_version: int
    end_version: int


@dataclass(frozen=True)
class Cancelled:
    """In flight and unwanted: its writer is told to stop. Attributes: how it will end."""

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


Transition = Admitted | Committed | Cancelled | Claimed | Released | Ended | Announced


def as_json(transition: Transition) -> dict[str, Any]:
    """One JSON object: the kind, and the transition's attributes."""
    values: dict[str, Any] = TypeAdapter(type(transition)).dump_python(transition, mode="json")
    return {"kind": type(transition).__name__.lower(), **values}
