"""A step that was made again beside what the run wrote down of it: which columns and metrics are other ones, and where first. Pure.

logged      policy_logprobs   generation_logprobs   reference_logprobs   advantages   metrics of the step
                 │                     │                    │                │                │
again       policy_logprobs ───────────┘            reference_logprobs   advantages       metrics       |difference| against its bound
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.meta import KVBatchMeta
from tasks.advantage import by_group
from tasks.reporting.text import number, visible

Verdict = Literal["bit-equal", "within", "beyond"]
_ORDER: tuple[Verdict, ...] = ("beyond", "within", "bit-equal")
ENGINE = "generation_logprobs"
# Metrics that say how a step was computed, by their beginnings; the others say what.
_HOW = ("time/", "train_s", "logprob_s", "tflops", "compiled_graph_active", "padding_waste", "gpu_memory/", "cuda_graph/")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Bound(_Frozen):
    """Of |logged - again|: of the largest value, and of the mean over all."""

    largest: float
    mean: float

    def __str__(self) -> str:
        if self.largest == 0:
            return "exact"
        return (
            f"{self.largest:g}"
            if self.largest == self.mean
            else f"mean {self.mean:g}" + (f", each {self.largest:g}" if math.isfinite(self.largest) else "")
        )


class Bounds(_Frozen):
    """What a step may differ by when it is made again: what the tests hold the parts to.

    Attributes:
        why: for a person. column: of log-probabilities. engine: of the engine's against the trainer's. metric: absolute, or relative (the
            gradient norm: five times as much). advantages: a function of the rewards alone, but for those with a KL in them, which are
            bounded as log-probabilities are.
    """

    why: str
    column: Bound
    engine: Bound
    metric: float
    advantages: Bound = Bound(largest=1e-6, mean=1e-6)


def bounds_of(same: bool, before: str, now: str, engine: str, measured: float = 0.0) -> Bounds:
    """
    Args:
        same: made again with the same settings on the same kind of machine. before, now, engine: dtypes of the two and of the engine.
        measured: mean |engine - trainer| that the run wrote down of the step; 0: it did not.
    """
    # bfloat16 of an engine: the project bounds the mean alone (docs/gpu.md), as single tokens may be far off; and by what the run itself
    # found where that is more, a tenth added.
    exactly = {now, engine} == {"float32"}
    between = Bound(largest=1e-3, mean=1e-3) if exactly else Bound(largest=math.inf, mean=max(2e-2, round(1.1 * measured, 4)))
    if {before, now} != {"float32"}:
        return Bounds(why=f"{before} against {now}", column=Bound(largest=0.1, mean=2e-2), engine=between, metric=2e-2)
    if same:
        return Bounds(why="the same layout, device and float32: to the bit", column=Bound(largest=0, mean=0), engine=between, metric=0)
    return Bounds(why="float32, on another layout or device", column=Bound(largest=1e-4, mean=1e-4), engine=between, metric=1e-4)


class Place(_Frozen):
    """One value of a column.

    Attributes:
        key, group, response: of the row; the number of the response in its prompt group begins with 0.
        position: in the row's `input_ids`; None: the column has one value a row. token: there. text: of the token.
    """

    key: str
    group: str
    response: int
    position: int | None
    token: int | None
    text: str
    logged: float
    again: float

    def __str__(self) -> str:
        token = "" if self.position is None else f", token {self.position} {self.text!r} ({self.token})"
        return f"group {self.group}, response {self.response}{token}: logged {self.logged:.8g}, again {self.again:.8g}"


class Column(_Frozen):
    """One comparison.

    Attributes:
        values: compared. differing: of them, in any bit. largest, mean: of |logged - again|.
        first: the first value beyond the bound; where only the mean is, the worst; None: nothing is beyond.
    """

    name: str
    values: int
    differing: int
    largest: float
    mean: float
    bound: Bound
    verdict: Verdict
    first: Place | None


class Metric(_Frozen):
    """One metric of the step."""

    name: str
    logged: float
    again: float
    verdict: Verdict


class Replayed(_Frozen):
    """A step that was made again.

    Attributes:
        since: step of the checkpoint that it was made from. before, here: what computed the step, and what computed it again.
    """

    run: str
    step: int
    since: int
    before: str
    here: str
    bounds: Bounds
    columns: tuple[Column, ...]
    metrics: tuple[Metric, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of all; that engine and trainer do not agree to the bit does not count."""
        columns = [one.verdict for one in self.columns if one.name != ENGINE or one.verdict == "beyond"]
        return min((*columns, *(one.verdict for one in self.metrics)), key=_ORDER.index)


