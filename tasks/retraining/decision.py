"""Whether the new model takes the old one's place. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import BaseModel

from configs.retrain import PromotionConfig

_ROUNDING = 1e-9  # 0.6 - 0.59 is not 0.01 in floating point


class Scores(BaseModel, frozen=True, extra="forbid"):
    """Of one model on the frozen set."""

    accuracy: float
    reward: float


@dataclass(frozen=True)
class Verdict:
    """What becomes of the new model, and why, in a sentence."""

    promote: bool
    reason: str


def decide(old: Scores, new: Scores, config: PromotionConfig) -> Verdict:
    """Promote if the metric rose, and by the margin at least. A score that is not a number never wins."""
    before, after = getattr(old, config.metric), getattr(new, config.metric)
    moved = f"{config.metric} {before:.4f} -> {after:.4f}"
    if not (math.isfinite(before) and math.isfinite(after)):
        return Verdict(promote=False, reason=f"{moved}: not a number")
    gain = after - before
    if abs(gain) <= _ROUNDING:
        return Verdict(promote=False, reason=f"{moved}: no better")
    if gain < 0:
        return Verdict(promote=False, reason=f"{moved}: worse by {-gain:.4f}")
    if gain < config.margin - _ROUNDING:
        return Verdict(promote=False, reason=f"{moved}: better by {gain:.4f}, less than the margin of {config.margin:g}")
    return Verdict(promote=True, reason=f"{moved}: better by {gain:.4f}, the margin is {config.margin:g}")
