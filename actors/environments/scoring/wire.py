"""What goes between the pool and its processes: pickled calls downwards, JSON upwards.

A scoring process may be under the control of a response, so nothing that comes from it is ever unpickled, and what it sends is bounded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeGuard

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import LARGEST_REWARD, OUTCOMES, Part

_LONGEST_ANSWER = 64 * 1024  # bytes of one JSON message
_LONGEST_ERROR = 300  # characters


@dataclass(frozen=True)
class Call:
    """One reward of one response. `number` is unique within a pool."""

    number: int
    label: str
    problem: Problem
    response: Response


class WireError(RuntimeError):
    """A process sent something that is no message."""


def message(**values: Any) -> bytes:
    """One line upwards."""
    return json.dumps(values).encode() + b"\n"


def one_line(text: str) -> str:
    """Bounded, printable, and encodable."""
    line = " ".join(text[: 4 * _LONGEST_ERROR].split())
    return "".join(c if c.isprintable() else "?" for c in line)[:_LONGEST_ERROR]


def read_part(values: dict[str, Any]) -> Part:
    """The part in a message.

    Raises:
        WireError: it holds none.
    """
    value, outcome, seconds, error = (values.get(name) for name in ("value", "outcome", "seconds", "error"))
    if not (value is None or _is_number(value)) or outcome not in OUTCOMES or not isinstance(error, str) or not _is_number(seconds):
        raise WireError("a malformed answer")
    return Part(None if value is None else float(value), outcome, float(seconds), one_line(error))


def _is_number(value: Any) -> TypeGuard[float]:
    """Finite, and small enough for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_REWARD


class Lines:
    """Messages of one process, from the bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete now.

        Raises:
            WireError: too long, or no JSON object.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > _LONGEST_ANSWER for line in (*lines, self._rest)):
            raise WireError("an endless answer")
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise WireError("an answer that is not JSON") from None
        if not all(isinstance(values, dict) for values in found):
            raise WireError("an answer that is no JSON object")
        return found
