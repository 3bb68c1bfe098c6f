"""Which responses took long to score, and which could not be scored: slowest.jsonl, and what a person sees of it.

write(step, phase, slowest)
  └─► {"step": 3, "phase": "train", "uid": "gsm8k:17", "label": "math", "seconds": 10.0, "outcome": "timed_out", "error": "..."}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.reporting.jsonl import LinesWriter
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.samples import Phase
from tasks.reporting.text import duration, visible

if TYPE_CHECKING:
    from actors.rollout.samples import SlowSample

_SHOWN = 10


class SlowestWriter(LinesWriter):
    """Appends to slowest.jsonl: {step, phase, uid, label, seconds, outcome, error} per line. A context manager."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory.slowest)

    def write(self, step: int, phase: Phase, slowest: Iterable[SlowSample]) -> None:
        """One line each, on disk when the call returns. Seconds that are not finite are written as 0."""
        for one in slowest:
            self.append(slow_row(step, phase, one))


def slow_row(step: int, phase: Phase, one: SlowSample) -> dict[str, Any]:
    """A line of slowest.jsonl."""
    found = {key: getattr(one, key) for key in ("uid", "label", "seconds", "outcome", "error")}
    return {"step": step, "phase": phase, **found, "seconds": one.seconds if math.isfinite(one.seconds) else 0.0}


def slowest_first(rows: Sequence[dict[str, Any]], count: int = _SHOWN) -> list[dict[str, Any]]:
    """The `count` lines of most seconds, of equal ones the earliest."""
    return sorted(rows, key=lambda row: -row["seconds"])[:count]


@dataclass(frozen=True)
class Failure:
    """Responses that were not scored for one reason.

    Attributes:
        count: lines of slowest.jsonl, which has only a few of each step. step, uid: of the first.
    """

    label: str
    outcome: str
    error: str
    count: int
    step: int
    uid: str


def failures(rows: Sequence[dict[str, Any]], count: int = _SHOWN) -> list[Failure]:
    """Why responses were not scored, the commonest reasons first."""
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["outcome"] != "scored":
            grouped.setdefault((row["label"], row["outcome"], row["error"]), []).append(row)
    found = [Failure(*why, len(group), group[0]["step"], group[0]["uid"]) for why, group in grouped.items()]
    return sorted(found, key=lambda one: -one.count)[:count]


def slowest_rows(rows: Sequence[dict[str, Any]], count: int = _SHOWN) -> list[dict[str, str]]:
    """`slowest_first` as rows of a table in the Prefect UI."""
    return [
        {
            "step": str(row["step"]),
            "phase": str(row["phase"]),
            "problem": visible(row["uid"]),
            "reward": visible(row["label"]),
            "took": duration(row["seconds"]),
            "outcome": outcome(row["outcome"]),
            "error": visible(row["error"]),
        }
        for row in slowest_first(rows, count)
    ]


def outcome(name: str) -> str:
    """In words: timed out."""
    return name.replace("_", " ")