class Rows:
    """Where values belong.

    Args:
        input_ids: of each row of the batch, int64 [len].
        text: of one token.
    """

    def __init__(self, meta: KVBatchMeta, input_ids: Sequence[torch.Tensor], text: Callable[[int], str]) -> None:
        self._meta, self._ids, self._text = meta, input_ids, text
        self._responses = {row: number for rows in by_group(meta) for number, row in enumerate(rows)}

    def compare(
        self, name: str, logged: Sequence[torch.Tensor], again: Sequence[torch.Tensor], bound: Bound, counted: Sequence[torch.Tensor] | None
    ) -> Column:
        """
        Args:
            logged, again: one tensor per row, float32 [len], or scalars.
            counted: bool [len] of each row, the values that count; None: all.

        Raises:
            CheckpointError: rows of other lengths.
        """
        if [row.shape for row in logged] != [row.shape for row in again]:
            raise CheckpointError(f"column {name!r}: its rows have other lengths than those that were computed again")
        before, now = (torch.cat([row.reshape(-1) for row in rows]) for rows in (logged, again))
        at = torch.arange(len(before)) if counted is None else torch.cat(list(counted)).nonzero().flatten()
        differing = before.view(torch.int32)[at] != now.view(torch.int32)[at]
        gaps = (before[at].double() - now[at].double()).abs().nan_to_num(nan=math.inf)  # inf - inf is also no number
        gaps[~differing] = 0.0
        largest, mean = (float(gaps.max()), float(gaps.mean())) if len(gaps) else (0.0, 0.0)
        verdict: Verdict = "bit-equal" if not differing.any() else "within"
        first = None
        if largest > bound.largest or mean > bound.mean:
            over = (gaps > bound.largest).nonzero().flatten()
            verdict, index = "beyond", int(at[over[0] if len(over) else gaps.argmax()])
            first = self._place(index, [row.numel() for row in logged], scalar=logged[0].dim() == 0, values=(before[index], now[index]))
        return Column(
            name=name, values=len(at), differing=int(differing.sum()), largest=largest, mean=mean, bound=bound, verdict=verdict, first=first
        )

    def _place(self, index: int, lengths: Sequence[int], *, scalar: bool, values: tuple[torch.Tensor, torch.Tensor]) -> Place:
        row = int(torch.searchsorted(torch.tensor(lengths).cumsum(0), index, right=True))
        position = None if scalar else index - sum(lengths[:row])
        token = None if position is None else int(self._ids[row][position])
        return Place(
            key=self._meta.keys[row], group=self._meta.tags[row]["prompt_uid"], response=self._responses[row], position=position,
            token=token, text="" if token is None else self._text(token), logged=float(values[0]), again=float(values[1]),
        )  # fmt: skip


def compare_columns(
    rows: Rows, kept: Mapping[str, Sequence[torch.Tensor]], again: Mapping[str, Sequence[torch.Tensor]], version: int, bounds: Bounds
) -> tuple[Column, ...]:
    """Each column that was computed again beside the one that was kept, and the engine's log-probabilities beside the trainer's.

    Args:
        kept, again: columns by name, in the order of the batch. version: of the weights that the step began with; the engine's
            log-probabilities of responses that others have sampled say nothing about these.
    """
    mask = kept["token_mask"]
    found = []
    for name in ("policy_logprobs", "reference_logprobs"):
        if name in kept and name in again:
            found.append(rows.compare(name, kept[name], again[name], bounds.column, mask))
        if name == "policy_logprobs":
            sampled = zip(mask, kept["weight_versions"], strict=True)
            fresh = [counted & bool((versions[counted] == version).all()) for counted, versions in sampled]
            found.append(rows.compare(ENGINE, kept[ENGINE], again[name], bounds.engine, fresh))
    found.append(rows.compare("advantages", kept["advantages"], again["advantages"], bounds.advantages, None))
    return tuple(found)


