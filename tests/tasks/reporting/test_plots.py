import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tasks.reporting.jsonl import read_lines
from tasks.reporting.plots import picture_svg, sample_rows, step_rows
from tasks.reporting.views import VIEWS, View
from tests.tasks.reporting.runs import write_run, write_scored_run, write_sft_run

GRPO, SFT = VIEWS["grpo"], VIEWS["sft"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("view", [GRPO, SFT], ids=["grpo", "sft"])
def test_the_picture_has_every_chart(tmp_path: Path, view: View) -> None:
    directory = write_run(tmp_path) if view is GRPO else write_sft_run(tmp_path)
    picture = ET.fromstring(picture_svg(read_lines(directory.metrics), view))
    titles = [text.text for text in picture.iter(f"{SVG}text") if text.get("class") == "title"]
    assert titles == [chart.title for chart in view.charts]
    charts = picture.findall(f"{SVG}svg")
    assert len(charts) == len(view.charts)
    for chart in charts:
        assert any((path.get("class") or "").startswith("line") for path in chart.iter(f"{SVG}path"))
    places = [(float(chart.get("x", 0)), float(chart.get("y", 0))) for chart in charts]
    assert len(set(places)) == len(places)
    assert all(x + 560 <= float(picture.get("width", 0)) and y + 230 <= float(picture.get("height", 0)) for x, y in places)


@pytest.mark.parametrize("rows", [[], [{"step": 0, "accuracy/validation": 0.5}], [{"step": 1, "reward/mean": None}]])
def test_a_picture_of_little(rows: list[dict[str, float]]) -> None:
    for view in (GRPO, SFT):
        assert "no values yet" in "".join(ET.fromstring(picture_svg(rows, view)).itertext())


def test_a_picture_of_many_steps_stays_small() -> None:
    rows = [{"step": step, **dict.fromkeys((one.metric for chart in GRPO.charts for one in chart.series), 0.5)} for step in range(2000)]
    assert len(picture_svg(rows, GRPO)) < 250_000  # of which an event carries a copy; Prefect refuses 1.5 MB


def test_the_table_joins_lines_and_shows_the_last_steps_first(tmp_path: Path) -> None:
    rows = step_rows(read_lines(write_run(tmp_path).metrics), GRPO, last=3)
    assert [list(row.values()) for row in rows] == [
        ["4", "0.400", "0.875", "0.0020", "-0.0040", "800", "2.500"],
        ["3", "0.300", "–", "0.0015", "-0.0030", "800", "2.500"],
        ["2", "0.200", "–", "0.0010", "-0.0020", "800", "2.500"],
    ]
    assert list(rows[0]) == ["step", "reward", "accuracy", "KL", "loss", "tokens/s", "s/step"]
    assert step_rows([], GRPO) == []


def test_the_table_of_an_sft_run_has_its_own_columns(tmp_path: Path) -> None:
    rows = step_rows(read_lines(write_sft_run(tmp_path).metrics), SFT, last=1)
    assert rows == [
        {
            "step": "4", "loss": "1.250", "validation loss": "1.500", "gradient norm": "1", "tokens/s": "800", "TFLOP": "0.0200",
            "TFLOP/s per worker": "0.0125", "s/step": "2.500",
        }
    ]  # fmt: skip


def test_samples_are_readable_rows(tmp_path: Path) -> None:
    samples = read_lines(write_run(tmp_path).samples)
    rows = sample_rows([{**samples[0], "response": "x" * 1000, "reward": None}, samples[1]])
    assert list(rows[0]) == ["step", "phase", "prompt", "response", "answer", "reward", "weights"]
    assert (len(rows[0]["response"]), rows[0]["response"][-1], rows[0]["reward"]) == (300, "…", "–")
    assert rows[1]["prompt"] == samples[1]["prompt"]
    assert all(isinstance(value, str) for row in json.loads(json.dumps(rows)) for value in row.values())


def test_responses_without_reward_have_columns_only_where_there_are_some(tmp_path: Path) -> None:
    rows = step_rows(read_lines(write_scored_run(tmp_path).metrics), GRPO, last=2)
    assert [row["timed out"] for row in rows] == ["12.5%", "12.5%"]
    assert [row["accuracy"] for row in rows] == ["0.750 [0.69, 0.81]", "–"]
    quiet = [{"step": 1, "scoring/timed_out": 0.0, "scoring/failed": 0.0}]
    assert "timed out" not in step_rows(quiet, GRPO)[0]


def test_a_sample_without_reward_says_so_and_shows_its_control_characters(tmp_path: Path) -> None:
    rows = sample_rows(read_lines(write_scored_run(tmp_path, said="a\x00\x1b[0m").samples))
    assert {row["reward"] for row in rows if row["phase"] == "train"} == {"0.000, timed out"}
    assert rows[0]["response"] == "a\\x00\\x1b[0m"


def test_the_picture_has_a_line_for_every_validation_set(tmp_path: Path) -> None:
    picture = "".join(ET.fromstring(picture_svg(read_lines(write_scored_run(tmp_path).metrics), GRPO)).itertext())
    assert "gsm8k" in picture
    assert "gsm8k" not in "".join(ET.fromstring(picture_svg(read_lines(write_run(tmp_path).metrics), GRPO)).itertext())
