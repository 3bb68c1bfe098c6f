"""Charts as inline SVG: no scripts, nothing loaded, colours from the page's style sheet (so they follow light and dark).

value ▲            .--o 0.91      a point's <title> is its tooltip; the last value stands at the line's end
      │     .--o--'
      └──────────────► step
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tasks.reporting.text import duration, number, short

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 52, 10, 34
_MOST_DOTS, _MOST_TOOLTIPS = 40, 200  # above the first, dots hide the line and appear under the pointer only; above the second, none
_MOST_BARS = 90
_LABEL_GAP = 13  # least distance of two labels at the line ends, pixels
_NOTHING = Markup('<p class="nothing">No values were recorded.</p>')

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Line:
    """One line: what the legend calls it, (step, finite value) pairs in the order of steps, and its palette entry (1-7)."""

    label: str
    points: Points
    color: int


@dataclass(frozen=True)
class Axis:
    """A range and where its grid lines are; `place` maps a value into 0..1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


def linear_axis(low: float, high: float, *, most_ticks: int = 6) -> Axis:
    """Round ticks (1, 2 or 5 times a power of ten) that enclose low..high."""
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = (0.0, low + room) if low >= 0 else (low - room, high + room)
    rough = (high - low) / most_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, tuple(step * i for i in range(first, last + 1)))


