"""What a run with scoring outcomes and several validation sets shows: tables for the report and for the Prefect UI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.reporting.html import render_report, write_report
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step
from tasks.reporting.rewards import ALL, reward_charts, reward_names, reward_rows, reward_table
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.summary import Summary
from tasks.reporting.validation import set_tables, validation_rows
from tests.tasks.reporting.runs import SETS, summary, validation_metrics, write_run, write_scored_run, write_sft_run
from tests.tasks.reporting.test_html import Page


def words(directory: RunDirectory) -> str:
    return " ".join(Page(write_report(directory).read_text(encoding="utf-8")).text.split())


def test_rewards_over_the_steps(tmp_path: Path) -> None:
    rows = by_step(read_lines(write_scored_run(tmp_path).metrics))
    table = {row.label: row for row in reward_table(rows)}
    assert list(table) == ["length", "math", ALL]  # as in the file, whose metrics are in alphabetical order
    math = table["math"]
    assert (math.first, math.last, math.mean, math.timed_out) == (0.125, 0.5, pytest.approx(0.3125), 0.125)
    assert (table["length"].failed, table["length"].no_opinion) == (0.0625, 0.25)
    assert (table[ALL].timed_out, table[ALL].failed, table[ALL].dropped, table[ALL].slowest_s) == (0.125, 0.0625, 0.0, 14.0)
    assert [(chart.title, len(chart.series)) for chart in reward_charts(rows)] == [("Rewards", 2), ("Not scored", 3)]
    assert reward_rows(read_lines(tmp_path / "scored" / "metrics.jsonl"))[1] == {
        "reward": "math", "first step": "0.125", "last step": "0.500", "mean": "0.312", "timed out": "12.5%", "failed": "0.0%",
        "no opinion": "0.0%", "dropped": "–", "slowest": "–",
    }  # fmt: skip


def test_a_reward_that_never_had_a_value() -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "rewards/judge/failed": 1.0, "rewards/judge/no_opinion": 0.0, "reward/mean": 0.0}]
    (row,) = reward_table(rows)
    assert (row.label, row.mean, row.failed, row.timed_out) == ("judge", None, 1.0, None)
    assert reward_names([{"step": 1, "rewards/mean": 1.0, "rewards/x/other": 1.0}]) == []


@pytest.mark.parametrize("count", [7, 8, 40])
def test_there_are_never_more_lines_than_colours(count: int) -> None:
    rows = [{"step": 1, **{f"rewards/r{i}/mean": 0.5 for i in range(count)}}]
    (chart,) = reward_charts(rows)
    assert [one.color for one in chart.series] == list(range(1, 8))
    assert len(reward_table(rows)) == count


def test_validation_side_by_side(tmp_path: Path) -> None:
    rows = by_step(read_lines(write_scored_run(tmp_path).metrics))
    own, other = set_tables(rows, {"validation": SETS["validation"]["gain"]})
    assert (own.name, other.name, own.steps) == ("validation", "gsm8k", (0, 4))
    assert [(one.name, one.before, one.after, one.change) for one in own.measures] == [
        ("accuracy", "0.250 [0.19, 0.31]", "0.750 [0.69, 0.81]", "+0.500 [0.41, 0.59]"),
        ("accuracy, arithmetic", "0.375", "0.875", "+0.500"),
        ("accuracy, text", "0.125", "0.625", "+0.500"),
        ("pass@4", "0.300", "0.800", "+0.500"),
        ("reward", "0.125", "0.375", "+0.250"),
        ("mean length, tokens", "110", "130", "+20.0"),
        ("truncated", "18.8%", "6.2%", "-12.5%"),
    ]
    assert other.measures[0].change == "+0.250"  # its interval is not known here
    assert validation_rows(rows)[0]["difference"] == "+0.500"
    assert {row["set"] for row in validation_rows(rows)} == {"validation", "gsm8k"}


def test_one_validation_has_nothing_beside_it() -> None:
    rows: list[dict[str, Any]] = [{"step": 0, **validation_metrics("validation", 0.5), "timed_out/validation": 0.25}]
    (table,) = set_tables(rows, {"validation": None})
    assert table.steps == (0, None)
    assert {one.after for one in table.measures} == {""}
    assert [(one.name, one.before) for one in table.measures][-1] == ("timed out", "25.0%")
    assert set_tables([{"step": 1, "accuracy/validation": None}], {}) == []


def test_the_report_has_both_sections(tmp_path: Path) -> None:
    text = words(write_scored_run(tmp_path))
    for expected in (
        "validation accuracy, before → after · [0.19, 0.31] → [0.69, 0.81]",
        "reward first step last step mean of the steps timed out failed no opinion dropped slowest length -0.125 -0.500",
        "why responses were not scored reward outcome listed first at step problem no answer within 10 s math timed out 4 1 gsm8k:17",
        "Slowest to score step phase problem reward took outcome error 4 train gsm8k:17 math 14.0 s timed out no answer within 10 s",
        "validation before, step 0 after, step 4 difference accuracy 0.250 [0.19, 0.31] 0.750 [0.69, 0.81] +0.500 [0.41, 0.59]",
        "gsm8k before, step 0 after, step 4 difference accuracy 0.125 [0.06, 0.19] 0.375 [0.31, 0.44] +0.250 [0.15, 0.35]",
        "0.500 · length -0.500 · math 1.000 · truncated",
        "timed out no answer within 10 s",
    ):
        assert expected in text
    assert "No values were recorded" not in text


def test_what_rewards_and_problems_say_is_text_and_never_markup(tmp_path: Path) -> None:
    attack = "</td><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}&amp;"
    directory = write_scored_run(tmp_path, said=attack, error=attack, uid=attack)
    hostile = directory.metrics.read_text().replace("gsm8k", "<script>s").replace("rewards/math", "rewards/<img src=x>")
    directory.metrics.write_text(hostile)
    report = Page(write_report(directory).read_text(encoding="utf-8"))
    assert not {tag for tag, _ in report.tags} & {"img"}
    assert sum(tag == "script" for tag, _ in report.tags) == 2  # the page's own
    assert report.text.count(attack) >= 16  # uid and error in two tables, in the samples, and the response itself


def test_control_characters_are_seen_and_lone_surrogates_do_no_harm(tmp_path: Path) -> None:
    directory = write_scored_run(tmp_path, said="\x1b[2J\x00\u202eoh", error="\x07beep \udc80", uid="a\x00b")
    source = write_report(directory).read_text(encoding="utf-8")
    assert not set(source) & set(map(chr, [*range(9), 11, 12, *range(14, 32), 127, 0x202E]))
    text = Page(source).text
    for expected in ("\\x1b[2J\\x00\\u202eoh", "\\x07beep ?", "a\\x00b"):
        assert expected in text


def test_runs_without_scoring_metrics_have_no_such_section(tmp_path: Path) -> None:
    for directory in (write_run(tmp_path), write_sft_run(tmp_path)):
        assert "Rewards" not in words(directory)
    assert "Validation before, step 0" not in words(write_sft_run(tmp_path))
    assert reward_rows(read_lines(write_sft_run(tmp_path).metrics)) == validation_rows(read_lines(write_sft_run(tmp_path).metrics)) == []


def test_a_directory_of_an_older_run_still_renders(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    new = ("uid", "source", "success", "outcome", "rewards", "tokens", "truncated", "seconds", "error")
    rows = [json.loads(line) for line in directory.samples.read_text().splitlines()]
    directory.samples.write_text("".join(json.dumps({k: v for k, v in row.items() if k not in new}) + "\n" for row in rows))
    old = json.loads(directory.summary.read_text())
    directory.summary.write_text(json.dumps({k: v for k, v in old.items() if k not in ("sets", "timed_out", "failed")}))
    text = words(directory)
    assert "1 + 2 = ? 3 4 0.000 3 1.000" in text
    assert "accuracy 0.125 0.875 +0.750" in text


def test_an_evaluation_beside_a_baseline() -> None:
    facts: dict[str, Any] = {"flow": "evaluate", "steps": 0, "tokens": 0, "sets": SETS}
    metrics = [{"step": step, **validation_metrics("validation", 0.25 + 0.5 * step), "rewards/math/mean": 0.5} for step in (0, 1)]
    text = " ".join(Page(render_report(Summary(**summary(**facts).model_dump()), metrics, [], "")).text.split())
    assert "validation baseline model difference accuracy 0.250 [0.19, 0.31] 0.750 [0.69, 0.81] +0.500 [0.41, 0.59]" in text
    assert "baseline → model · [0.19, 0.31] → [0.69, 0.81]" in text
    assert "math 0.500 0.500 0.500" in text
    alone = summary(flow="evaluate", steps=0, tokens=0, accuracy_before=None, reward_before=None)
    text = " ".join(Page(render_report(alone, metrics[1:], [], "")).text.split())
    assert "Validation validation model accuracy 0.750 [0.69, 0.81] pass@4" in text
