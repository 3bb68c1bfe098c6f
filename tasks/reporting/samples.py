"""What the model says: prompts, responses and rewards in words, before, during and after training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from tasks.reporting.jsonl import LinesWriter
from tasks.reporting.run_dir import RunDirectory

if TYPE_CHECKING:
    from actors.rollout.samples import Sample

# before, validation, after: greedy answers to held-out prompts; train: what the policy learnt from.
Phase = Literal["before", "train", "validation", "after"]
_KEYS = (
    "prompt", "response", "answer", "reward", "weight_version", "uid", "source", "success", "outcome", "rewards", "tokens", "truncated",
    "error",
)  # fmt: skip


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
    rewards = {label: _finite(value) for label, value in sample.rewards.items()}
    texts = {key: getattr(sample, key) for key in _KEYS}
    return {"step": step, "phase": phase, **texts, "reward": _finite(sample.reward), "rewards": rewards}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