def compare_metrics(logged: Mapping[str, float], again: Mapping[str, float], bounds: Bounds) -> tuple[Metric, ...]:
    """The metrics that both have, and that do not depend on how a step was computed; in the order of their names."""
    names = [name for name in sorted(logged.keys() & again.keys()) if not name.startswith(_HOW)]
    return tuple(_metric(name, logged[name], again[name], bounds) for name in names)


def as_text(found: Replayed) -> str:
    """For a terminal."""
    widths = [max(len(row[place]) for row in _table(found)) for place in range(len(_HEAD))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in _table(found)]
    return "\n".join([*_introduction(found), "", *table, "", *_beyond(found), _last_line(found)])


def as_markdown(found: Replayed) -> str:
    """The same on one page, with all metrics."""
    head, *table = _table(found)
    rows = [[metric.name, f"{metric.logged:.8g}", f"{metric.again:.8g}", metric.verdict] for metric in found.metrics]
    page = [f"# Step {found.step}: {found.verdict}", "", *_introduction(found), "", *_grid(head, table), ""]
    page += [*(f"- {visible(line)}" for line in _beyond(found)), ""]
    return "\n".join([*page, *_grid(["metric", "logged", "again", "verdict"], rows), ""])


_HEAD = ["column", "values", "differ", "largest", "mean", "bound", "verdict"]


def _table(found: Replayed) -> list[list[str]]:
    rows = [
        [one.name, number(one.values), number(one.differing), _size(one.largest), _size(one.mean), str(one.bound), one.verdict]
        for one in found.columns
    ]
    if metrics := found.metrics:
        gaps = [_gap(one.logged, one.again) for one in metrics]
        worst = min((one.verdict for one in metrics), key=_ORDER.index)
        bound = f"{found.bounds.metric:g} or relative" if found.bounds.metric else "exact"
        differ = sum(one.verdict != "bit-equal" for one in metrics)
        rows.append(["metrics", number(len(gaps)), number(differ), _size(max(gaps)), _size(math.fsum(gaps) / len(gaps)), bound, worst])
    return [_HEAD, *rows]


def _introduction(found: Replayed) -> list[str]:
    again = "" if found.step == found.since + 1 else f" ({found.step - found.since} steps again)"
    places = [f"on {found.here}"] if found.here == found.before else [f"on {found.here}", f"before: {found.before}"]
    return [f"{found.run}, step {found.step}, from the checkpoint after step {found.since}{again}; {found.bounds.why}", *places]


def _beyond(found: Replayed) -> list[str]:
    columns = [f"{one.name}: {one.first}" for one in found.columns if one.first]
    return columns + [f"{one.name}: logged {one.logged:.8g}, again {one.again:.8g}" for one in found.metrics if one.verdict == "beyond"]


def _last_line(found: Replayed) -> str:
    if not found.metrics:
        return f"{found.verdict}; the step reported no metrics: it failed"
    return {"bit-equal": "bit-equal", "within": "within the bounds", "beyond": "beyond the bounds"}[found.verdict]


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _metric(name: str, logged: float, again: float, bounds: Bounds) -> Metric:
    if logged == again or (math.isnan(logged) and math.isnan(again)):
        return Metric(name=name, logged=logged, again=again, verdict="bit-equal")
    share = 5 * bounds.metric if name == "grad_norm" else bounds.metric  # as tests/gpu/test_layouts.py holds it
    bound, gap = bounds.column.largest if name.endswith("/max") else max(share, share * abs(logged)), _gap(logged, again)
    return Metric(name=name, logged=logged, again=again, verdict="within" if gap <= bound and math.isfinite(gap) else "beyond")


def _size(value: float) -> str:
    return f"{value:.2e}" if value else "0"


def _gap(logged: float, again: float) -> float:
    if logged == again or (math.isnan(logged) and math.isnan(again)):
        return 0.0
    return abs(logged - again) if math.isfinite(logged - again) else math.inf
