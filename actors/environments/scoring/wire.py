"""What goes between the pool and its processes: pickled calls downwards, JSON upwards.

A scoring process may be under the control of a response, so nothing that comes from it is ever unpickled, and what it sends is bounded.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import LARGEST_REWARD, OUTCOMES, Part

_LENGTH = struct.Struct("!I")
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


def send_calls(to: socket.socket, calls: list[Call]) -> None:
    """Raises: OSError, TimeoutError (of the socket)."""
    data = pickle.dumps(calls, protocol=pickle.HIGHEST_PROTOCOL)
    to.sendall(_LENGTH.pack(len(data)) + data)


def receive_calls(of: socket.socket) -> list[Call] | None:
    """The next calls; None: the pool has closed. For the process alone."""
    head = _exactly(of, _LENGTH.size)
    if head is None:
        return None
    body = _exactly(of, _LENGTH.unpack(head)[0])
    if body is None:
        return None
    calls: list[Call] = pickle.loads(body)
    return calls


def message(**values: Any) -> bytes:
    """One line upwards."""
    return json.dumps(values).encode() + b"\n"


def part_message(number: int, part: Part) -> bytes:
    """What one call came to."""
    return message(call=number, value=part.value, outcome=part.outcome, seconds=part.seconds, error=one_line(part.error))


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
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_REWARD
    if not (value is None or is_number) or outcome not in OUTCOMES or not isinstance(error, str) or not isinstance(seconds, int | float):
        raise WireError("a malformed answer")
    return Part(None if value is None else float(value), outcome, float(seconds), one_line(error))


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
        if len(self._rest) > _LONGEST_ANSWER:
            raise WireError("an endless answer")
        return [self._parse(line) for line in lines]

    @staticmethod
    def _parse(line: bytes) -> dict[str, Any]:
        if len(line) > _LONGEST_ANSWER:
            raise WireError("an endless answer")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise WireError("an answer that is not JSON") from None
        if not isinstance(found, dict):
            raise WireError("an answer that is no JSON object")
        return found


def _exactly(of: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = of.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
