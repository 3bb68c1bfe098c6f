"""What guards make of a step: pure, a state machine over the steps' metrics.

    trainer: no update, `guard/NAME` = 1 ──► see(step, metrics) ──► skip | lower_rate | roll_back | stop
    rewards of the step ──► before_training ──► trip: the step is not trained

A run that goes back to a checkpoint forgets what it knew of the steps after it, but for two things: how often guards have tripped, and
which steps made it go back. Such a step is skipped should it trip again, since a synchronous run comes to the same one.

The trainer decides whether an update is made (`actors/policy/worker.py`), since only it can see gradients before they are applied.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from actors.policy.limits import guard_of, tripped
from configs.guards import Action, Guard, GuardsConfig


class GuardError(RuntimeError):
    """A guard ends the run. The message names it, the step and the value."""


class RollBackError(RuntimeError):
    """A guard wants the run to go back to its newest checkpoint."""


@dataclass(frozen=True)
class Trip:
    """A guard that tripped. `line`: for a person."""

    guard: str
    action: Action
    line: str


class GuardsState(BaseModel):
    """What is known of the steps so far; part of a checkpoint.

    Attributes:
        rewards: mean rewards of the last steps. skipped: steps in a row. tripped: how often, by guard. rate: of the learning rate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rewards: tuple[float, ...] = ()
    skipped: int = 0
    tripped: dict[str, int] = {}
    rate: float = 1.0


class Guards:
    """The guards of one run."""

    def __init__(self, config: GuardsConfig) -> None:
        self._config, self.state = config, GuardsState()
        self._metrics = {guard_of(metric): metric for metric in config.limits}
        self._went_back: set[tuple[str, int]] = set()  # guards and steps

    def go_on_from(self, state: GuardsState) -> None:
        """The state of a checkpoint, or the one before the first step; what has tripped so far is not forgotten."""
        self.state = state.model_copy(update={"tripped": dict(Counter(state.tripped) | Counter(self.state.tripped))})

    def before_training(self, step: int, metrics: Mapping[str, float]) -> Trip | None:
        """Whether the step's mean reward jumps. Once for each step, which is remembered unless it does."""
        jump, reward = self._config.reward_jump, metrics.get("reward/mean")
        if jump is None or reward is None:
            return None
        rewards = self.state.rewards
        if len(rewards) == jump.window:
            mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
            if abs(reward - mean) > max(jump.deviations * deviation, jump.at_least):
                return self._trip("reward_jump", jump, step, f"mean reward {reward:.3g}, {mean:.3g} before")
        self.state = self.state.model_copy(update={"rewards": (*rewards, reward)[-jump.window :]})
        return None

    def see(self, step: int, metrics: Mapping[str, float]) -> Trip | None:
        """What to do about the guards that tripped in the trainer: the gravest action of them; None: none did.

        It is to stop also when too many steps in a row were skipped.
        """
        names = tripped(metrics)
        if not names:
            self.state = self.state.model_copy(update={"skipped": 0})
            return None
        order: list[Action] = ["skip", "lower_rate", "roll_back", "stop"]
        gravest = max(names, key=lambda name: order.index(self._guard(name).action))
        metric = self._metrics.get(gravest)
        value = f"{metric} {metrics.get(metric, math.nan):.4g}" if metric else "the loss or a gradient is not finite"
        return self._trip(gravest, self._guard(gravest), step, value)

    def lowered(self) -> float:
        """The factor of the learning rate, after one more lowering."""
        self.state = self.state.model_copy(update={"rate": self.state.rate * self._config.factor})
        return self.state.rate

    def _guard(self, name: str) -> Guard:
        found: Guard = getattr(self._config, name)
        return found

    def _trip(self, name: str, guard: Guard, step: int, value: str) -> Trip:
        skipped = self.state.skipped + 1
        counts = self.state.tripped | {name: self.state.tripped.get(name, 0) + 1}
        self.state = self.state.model_copy(update={"skipped": skipped, "tripped": counts})
        line = f"guard {name}: step {step}: {value}; no update was made"
        if guard.action == "stop":
            return Trip(name, "stop", f"{line} (guards.{name}.action is stop)")
        if guard.action == "roll_back" and (name, step) not in self._went_back:
            self._went_back.add((name, step))
            return Trip(name, "roll_back", f"{line} (roll_back)")
        if skipped >= self._config.in_a_row:
            return Trip(name, "stop", f"{line}, as in the {skipped - 1} steps before (guards.in_a_row = {self._config.in_a_row})")
        if guard.action == "roll_back":
            return Trip(name, "skip", f"{line} (skip: the run has gone back once for this step)")
        return Trip(name, guard.action, f"{line} ({guard.action})")
