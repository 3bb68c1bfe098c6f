"""A run in a few numbers: summary.json, and the lines at the end of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, Field

from configs.validation import OWN_SET
from tasks.reporting.memory import MemoryUse
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.text import ABSENT, ascii_absent, change, duration, estimate, number, score, share, visible
from tasks.reporting.validation import Triple
from tasks.reporting.views import VIEWS, FlowName

if TYPE_CHECKING:
    from actors.rollout.samples import Validation

_SHOWN_STAGES = 4


class SetAccuracy(BaseModel, frozen=True, extra="forbid"):
    """Accuracy on one validation set, each with its interval: of the first validation (or the baseline), of the last (or the model).

    Attributes:
        gain: after - before, paired by problem.
    """

    before: Triple | None = None
    after: Triple | None = None
    gain: Triple | None = None

    @classmethod
    def of(cls, before: Validation | None, after: Validation | None) -> Self:
        """Of one validation set."""
        gain = after.gain(before) if before and after else None
        return cls(
            before=before.estimate if before else None,
            after=after.estimate if after else None,
            gain=(gain.value, gain.low, gain.high) if gain else None,
        )


class Summary(BaseModel, frozen=True, extra="forbid"):
    """What a run came to.

    Attributes:
        flow: which flow ran. Of grpo alone are: weight_version, the rewards and accuracies, mean_logprob_error. Of sft alone: the
            losses, best_step, mean_tflops_per_worker. Of evaluate: rewards and accuracies, "before" those of the baseline.
        stopped_because: what ended the training of a completed run: all steps, all epochs, or early stopping.
        reward_before, accuracy_before: of the first validation; None when the run ended before it.
        reward_after, accuracy_after: of the last validation.
        sets: accuracies by validation set, with intervals; "validation" is the environment's own.
        timed_out, failed: responses without a reward, as a fraction of the training samples, mean over steps.
        validation_loss_before, validation_loss_after: first and last validation, nats per response token.
        validation_loss_best, best_step: of the best checkpoint, which `hf` points to.
        mean_tflops_per_worker: TFLOP/s of one worker, mean over steps.
        steps: steps done.
        seconds: wall clock from start to end, everything included.
        tokens: prompt and response tokens trained on.
        seconds_per_stage: what the flow waited for each stage over the whole run; never more than `seconds` together.
        memory: of a GPU, planned and measured, by stage of the policy; empty without a GPU.
        mean_logprob_error: mean over steps of |generation - training| log-probability per token, in nats.
        guards: how often each guard has tripped.
        error: why a failed run failed, one line.
        finished_at: local time, ISO 8601; of a run that goes on, when this was found.
    """

    flow: FlowName
    name: str
    recipe: str
    seed: int
    status: Literal["running", "completed", "failed", "cancelled"]
    steps: int
    seconds: float
    tokens: int
    stopped_because: Literal["steps", "epochs", "early_stop"] | None = None
    weight_version: int | None = None
    reward_before: float | None = None
    reward_after: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    sets: dict[str, SetAccuracy] = {}
    timed_out: float | None = None
    failed: float | None = None
    validation_loss_before: float | None = None
    validation_loss_after: float | None = None
    validation_loss_best: float | None = None
    best_step: int | None = None
    mean_tflops_per_worker: float | None = None
    seconds_per_stage: dict[str, float] = {}
    memory: dict[str, MemoryUse] = {}
    mean_logprob_error: float | None = None
    guards: dict[str, int] = {}
    error: str | None = None
    finished_at: str = Field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))

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
    rows = [(label, ascii_absent(value)) for label, value in _ROWS[summary.flow](summary)]
    if summary.flow != "evaluate":
        rows.insert(2, ("tokens", f"{summary.tokens:,} ({ascii_absent(number(summary.tokens_per_s))} per second)"))
    slowest = sorted(summary.seconds_per_stage.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN_STAGES]
    if slowest:
        rows.append(("time", ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in slowest)))
    if summary.memory:
        rows.append(("GPU memory", _memory(summary)))
    if summary.error:
        rows.append(("error", visible(" ".join(summary.error.split()))))
    did = f"{summary.status} in" if summary.flow == "evaluate" else f"{summary.status}, {steps} in"
    head = f"{summary.name}: {did} {duration(summary.seconds)}, seed {summary.seed}"
    return "\n".join([head, *(f"  {label:<13} {value}" for label, value in rows)])


def _grpo_rows(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("accuracy", _accuracy(summary)),
        ("reward", f"{score(summary.reward_before)} -> {score(summary.reward_after)}"),
        ("logprob error", f"{number(summary.mean_logprob_error)} (mean of |generation - training|)"),
        *_set_rows(summary),
        *_not_scored(summary),
        *([("guards", ", ".join(f"{name} {times} times" for name, times in summary.guards.items()))] if summary.guards else []),
    ]


def _sft_rows(summary: Summary) -> list[tuple[str, str]]:
    before, after, best = (
        number(loss) for loss in (summary.validation_loss_before, summary.validation_loss_after, summary.validation_loss_best)
    )
    return [
        ("valid. loss", f"{before} -> {after} (best checkpoint: {best}, step {summary.best_step or ABSENT})"),
        ("stopped by", (summary.stopped_because or ABSENT).replace("_", " ")),
        ("compute", f"{number(summary.mean_tflops_per_worker)} TFLOP/s per worker"),
    ]


def _evaluate_rows(summary: Summary) -> list[tuple[str, str]]:
    reward = score(summary.reward_after)
    if summary.reward_before is not None:
        reward = f"{score(summary.reward_before)} -> {reward}"
    return [("accuracy", _accuracy(summary)), ("reward", reward), *_set_rows(summary)]


def _accuracy(summary: Summary) -> str:
    own = summary.sets.get(OWN_SET, SetAccuracy())
    before = own.before or (summary.accuracy_before, None, None)
    after = own.after or (summary.accuracy_after, None, None)
    alone = summary.flow == "evaluate" and before[0] is None
    gained = f" ({change(*own.gain)})" if own.gain else ""
    return (estimate(*after) if alone else f"{estimate(*before)} -> {estimate(*after)}") + gained


def _memory(summary: Summary) -> str:
    stages = (
        f"{stage} {number(use.gpu_measured)} GiB (planned {number(use.gpu_planned)})"
        for stage, use in summary.memory.items()
        if use.gpu_measured is not None
    )
    return ", ".join(stages)


def _set_rows(summary: Summary) -> list[tuple[str, str]]:
    rows = []
    for name, one in summary.sets.items():
        if name != OWN_SET:
            there = [estimate(*triple) for triple in (one.before, one.after) if triple]
            rows.append((name, " -> ".join(there) + (f" ({change(*one.gain)})" if one.gain else "")))
    return rows


def _not_scored(summary: Summary) -> list[tuple[str, str]]:
    parts = [f"{share(value)} {word}" for value, word in ((summary.timed_out, "timed out"), (summary.failed, "failed")) if value]
    return [("not scored", ", ".join(parts))] if parts else []


_ROWS: Mapping[FlowName, Callable[[Summary], list[tuple[str, str]]]] = {
    "grpo": _grpo_rows,
    "sft": _sft_rows,
    "evaluate": _evaluate_rows,
}
