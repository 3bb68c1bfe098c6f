"""What the model says: prompts, responses and rewards in words, before, during and after training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from actors.rollout.samples import Sample

# before, validation, after: greedy answers to held-out prompts; train: what the policy learnt from.
Phase = Literal["before", "train", "validation", "after"]
_KEYS = (
    "prompt", "response", "answer", "reward", "weight_version", "uid", "source", "success", "outcome", "rewards", "tokens", "truncated",
    "error",
)  # fmt: skip


def as_row(step: int, phase: Phase, sample: Sample) -> dict[str, Any]:
    """A line of samples.jsonl; keys after weight_version are missing in directories of older runs."""
    rewards = {label: _finite(value) for label, value in sample.rewards.items()}
    texts = {key: getattr(sample, key) for key in _KEYS}
    return {"step": step, "phase": phase, **texts, "reward": _finite(sample.reward), "rewards": rewards}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
