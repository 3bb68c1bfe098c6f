"""A run in a few numbers: summary.json, and the lines at the end of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.text import PLAIN_ABSENT, duration, number, score
from tasks.reporting.views import VIEWS, FlowName

_SHOWN_STAGES = 4


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


class Summary(BaseModel):
    """What a run came to.

    Attributes:
        flow: which flow ran. Of grpo alone are: weight_version, the rewards and accuracies, mean_logprob_error. Of sft alone: the
            losses, best_step, mean_tflops_per_worker. Of evaluate: rewards and accuracies, "before" those of the baseline.
        stopped_because: what ended the training of a completed run: all steps, all epochs, or early stopping.
        reward_before, accuracy_before: of the first validation; None when the run ended before it.
        reward_after, accuracy_after: of the last validation.
        validation_loss_before, validation_loss_after: first and last validation, nats per response token.
        validation_loss_best, best_step: of the best checkpoint, which `hf` points to.
        mean_tflops_per_worker: TFLOP/s of one worker, mean over steps.
        steps: steps done.
        seconds: wall clock from start to end, everything included.
        tokens: prompt and response tokens trained on.
        seconds_per_stage: what the flow waited for each stage over the whole run; never more than `seconds` together.
        mean_logprob_error: mean over steps of |generation - training| log-probability per token, in nats.
        error: why a failed run failed, one line.
        finished_at: local time, ISO 8601.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    flow: FlowName
    name: str
    recipe: str
    seed: int
    status: Literal["completed", "failed", "cancelled"]
    steps: int
    seconds: float
    tokens: int
    stopped_because: Literal["steps", "epochs", "early_stop"] | None = None
    weight_version: int | None = None
    reward_before: float | None = None
    reward_after: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    validation_loss_before: float | None = None
    validation_loss_after: float | None = None
    validation_loss_best: float | None = None
    best_step: int | None = None
    mean_tflops_per_worker: float | None = None
    seconds_per_stage: dict[str, float] = {}
    mean_logprob_error: float | None = None
    error: str | None = None
    finished_at: str = Field(default_factory=_now)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on per second of the steps' own stages; start-up, warm start and export do not count."""
        seconds = sum(self.seconds_per_stage.get(stage, 0.0) for stage in VIEWS[self.flow].stages)
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


def render_summary_text(summary: Summary) -> str:
    """Three to eight lines, ASCII but for names and error, without a newline at the end."""
    steps = "1 step" if summary.steps == 1 else f"{summary.steps} steps"
    rows = _ROWS[summary.flow](summary)
    if summary.flow != "evaluate":
        rows.insert(2, ("tokens", f"{summary.tokens:,} ({number(summary.tokens_per_s, PLAIN_ABSENT)} per second)"))
    slowest = sorted(summary.seconds_per_stage.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN_STAGES]
    if slowest:
        rows.append(("time", ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in slowest)))
    if summary.error:
        rows.append(("error", " ".join(summary.error.split())))
    did = f"{summary.status} in" if summary.flow == "evaluate" else f"{summary.status}, {steps} in"
    head = f"{summary.name}: {did} {duration(summary.seconds)}, seed {summary.seed}"
    return "\n".join([head, *(f"  {label:<13} {value}" for label, value in rows)])


def _grpo_rows(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("accuracy", f"{_plain(summary.accuracy_before)} -> {_plain(summary.accuracy_after)}"),
        ("reward", f"{_plain(summary.reward_before)} -> {_plain(summary.reward_after)}"),
        ("logprob error", f"{number(summary.mean_logprob_error, PLAIN_ABSENT)} (mean of |generation - training|)"),
    ]


def _sft_rows(summary: Summary) -> list[tuple[str, str]]:
    before, after, best = (
        number(loss, PLAIN_ABSENT) for loss in (summary.validation_loss_before, summary.validation_loss_after, summary.validation_loss_best)
    )
    return [
        ("valid. loss", f"{before} -> {after} (best checkpoint: {best}, step {summary.best_step or PLAIN_ABSENT})"),
        ("stopped by", (summary.stopped_because or PLAIN_ABSENT).replace("_", " ")),
        ("compute", f"{number(summary.mean_tflops_per_worker, PLAIN_ABSENT)} TFLOP/s per worker"),
    ]


def _evaluate_rows(summary: Summary) -> list[tuple[str, str]]:
    pairs = (("accuracy", summary.accuracy_before, summary.accuracy_after), ("reward", summary.reward_before, summary.reward_after))
    return [(label, _plain(after) if before is None else f"{_plain(before)} -> {_plain(after)}") for label, before, after in pairs]


_ROWS: Mapping[FlowName, Callable[[Summary], list[tuple[str, str]]]] = {
    "grpo": _grpo_rows,
    "sft": _sft_rows,
    "evaluate": _evaluate_rows,
}


def _plain(value: float | None) -> str:
    return score(value, PLAIN_ABSENT)
