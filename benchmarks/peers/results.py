"""Results -> the tables of docs/gpu.md. Pure.

A ratio is of two runs of one turn on one lease; of step seconds the median over a run's steps counts, and the spread is over all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.learning.student import mean_95
from benchmarks.peers.jobs import ENGINES, Job, Result, Side, complete_lease
from tasks.reporting.text import ABSENT, change, estimate, number, score

LATE = range(31, 51)  # the steps whose reward is averaged
HALF = 0.5  # the reward whose first step is told


def ratios(ours: Sequence[Result], trl: Sequence[Result]) -> list[float]:
    """TRL's median step over ours, of each turn that both have."""
    theirs = {one.job.turn: statistics.median(one.steps_s) for one in trl}
    return [theirs[one.job.turn] / statistics.median(one.steps_s) for one in ours if one.job.turn in theirs]


def step_table(jobs: Sequence[Job], results: Sequence[Result]) -> list[str]:
    """Markdown: sizes and engines against TRL, of the sizes that one lease has all of."""
    lines = [
        "| size | our engines | s a step, ours | TRL | TRL / ours, turn by turn | response tokens/s, ours | TRL | peak GiB, ours | TRL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in dict.fromkeys(job.size for job in jobs if job.part == "step"):
        lease = complete_lease(jobs, results, size)
        if lease is None:
            continue
        of = [one for one in results if one.job.part == "step" and one.job.size == size and one.lease == lease]
        trl = [one for one in of if one.job.side == "trl"]
        for engines in ENGINES:
            ours = [one for one in of if one.job.side == "ours" and one.job.engines == engines]
            cells = [
                size, str(engines), _seconds(ours), _seconds(trl), ", ".join(f"{ratio:.2f}" for ratio in ratios(ours, trl)),
                _rate(size, ours), _rate(size, trl), *(f"{max(one.peak_gib for one in side):.1f}" for side in (ours, trl)),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else []


def first_step(result: Result, reward: float) -> int | None:
    """The first step whose responses had this reward on average."""
    return next((step for step, value in enumerate(result.rewards, start=1) if value >= reward), None)


def late_reward(result: Result) -> float | None:
    """Mean training reward over the steps `LATE`; None: it has not so many."""
    if len(result.rewards) < LATE[-1]:
        return None
    return statistics.fmean(result.rewards[step - 1] for step in LATE)


def learning_table(results: Sequence[Result]) -> list[str]:
    """Markdown: a line for each run."""
    runs = [one for one in results if one.job.part == "learning"]
    if not runs:
        return []
    names = (
        "weights",
        "side",
        "seed",
        f"first step with reward {HALF:g}",
        f"reward, steps {LATE[0]}–{LATE[-1]}",
        "accuracy",
        "s",
        "s of start",
    )
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for one in sorted(runs, key=lambda one: (one.job.weights, one.job.seed, one.job.side)):
        before = f"{score(one.before[0])} → " if one.before else ""
        cells = [
            one.job.weights, one.job.side, str(one.job.seed), str(first_step(one, HALF) or ABSENT), score(late_reward(one)),
            before + estimate(*one.after) if one.after else ABSENT, f"{sum(one.steps_s):.0f}", f"{one.rest_s:.0f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def learning_pairs(results: Sequence[Result]) -> list[str]:
    """Lines: ours less TRL's, paired by seed, with Student's t interval over the seeds."""
    lines = []
    for weights in dict.fromkeys(one.job.weights for one in results if one.job.part == "learning"):
        for what, value in (("reward, steps 31-50", late_reward), ("accuracy", _accuracy)):
            pairs = _paired(results, weights, value)
            if len(pairs) > 1:
                found = mean_95(pairs)
                lines.append(f"{weights}: {what}: ours less TRL's {change(found.value, found.low, found.high)}, {len(pairs)} seeds")
    return lines


def settings_lines(results: Sequence[Result]) -> list[str]:
    """What TRL ran with, a line for each different set."""
    sets = dict.fromkeys(
        f"{one.job.part} {one.job.size}: " + ", ".join(f"{name} {value}" for name, value in {**one.versions, **one.settings}.items())
        for one in results
        if one.job.side == "trl"
    )
    return [f"TRL, {line}" for line in sets]


def _paired(results: Sequence[Result], weights: str, value: Callable[[Result], float | None]) -> list[float]:
    def of(side: Side) -> dict[int, float]:
        runs = [one for one in results if one.job.part == "learning" and one.job.weights == weights and one.job.side == side]
        return {one.job.seed: found for one in runs if (found := value(one)) is not None}

    ours, trl = of("ours"), of("trl")
    return [ours[seed] - trl[seed] for seed in ours if seed in trl]


def _accuracy(result: Result) -> float | None:
    return result.after[0] if result.after else None


def _seconds(results: Sequence[Result]) -> str:
    every = [seconds for one in results for seconds in one.steps_s]
    middle = statistics.median(statistics.median(one.steps_s) for one in results)
    return f"{middle:.2f} ({min(every):.2f}–{max(every):.2f})"


def _rate(size: str, results: Sequence[Result]) -> str:
    prompts, responses, length = map(int, size.split("x"))
    return number(round(prompts * responses * length / statistics.median(statistics.median(one.steps_s) for one in results)))
