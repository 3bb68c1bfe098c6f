"""What a person sees of a run, by flow: which numbers are charts, columns, words in the terminal, and tiles of the report.

VIEWS["grpo"], VIEWS["sft"], VIEWS["evaluate"] ──► terminal.Progress, publish.Publisher, plots, html, summary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tasks.reporting.text import interval, number, score, share

FlowName = Literal["grpo", "sft", "evaluate"]
Format = Callable[[float | None], str]
COLORS = 7  # entries of the palette


@dataclass(frozen=True)
class Series:
    """One metric as a line: what the legend calls it, its name in metrics.jsonl, and its palette entry (1-7)."""

    label: str
    metric: str
    color: int


@dataclass(frozen=True)
class Chart:
    """One chart over steps.

    Attributes:
        bounds: what the value axis shows at least. log: decades instead.
    """

    title: str
    note: str
    series: tuple[Series, ...]
    bounds: tuple[float, float] | None = None
    log: bool = False


@dataclass(frozen=True)
class Column:
    """A number in a line of text or a table: heading, name in metrics.jsonl, digits.

    Attributes:
        rare: left out where it is 0.
    """

    heading: str
    metric: str
    form: Format = number
    rare: bool = False

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has something to show here."""
        return bool(row.get(self.metric)) if self.rare else self.metric in row

    def show(self, row: Mapping[str, Any]) -> str:
        """The row's value, with its interval where the row has METRIC/low and METRIC/high."""
        return self.form(row.get(self.metric)) + interval(row.get(f"{self.metric}/low"), row.get(f"{self.metric}/high"))


@dataclass(frozen=True)
class View:
    """What is shown of the runs of one flow.

    Attributes:
        title: the flow's name in words.
        stages: of a step, in order; `time/<stage>` are their metrics. outside: timed besides, not part of a step.
        charts: of the report, and of the picture in the Prefect UI, whose key ends in `picture`. more: of the report alone, each where it
            has values other than 0.
        table: columns of the metrics table. line: what the terminal shows of a step.
        samples: whether the model answers prompts during the run.
    """

    title: str
    stages: tuple[str, ...]
    outside: tuple[str, ...]
    charts: tuple[Chart, ...]
    picture: str
    table: tuple[Column, ...]
    line: tuple[Column, ...]
    samples: bool
    more: tuple[Chart, ...] = ()


_NOT_SCORED = (Column("timed out", "scoring/timed_out", share, rare=True), Column("failed", "scoring/failed", share, rare=True))
_LOSS_SCALE = (  # of float16
    Chart("Loss scale", "factor on the loss in float16, log scale", (Series("scale", "loss_scale", 1),), log=True),
    Chart("Skipped updates", "of a step: float16 gradients overflowed", (Series("updates", "skipped_steps", 1),), (0.0, 1.0)),
)
_LEARNT = (Column("reward", "reward/mean", score), Column("accuracy", "accuracy/validation", score), Column("KL", "kl"))
_GRPO = View(
    title="GRPO",
    stages=("rollout", "logprob", "ref_logprob", "advantage", "train", "refit"),
    outside=("validate",),
    charts=(
        Chart(
            "Reward",
            "of sampled and of greedy responses",
            (Series("training, mean of the batch", "reward/mean", 1), Series("validation, greedy", "reward/validation", 2)),
            bounds=(0.0, 0.0),
        ),
        Chart("Validation accuracy", "greedy answers to held-out prompts", (Series("accuracy", "accuracy/validation", 1),), (0.0, 1.0)),
        Chart("KL to the reference", "nats per token", (Series("KL", "kl", 1),), bounds=(0.0, 0.0)),
        Chart(
            "Log-probability error",
            "|generation − training|, nats per token, log scale",
            (Series("largest token", "logprob_error/max", 2), Series("mean over tokens", "logprob_error/mean", 1)),
            log=True,
        ),
        Chart("Token throughput", "prompt and response tokens per second of a step", (Series("tokens/s", "tokens_per_s", 1),), (0.0, 0.0)),
    ),
    picture="reward",
    table=(*_LEARNT, Column("loss", "loss"), Column("tokens/s", "tokens_per_s"), Column("s/step", "time/step"), *_NOT_SCORED),
    line=(*_LEARNT, *_NOT_SCORED),
    samples=True,
    more=(
        Chart("Response length", "tokens, mean of the batch", (Series("tokens", "response_length/mean", 1),), (0.0, 0.0)),
        Chart("Entropy", "nats per token", (Series("entropy", "entropy", 1),), (0.0, 0.0)),
        Chart("Gradient norm", "before clipping", (Series("norm", "grad_norm", 1),), (0.0, 0.0)),
        Chart(
            "Staleness",
            "weight versions between sampling and training",
            (Series("oldest token", "staleness/max", 2), Series("mean", "staleness/mean", 1)),
            bounds=(0.0, 0.0),
        ),
        *_LOSS_SCALE,
    ),
)
_SFT = View(
    title="SFT",
    stages=("batch", "train"),
    outside=("validate", "checkpoint"),
    charts=(
        Chart(
            "Loss",
            "nats per response token",
            (Series("training batch", "loss", 1), Series("validation", "loss/validation", 2)),
            bounds=(0.0, 0.0),
        ),
        Chart("Token throughput", "prompt and response tokens per second of a step", (Series("tokens/s", "tokens_per_s", 1),), (0.0, 0.0)),
        Chart("Compute", "TFLOP/s achieved by each worker", (Series("TFLOP/s", "tflops_per_worker", 1),), (0.0, 0.0)),
        Chart("Gradient norm", "before clipping", (Series("norm", "grad_norm", 1),), (0.0, 0.0)),
    ),
    picture="loss",
    table=(
        Column("loss", "loss"),
        Column("validation loss", "loss/validation"),
        Column("gradient norm", "grad_norm"),
        Column("tokens/s", "tokens_per_s"),
        Column("TFLOP", "tflops"),
        Column("TFLOP/s per worker", "tflops_per_worker"),
        Column("s/step", "time/step"),
    ),
    line=(Column("loss", "loss"), Column("validation loss", "loss/validation")),
    samples=False,
    more=_LOSS_SCALE,
)
_ANSWERED = (Column("accuracy", "accuracy/validation", score), Column("reward", "reward/validation", score))
_EVALUATE = View(
    title="Evaluation",
    stages=(),
    outside=("validate",),
    charts=(),
    picture="",
    table=_ANSWERED,
    line=_ANSWERED,
    samples=True,
)
VIEWS: Mapping[FlowName, View] = {"grpo": _GRPO, "sft": _SFT, "evaluate": _EVALUATE}
