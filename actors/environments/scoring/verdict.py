"""From the raw values of several rewards to the one reward of a response. Pure.

scored      at least one reward has an opinion, and none is below
failed      a reward raised or returned no finite number; or none has an opinion
timed_out   a reward was killed at its deadline
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from configs.rewards import AnyReward, Consequence, ScoringConfig

Outcome = Literal["scored", "timed_out", "failed"]
LARGEST_REWARD = 1e9  # with a weight of at most 1e6, sums and squares over a batch stay finite
OUTCOMES: tuple[Outcome, ...] = ("scored", "timed_out", "failed")


class ScoringError(RuntimeError):
    """Too many responses have no reward. The message names the rewards, how many, and what the last of them said."""


@dataclass(frozen=True)
class Part:
    """What one reward said of one response.

    Attributes:
        value: raw, finite; None: no opinion, or not scored. seconds: that it took. error: why it was not scored, one line.
    """

    value: float | None
    outcome: Outcome = "scored"
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """What a response is paid.

    Attributes:
        reward: weighted sum of the raw values; 0 when it is not scored.
        success: whether the response is right: of the success reward's raw value. None: that one has no opinion.
        drop: whether it is left out of training, alone or with its group.
        parts: by the reward's label.
    """

    reward: float
    outcome: Outcome
    success: bool | None
    drop: Literal["no", "sample", "group"] = "no"
    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return math.fsum(part.seconds for part in self.parts.values())

    @property
    def error(self) -> str:
        """Of the first reward that was not scored: its label and why; empty when all were."""
        return next((f"{label}: {part.error}" for label, part in self.parts.items() if part.error), "")


_DROPS: dict[Consequence, Literal["no", "sample", "group"]] = {"zero": "no", "drop_sample": "sample", "drop_group": "group"}


def part_of(value: object, seconds: float) -> Part:
    """What a reward returned, checked: a number of at most `LARGEST_REWARD`, or None; everything else is `failed`."""
    if value is None:
        return Part(None, "scored", seconds)
    shown = type(value).__name__
    if isinstance(value, bool | int | float):
        try:
            plain = float(value)
        except OverflowError:
            shown = "an integer too large for a float"
        else:
            if abs(plain) <= LARGEST_REWARD:
                return Part(plain, "scored", seconds)
            shown = repr(plain)
    return Part(None, "failed", seconds, f"returned {shown[:80]}, a finite number of at most {LARGEST_REWARD:g} or None is wanted")


def combine(parts: Mapping[str, Part], rewards: Sequence[AnyReward], config: ScoringConfig) -> Verdict:
    """The verdict on one response.

    Args:
        parts: one for each of `rewards`, by label. rewards: their weights.
    """
    worst: Outcome = max((part.outcome for part in parts.values()), key=("scored", "failed", "timed_out").index, default="failed")
    given = {label: part.value for label, part in parts.items() if part.value is not None}
    if worst == "scored" and not given:
        worst = "failed"
        parts = {label: Part(None, "failed", part.seconds, "no reward has an opinion") for label, part in parts.items()}
    if worst != "scored":
        what = config.on_timed_out if worst == "timed_out" else config.on_failed
        return Verdict(0.0, worst, False, _DROPS[what], parts)
    reward = math.fsum(reward.weight * given[reward.label] for reward in rewards if reward.label in given)
    told = [config.success] if config.success else [reward.label for reward in rewards]
    judged = next((given[label] for label in told if label in given), None)
    return Verdict(reward, "scored", None if judged is None else judged >= config.success_threshold, "no", parts)


class Tolerance:
    """Counts the last responses, and says when too many of them have no reward."""

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config
        self._last: deque[str] = deque(maxlen=config.tolerance_window)  # an error each, empty when scored

    def add(self, verdicts: Iterable[Verdict]) -> None:
        """Take verdicts in.

        Raises:
            ScoringError: more than `tolerance` of the last `tolerance_window` have no reward.
        """
        self._last += ["" if verdict.outcome == "scored" else f"{verdict.outcome}: {verdict.error}" for verdict in verdicts]
        bad = [error for error in self._last if error]
        window = self._config.tolerance_window
        if len(self._last) == window and len(bad) > self._config.tolerance * window:
            often, times = Counter(bad).most_common(1)[0]
            raise ScoringError(
                f"{len(bad)} of the last {window} responses have no reward (scoring.tolerance = {self._config.tolerance:g}); "
                f"most often ({times} times): {often}. The last: {bad[-1]}"
            )


def metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Per reward: mean of the raw values, and the fraction that was timed out, failed, or without an opinion; and of all responses.

    Returns:
        rewards/NAME/mean, /timed_out, /failed, /no_opinion; scoring/timed_out, /failed, /dropped (fractions), /slowest_s.
    """
    if not verdicts:
        return {}
    found: dict[str, float] = {}
    count = len(verdicts)
    for label in verdicts[0].parts:
        parts = [verdict.parts[label] for verdict in verdicts if label in verdict.parts]
        values = [part.value for part in parts if part.value is not None]
        if values:
            found[f"rewards/{label}/mean"] = math.fsum(values) / len(values)
        for outcome in ("timed_out", "failed"):
            found[f"rewards/{label}/{outcome}"] = sum(part.outcome == outcome for part in parts) / count
        found[f"rewards/{label}/no_opinion"] = sum(part.outcome == "scored" and part.value is None for part in parts) / count
    for outcome in ("timed_out", "failed"):
        found[f"scoring/{outcome}"] = sum(verdict.outcome == outcome for verdict in verdicts) / count
    found["scoring/dropped"] = sum(verdict.drop != "no" for verdict in verdicts) / count
    found["scoring/slowest_s"] = max(verdict.seconds for verdict in verdicts)
    return found
