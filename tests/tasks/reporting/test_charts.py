import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tasks.reporting.charts import HEIGHT, WIDTH, Line, line_chart, linear_axis, log_axis, stacked_bars


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 0.0139, [0, 0.005, 0.01, 0.015]),
        (-0.3, 0.4, [-0.4, -0.2, 0, 0.2, 0.4]),
        (0.0, 60.0, [0, 10, 20, 30, 40, 50, 60]),
    ],
)
def test_ticks_are_round_and_enclose(low: float, high: float, ticks: list[float]) -> None:
    assert linear_axis(low, high).ticks == pytest.approx(ticks)


@pytest.mark.parametrize("value", [0.0, 0.5, -0.5, 1e-9, 1e9])
def test_an_axis_for_a_constant(value: float) -> None:
    axis = linear_axis(value, value)
    assert axis.low <= value <= axis.high
    assert axis.low < axis.high


def test_decades() -> None:
    assert log_axis(2e-6, 5e-5).ticks == pytest.approx([1e-6, 1e-5, 1e-4])
    assert log_axis(1e-5, 1e-5).ticks == pytest.approx([1e-5, 1e-4])
    assert log_axis(2e-6, 5e-5).place(1e-5) == pytest.approx(0.5)


def test_points_are_where_their_values_are() -> None:
    chart = line_chart([Line("a", [(0, 0.0), (5, 0.5), (10, 1.0)], 1)], title="t", steps=(0, 10))
    spots = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart)]
    assert spots[1] == pytest.approx(((spots[0][0] + spots[2][0]) / 2, (spots[0][1] + spots[2][1]) / 2), abs=0.11)
    assert spots[0][1] > spots[2][1]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in spots)
    assert "<title>step 5: a 0.5000</title>" in chart


def test_end_labels_do_not_overlap() -> None:
    lines = [Line(str(color), [(0, 0.0), (1, 0.5)], color) for color in (1, 2, 3)]
    chart = line_chart(lines, title="t", steps=(0, 1))
    downs = sorted(float(y) for y in re.findall(r'class="end" x="[\d.]+" y="([\d.]+)"', chart))
    assert len(downs) == 3
    assert all(b - a > 12 for a, b in pairwise(downs))


def test_log_scale_gives_way_when_a_value_is_zero() -> None:
    assert "<svg" in line_chart([Line("a", [(1, 0.0), (2, 1e-5)], 1)], title="t", steps=(1, 2), log=True)


@pytest.mark.parametrize("steps", [1, 2, 90, 91, 1000])
def test_bars_of_any_number_of_steps(steps: int) -> None:
    numbers = list(range(1, steps + 1))
    chart = stacked_bars(numbers, {"a": [1.0] * steps, "b": [2.0] * steps}, {"a": "s1", "b": "s2"}, title="t")
    ElementTree.fromstring(chart)  # well-formed
    assert 2 <= chart.count('<path class="bar') <= 180
    assert chart.count("b 2.0 s") == chart.count("a 1.0 s") > 0


def test_nothing_to_show_and_labels_are_escaped() -> None:
    assert "No values were recorded" in line_chart([Line("a", [], 1)], title="t", steps=(0, 0))
    assert "No values were recorded" in stacked_bars([], {}, {}, title="t")
    assert "No values were recorded" in stacked_bars([1], {"a": [0.0]}, {"a": "s1"}, title="t")
    chart = line_chart([Line("<b>&", [(0, 1.0)], 1)], title='"><script>', steps=(0, 0))
    assert "<script>" not in chart
    assert "<b>" not in chart
    ElementTree.fromstring(chart)
