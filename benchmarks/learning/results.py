"""A run's directory -> a row; rows -> the tables of docs/algorithms.md. Pure but for reading the run's files.

Differences are paired by seed: runs of one seed draw the same prompts and are validated on the same problems.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from actors.rollout.statistics import Estimate
from benchmarks.learning.student import mean_95
from configs.run import RunConfig
from configs.validation import OWN_SET
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step, series
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.text import ABSENT, change, estimate, score

_ACCURACY = f"accuracy/{OWN_SET}"


def reward_metric(config: RunConfig) -> str:
    """The metric of what the reward that judges answers gave, before weights, further rewards and any choice among groups.

    `reward/mean` is of what a step trains on: with dynamic sampling of the groups that are left, and with all that a preset pays.
    """
    return f"rewards/{config.scoring.success or config.paid[0].label}/mean"


class Plan(BaseModel, frozen=True, extra="forbid"):
    """What makes two runs the same run.

    Attributes:
        start: digest of the weights it starts from; empty: the recipe's own model. overrides: of the recipe, in their order.
    """

    recipe: str
    preset: str
    seed: int
    steps: int
    start: str
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What makes this row, and the start where there is none yet."""
        words = ["python -m benchmarks.learning", f"--recipe {self.recipe}", f"--presets {self.preset}", f"--seeds {self.seed}"]
        return " ".join([*words, f"--steps {self.steps}", *(f"'{one}'" if " " in one else one for one in self.overrides)])


class Row(BaseModel, frozen=True, extra="forbid"):
    """One run that was completed: a line of rows.jsonl.

    Attributes:
        rewards: of each step, the mean over all responses of what the verifier alone gave (`reward_metric`).
        before, after: validation accuracy with its 95 % interval (Wilson's where each problem has one answer): value, low, high.
        seconds: of the steps. wall_s: of the process, start and validation included. device: where it ran.
    """

    plan: Plan
    rewards: tuple[float, ...]
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    seconds: float
    wall_s: float
    device: str

    @classmethod
    def of(cls, plan: Plan, directory: RunDirectory, wall_s: float, device: str, reward: str) -> Row:
        """Of a completed run. Args: reward: name of the metric that gives `rewards`.

        Raises:
            ValueError: it has not all of its steps, or no validation after the last.
        """
        rows = by_step(read_lines(directory.metrics))
        rewards, seconds = dict(series(rows, reward)), dict(series(rows, "time/step"))
        bounds = [dict(series(rows, name)) for name in (_ACCURACY, f"{_ACCURACY}/low", f"{_ACCURACY}/high")]
        steps = range(1, plan.steps + 1)
        if missing := [step for step in steps if step not in rewards]:
            raise ValueError(f"{directory.metrics}: no {reward} of step {missing[0]}")
        if missing := [step for step in (0, plan.steps) if any(step not in one for one in bounds)]:
            raise ValueError(f"{directory.metrics}: no validation after step {missing[0]}")
        before, after = (tuple(round(one[step], 4) for one in bounds) for step in (0, plan.steps))
        return cls(
            plan=plan, rewards=tuple(round(rewards[step], 4) for step in steps), before=before, after=after,
            seconds=round(sum(seconds[step] for step in steps), 1), wall_s=round(wall_s, 1), device=device,
        )  # fmt: skip

    @property
    def reward(self) -> float:
        """Mean over the steps: high where learning was early."""
        return statistics.fmean(self.rewards)

    def steps_to(self, reward: float) -> int | None:
        """The first step whose responses had this reward on average."""
        return next((step for step, value in enumerate(self.rewards, start=1) if value >= reward), None)


def steps_or_more(row: Row, reward: float) -> int:
    """`Row.steps_to`; a run that never got there counts as one step more than it has, so its difference is a bound."""
    return row.steps_to(reward) or len(row.rewards) + 1


def differences(rows: Sequence[Row], base: str, value: Callable[[Row], float]) -> dict[str, tuple[int, Estimate]]:
    """By preset: how many seeds it shares with preset `base`, and the mean over them of (its value - that of `base`), by t."""
    of_base = {row.plan.seed: value(row) for row in rows if row.plan.preset == base}
    found: dict[str, tuple[int, Estimate]] = {}
    for preset in dict.fromkeys(row.plan.preset for row in rows):
        pairs = [value(row) - of_base[row.plan.seed] for row in rows if row.plan.preset == preset and row.plan.seed in of_base]
        if preset != base and pairs:
            found[preset] = len(pairs), mean_95(pairs)
    return found


def runs_table(rows: Sequence[Row], reach: float) -> list[str]:
    """Markdown: a line for each run, and its command; empty without any."""
    if not rows:
        return []
    lines = [
        f"| preset | seed | first step with reward {reach:g} | mean reward | accuracy | s | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"`{row.plan.preset}`", str(row.plan.seed), str(row.steps_to(reach) or ABSENT), score(row.reward),
            f"{score(row.before[0])} → {estimate(*row.after)}", f"{row.seconds:.0f}", f"`{row.plan.command}`",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def pairs_table(rows: Sequence[Row], base: str, reach: float) -> list[str]:
    """Markdown: each preset against `base`, paired by seed; empty where there is nothing to pair."""
    accuracy = differences(rows, base, lambda row: row.after[0])
    rewards = differences(rows, base, lambda row: row.reward)
    steps = differences(rows, base, lambda row: steps_or_more(row, reach))
    if not accuracy:
        return []
    head = f"| against `{base}` | seeds | accuracy | mean reward | first step with reward {reach:g} |"
    lines = [head, "|---|---|---|---|---|"]
    for preset, (seeds, found) in accuracy.items():
        cells = [f"`{preset}`", str(seeds), _with_bounds(found), _with_bounds(rewards[preset][1]), _with_bounds(steps[preset][1], "+.1f")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def summary(rows: Sequence[Row], reach: float) -> Mapping[str, Any]:
    """By preset, means over its seeds."""
    found = {}
    for preset in dict.fromkeys(row.plan.preset for row in rows):
        of = [row for row in rows if row.plan.preset == preset]
        found[preset] = {
            "seeds": [row.plan.seed for row in of],
            "steps_to": [row.steps_to(reach) for row in of],
            "reward": round(statistics.fmean(row.reward for row in of), 4),
            "accuracy": round(statistics.fmean(row.after[0] for row in of), 4),
            "seconds": round(statistics.fmean(row.seconds for row in of), 1),
        }
    return found


def _with_bounds(found: Estimate, spec: str = "") -> str:
    one = found.high == float("inf")
    if spec:
        return format(found.value, spec) + ("" if one else f" [{found.low:.1f}, {found.high:.1f}]")
    return change(found.value) if one else change(found.value, found.low, found.high)
