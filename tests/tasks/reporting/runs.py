"""A synthetic run for the tests of the reporting: what a real one writes, in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.slowest import SlowestWriter
from tasks.reporting.summary import Summary
from tasks.reporting.trackers.run_trackers import RunTrackers

STAGES = {"rollout": 1.0, "logprob": 0.25, "ref_logprob": 0.25, "advantage": 0.01, "train": 0.75, "refit": 0.05}


@dataclass(frozen=True)
class Said:
    prompt: str
    response: str
    answer: str
    reward: float
    weight_version: int = 0
    uid: str = ""
    source: str = ""
    success: bool | None = None
    outcome: str = "scored"
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    tokens: int = 1
    truncated: bool = False
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Slow:
    uid: str
    label: str
    seconds: float
    outcome: str = "scored"
    error: str = ""


def step_metrics(step: int) -> dict[str, float]:
    """One step's metrics, under the names that the flow uses."""
    return {
        "reward/mean": step / 10,
        "loss": -0.001 * step,
        "kl": 0.0005 * step,
        "logprob_error/mean": 2e-6,
        "logprob_error/max": 5e-5,
        "tokens": 2000,
        "tokens_per_s": 800.0,
        **{f"time/{stage}": seconds for stage, seconds in STAGES.items()},
        "time/step": 2.5,
        "weight_version": step,
    }


def summary(**changes: Any) -> Summary:
    """A summary with every field set, but for what the test changes."""
    values: dict[str, Any] = {
        "flow": "grpo",
        "name": "tiny",
        "recipe": "arithmetic-cpu",
        "seed": 7,
        "status": "completed",
        "steps": 4,
        "seconds": 75.5,
        "tokens": 8000,
        "weight_version": 4,
        "reward_before": 0.25,
        "reward_after": 0.75,
        "accuracy_before": 0.125,
        "accuracy_after": 0.875,
        "seconds_per_stage": {"launch": 60.0, "rollout": 4.0, "train": 6.0},
        "mean_logprob_error": 2e-6,
    }
    return Summary(**values | changes)


def sft_summary(**changes: Any) -> Summary:
    """The same of an `sft` run."""
    values: dict[str, Any] = {
        "flow": "sft",
        "name": "taught",
        "recipe": "sft-cpu",
        "seed": 7,
        "status": "completed",
        "stopped_because": "early_stop",
        "steps": 4,
        "seconds": 75.5,
        "tokens": 8000,
        "validation_loss_before": 5.25,
        "validation_loss_after": 1.5,
        "validation_loss_best": 1.25,
        "best_step": 2,
        "mean_tflops_per_worker": 0.0125,
        "seconds_per_stage": {"launch": 60.0, "batch": 1.0, "train": 9.0},
    }
    return Summary(**values | changes)


def write_sft_run(output_dir: Path, steps: int = 4) -> RunDirectory:
    """A finished `sft` run, validated before, after two steps and at the end."""
    directory = RunDirectory.create(output_dir, "taught")
    directory.config.write_text("flow: sft\n")
    with RunTrackers(directory) as run:
        run.metrics(0, {"loss/validation": 5.25, "time/validate": 0.5})
        for step in range(1, steps + 1):
            values = {
                "loss": 5.0 / step,
                "grad_norm": 1.0,
                "tokens": 2000,
                "tokens_per_s": 800.0,
                "tflops": 0.02,
                "tflops_per_worker": 0.0125,
            }
            run.metrics(step, values | {"time/batch": 0.25, "time/train": 2.0, "time/step": 2.5})
        run.metrics(2, {"loss/validation": 1.25, "time/validate": 0.5, "time/checkpoint": 0.25})
        run.metrics(steps, {"loss/validation": 1.5, "time/validate": 0.5})
    sft_summary(steps=steps).write(directory)
    return directory


