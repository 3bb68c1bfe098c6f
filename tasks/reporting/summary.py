"""A run in a few numbers: summary.json, and the lines at the end of the terminal."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.text import PLAIN_ABSENT, duration, number, score

_SHOWN_STAGES = 4


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


class Summary(BaseModel):
    """What a run came to.

    Attributes:
        reward_before, accuracy_before: of the first validation; None when the run ended before it.
        reward_after, accuracy_after: of the last validation.
        steps: GRPO steps done.
        seconds: wall clock from start to end, everything included.
        tokens: prompt and response tokens trained on.
        seconds_per_stage: wall clock of each stage over the whole run.
        mean_logprob_error: mean over steps of |generation - training| log-probability per token, in nats.
        error: why a failed run failed, one line.
        finished_at: local time, ISO 8601.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    recipe: str
    seed: int
    status: Literal["completed", "failed", "cancelled"]
    steps: int
    seconds: float
    tokens: int
    weight_version: int
    reward_before: float | None = None
    reward_after: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    seconds_per_stage: dict[str, float] = {}
    mean_logprob_error: float | None = None
    error: str | None = None
    finished_at: str = Field(default_factory=_now)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on per second of the steps' own stages; start-up, warm start and export do not count."""
        seconds = sum(self.seconds_per_stage.get(stage, 0.0) for stage in STEP_STAGES)
        return self.tokens / seconds if seconds > 0 else None

    def write(self, directory: RunDirectory) -> None:
        """summary.json."""
        directory.summary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Summary:
        """A summary.json.

        Raises:
            pydantic.ValidationError: not a summary. FileNotFoundError: no such file.
        """
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


STEP_STAGES = ("rollout", "logprob", "ref_logprob", "advantage", "train", "refit")


def render_summary_text(summary: Summary) -> str:
    """Five to seven lines, ASCII but for names and error, without a newline at the end."""
    steps = "1 step" if summary.steps == 1 else f"{summary.steps} steps"
    rows = [
        ("accuracy", f"{_plain(summary.accuracy_before)} -> {_plain(summary.accuracy_after)}"),
        ("reward", f"{_plain(summary.reward_before)} -> {_plain(summary.reward_after)}"),
        ("tokens", f"{summary.tokens:,} ({number(summary.tokens_per_s, PLAIN_ABSENT)} per second)"),
        ("logprob error", f"{number(summary.mean_logprob_error, PLAIN_ABSENT)} (mean of |generation - training|)"),
    ]
    slowest = sorted(summary.seconds_per_stage.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN_STAGES]
    if slowest:
        rows.append(("time", ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in slowest)))
    if summary.error:
        rows.append(("error", " ".join(summary.error.split())))
    head = f"{summary.name}: {summary.status}, {steps} in {duration(summary.seconds)}, seed {summary.seed}"
    return "\n".join([head, *(f"  {label:<13} {value}" for label, value in rows)])


def _plain(value: float | None) -> str:
    return score(value, PLAIN_ABSENT)
