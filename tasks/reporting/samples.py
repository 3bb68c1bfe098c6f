"""What the model says: prompts, responses and rewards in words, before, during and after training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

from tasks.reporting.jsonl import LinesWriter
from tasks.reporting.run_dir import RunDirectory

# before, validation, after: greedy answers to held-out prompts; train: what the policy learnt from.
Phase = Literal["before", "train", "validation", "after"]


class Sample(Protocol):
    """One response as a person reads it."""

    @property
    def prompt(self) -> str: ...
    @property
    def response(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def weight_version(self) -> int: ...
    @property
    def uid(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def success(self) -> bool | None: ...
    @property
    def outcome(self) -> str: ...
    @property
    def rewards(self) -> Mapping[str, float | None]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def seconds(self) -> float: ...
    @property
    def error(self) -> str: ...


class SamplesWriter(LinesWriter):
    """Appends lines to samples.jsonl, as `as_row` makes them. A context manager."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory.samples)

    def write(self, step: int, phase: Phase, samples: Iterable[Sample]) -> None:
        """One line per sample, on disk when the call returns. A reward that is not finite is written as null."""
        for sample in samples:
            self.append(as_row(step, phase, sample))


def as_row(step: int, phase: Phase, sample: Sample) -> dict[str, Any]:
    """A line of samples.jsonl; keys after weight_version are missing in directories of older runs."""
    return {
        "step": step,
        "phase": phase,
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": sample.answer,
        "reward": _finite(sample.reward),
        "weight_version": sample.weight_version,
        "uid": sample.uid,
        "source": sample.source,
        "success": sample.success,
        "outcome": sample.outcome,
        "rewards": {label: _finite(value) for label, value in sample.rewards.items()},
        "tokens": sample.tokens,
        "truncated": sample.truncated,
        "error": sample.error,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