def write_run(output_dir: Path, steps: int = 4, question: str = "1 + 2 = ?", said: str = "4") -> RunDirectory:
    """A finished run: validation before and after, `steps` steps in between, summary and configuration."""
    directory = RunDirectory.create(output_dir, "tiny")
    directory.config.write_text("name: tiny\nsteps: 4\n")
    with RunTrackers(directory) as run:
        run.metrics(0, {"accuracy/validation": 0.125, "reward/validation": 0.25, "time/validate": 0.5})
        run.samples(0, "before", [Said(question, said, "3", 0.0)])
        for step in range(1, steps + 1):
            run.metrics(step, step_metrics(step))
            run.samples(step, "train", [Said(question, f"sampled at {step}", "3", 1.0, step)])
        run.metrics(steps, {"accuracy/validation": 0.875, "reward/validation": 0.75, "time/validate": 0.5})
        run.samples(steps, "after", [Said(question, "3", "3", 1.0, steps)])
    summary(steps=steps).write(directory)
    return directory


def validation_metrics(name: str, accuracy: float, sources: tuple[str, ...] = ()) -> dict[str, float]:
    """One set's metrics, under the names that `Validation.metrics` uses."""
    return {
        f"accuracy/{name}": accuracy,
        f"accuracy/{name}/low": max(0.0, accuracy - 0.0625),
        f"accuracy/{name}/high": min(1.0, accuracy + 0.0625),
        **{f"accuracy/{name}/{source}": accuracy + shift for source, shift in zip(sources, (0.125, -0.125), strict=False)},
        f"reward/{name}": accuracy / 2,
        f"pass@1/{name}": accuracy,
        f"pass@4/{name}": accuracy + 0.05,
        f"mean@4/{name}": accuracy,
        f"length/{name}": 100 + 40 * accuracy,
        f"truncated/{name}": 0.25 - accuracy / 4,
        f"timed_out/{name}": 0.0,
        f"failed/{name}": 0.0,
        f"no_opinion/{name}": 0.0,
    }


SETS: dict[str, dict[str, tuple[float, float, float]]] = {
    "validation": {"before": (0.25, 0.1875, 0.3125), "after": (0.75, 0.6875, 0.8125), "gain": (0.5, 0.41, 0.59)},
    "gsm8k": {"before": (0.125, 0.0625, 0.1875), "after": (0.375, 0.3125, 0.4375), "gain": (0.25, 0.15, 0.35)},
}


def write_scored_run(
    output_dir: Path, said: str = "4", error: str = "no answer within 10 s", uid: str = "gsm8k:17", steps: int = 4
) -> RunDirectory:
    """A finished run with two rewards, of which one hangs now and then, and two validation sets, one of two sources."""
    directory = RunDirectory.create(output_dir, "scored")
    directory.config.write_text("name: scored\n")
    values: dict[str, float | None] = {"math": 1.0, "length": -0.5}
    with RunTrackers(directory) as run, SlowestWriter(directory) as slowest:
        for step in range(steps + 1):
            if step in (0, steps):
                share = 0.25 + 0.5 * bool(step)
                run.metrics(step, validation_metrics("validation", share, ("arithmetic", "text")) | validation_metrics("gsm8k", share / 2))
                run.samples(step, "after" if step else "before", [Said("p", said, "3", 0.5, step, uid, rewards=values, truncated=not step)])
            if step:
                scoring = {"math/mean": step / 8, "math/timed_out": 0.125, "math/failed": 0.0, "math/no_opinion": 0.0}
                scoring |= {"length/mean": -step / 8, "length/timed_out": 0.0, "length/failed": 0.0625, "length/no_opinion": 0.25}
                found = {f"rewards/{name}": value for name, value in scoring.items()}
                found |= {"scoring/timed_out": 0.125, "scoring/failed": 0.0625, "scoring/dropped": 0.0, "scoring/slowest_s": 10.0 + step}
                run.metrics(step, step_metrics(step) | found)
                run.samples(step, "train", [Said("p", said, "3", 0.0, step, uid, outcome="timed_out", error=error, rewards=values)])
                slowest.write(step, "train", [Slow(uid, "math", 10.0 + step, "timed_out", error), Slow("gsm8k:2", "length", 0.5)])
    summary(name="scored", accuracy_before=0.25, accuracy_after=0.75, sets=SETS, timed_out=0.125, failed=0.0625).write(directory)
    return directory