def log_axis(low: float, high: float) -> Axis:
    """Whole decades that enclose low..high; both must be positive."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = -(-(last - first) // 5)
    return Axis(10.0**first, 10.0**last, tuple(10.0**i for i in range(first, last + 1, every)), log=True)


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    steps: tuple[int, int],
    bounds: tuple[float, float] | None = None,
    log: bool = False,
    tooltips: bool = True,
) -> Markup:
    """Lines over steps.

    Args:
        title: read out in place of the picture.
        steps: first and last step of the run: charts side by side share their axis.
        bounds: what the value axis shows at least.
        log: decades instead, where every value is positive.
        tooltips: also of many points; a picture has no pointer to show them.
    """
    shown = [line for line in lines if line.points]
    if not shown:
        return _NOTHING
    values = [value for line in shown for _, value in line.points]
    low, high = min(values), max(values)
    if log and low > 0:
        y = log_axis(low, high)
    else:
        y = linear_axis(min(low, bounds[0]), max(high, bounds[1])) if bounds else linear_axis(low, high)
    x = _step_axis(*steps)
    parts = [_grid(x, y)]
    parts += [_draw(line, x, y, _MOST_TOOLTIPS if tooltips else _MOST_DOTS) for line in shown]
    parts.append(_end_labels(shown, x, y))
    return _svg(title, parts)


def stacked_bars(steps: Sequence[int], stages: Mapping[str, Sequence[float]], colors: Mapping[str, str], *, title: str) -> Markup:
    """Seconds per step, one bar per step (or per run of steps: the mean, when there are many), stages on top of each other.

    Args:
        stages: for each stage, from the bottom up, one value per step.
        colors: for each stage, its style class.
    """
    if not steps or not any(sum(values) > 0 for values in stages.values()):
        return _NOTHING
    size = -(-len(steps) // _MOST_BARS)
    bins = [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
    heights = {name: [sum(values[i] for i in rows) / len(rows) for rows in bins] for name, values in stages.items()}
    y = linear_axis(0.0, max(sum(column) for column in zip(*heights.values(), strict=True)))
    slot = (WIDTH - _LEFT - _RIGHT) / len(bins)
    width = min(max(slot - 2, slot * 0.7), 40)
    parts = [_grid(None, y)]
    for bar, rows in enumerate(bins):
        first, last = steps[rows[0]], steps[rows[-1]]
        when = f"step {first}" if first == last else f"steps {first}–{last}, mean"
        left, base = _LEFT + bar * slot + (slot - width) / 2, 0.0
        for name in stages:
            seconds = heights[name][bar]
            top = base + seconds
            upper, lower = _y(y.place(top)), _y(y.place(base))
            box = f"M{left:.2f} {lower:.2f}V{upper:.2f}H{left + width:.2f}V{lower:.2f}Z"
            parts.append(Markup('<path class="bar {}" d="{}"><title>{}: {} {}</title></path>').format(
                colors[name], box, when, name, duration(seconds)
            ))  # fmt: skip
            base = top
    ticks = _step_axis(steps[0], steps[-1]).ticks
    parts += [
        _text(_LEFT + (bar + 0.5) * slot, HEIGHT - _BOTTOM + 16, str(int(tick)), "tick", "middle")
        for bar, rows in enumerate(bins)
        for tick in ticks
        if steps[rows[0]] <= tick <= steps[rows[-1]]
    ]
    parts += [_step_name(), _text(_LEFT - 7, HEIGHT - _BOTTOM + 16, "seconds", "tick", "end")]
    return _svg(title, parts)


def _step_axis(first: int, last: int) -> Axis:
    if first == last:
        return Axis(first - 1, last + 1, (float(first),))
    ticks = [tick for tick in linear_axis(first, last, most_ticks=8).ticks if tick == int(tick) and first <= tick <= last]
    return Axis(first, last, tuple(ticks))


def _draw(line: Line, x: Axis, y: Axis, most_tooltips: int) -> Markup:
    spots = [(_x(x.place(step)), _y(y.place(value))) for step, value in line.points]
    path = "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in spots)
    thin = " thin" if len(spots) > _MOST_TOOLTIPS else ""
    parts = [Markup('<path class="line{} s{}" d="{}"/>').format(thin, line.color, path)]
    if len(spots) <= most_tooltips:
        kind = "dot" if len(spots) <= _MOST_DOTS else "dot hidden"
        parts += [
            Markup('<circle class="{} s{}" cx="{:.1f}" cy="{:.1f}" r="3.5"><title>step {}: {} {}</title></circle>').format(
                kind, line.color, across, down, step, line.label, number(value)
            )
            for (across, down), (step, value) in zip(spots, line.points, strict=True)
        ]
    return Markup("").join(parts)


def _end_labels(lines: Sequence[Line], x: Axis, y: Axis) -> Markup:
    # Spread upwards and downwards until no two overlap: lines that end together must stay readable.
    ends = sorted(((_y(y.place(line.points[-1][1])), line) for line in lines), key=lambda end: (end[0], end[1].color))
    places = [down for down, _ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + _LABEL_GAP)
    over = places[-1] - (HEIGHT - _BOTTOM)
    places = [place - max(over, 0.0) for place in places]
    return Markup("").join(
        _text(_x(x.place(line.points[-1][0])) + 7, place + 4, short(line.points[-1][1]), "end", "start")
        for place, (_, line) in zip(places, ends, strict=True)
    )


def _grid(x: Axis | None, y: Axis) -> Markup:
    parts = []
    for tick in y.ticks:
        down = _y(y.place(tick))
        parts.append(Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(_LEFT, down, WIDTH - _RIGHT))
        parts.append(_text(_LEFT - 7, down + 4, short(tick), "tick", "end"))
    parts.append(Markup('<path class="base" d="M{} {}H{}"/>').format(_LEFT, HEIGHT - _BOTTOM, WIDTH - _RIGHT))
    if x is not None:
        parts += [_text(_x(x.place(tick)), HEIGHT - _BOTTOM + 16, str(int(tick)), "tick", "middle") for tick in x.ticks]
        parts.append(_step_name())
    return Markup("").join(parts)


def _step_name() -> Markup:
    return _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 3, "step", "tick", "middle")


def _x(place: float) -> float:
    return _LEFT + place * (WIDTH - _LEFT - _RIGHT)


def _y(place: float) -> float:
    return HEIGHT - _BOTTOM - place * (HEIGHT - _BOTTOM - _TOP)


def _text(across: float, down: float, text: str, kind: str, anchor: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, across, down, anchor, text)


def _svg(title: str, parts: Sequence[Markup]) -> Markup:
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, title)
    return head + Markup("").join(parts) + Markup("</svg>")
