"""Which weights sampled which token. Pure: no vLLM, no clock of its own.

    loaded(version 1, at=2.0)        loaded(version 2, at=5.0)
    ──────────┬──────────────────────────┬──────────────► time of a step's outputs, read where the step ran
      version 0         version 1               version 2

vLLM stamps the outputs of each step when it makes them. No step runs while weights are loaded, so every token that is stamped before
the moment at which the engine stood still came from the weights before, and every later one from those after: also tokens that were
still on their way between two processes then. Both processes must share a host (CLOCK_MONOTONIC is one for all of them).
"""

from __future__ import annotations

from bisect import bisect_right

Segments = tuple[tuple[int, int], ...]  # (weight version, number of tokens), in the order of the tokens


class TokenVersions:
    """Segments of the requests that run. One writer at a time."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._versions = [0]  # _versions[i + 1] from _times[i] on
        self._segments: dict[str, Segments] = {}

    @property
    def current(self) -> int:
        """The version that was loaded last; 0 before any."""
        return self._versions[-1]

    def loaded(self, version: int, at: float) -> None:
        """Tokens stamped `at` or later (seconds, monotonic) come from `version`. Updates come in the order of time."""
        self._times.append(at)
        self._versions.append(version)

    def sampled(self, request_id: str, count: int, at: float) -> None:
        """A step that ended at `at` gave the request `count` more tokens."""
        version = self._versions[bisect_right(self._times, at)]
        segments = self._segments.get(request_id, ())
        if segments and segments[-1][0] == version:
            segments, count = segments[:-1], segments[-1][1] + count
        if count:
            self._segments[request_id] = (*segments, (version, count))

    def pop(self, request_id: str) -> Segments:
        """The request's segments, which are forgotten here. Empty if it has no token."""
        return self._segments.pop(request_id, ())
