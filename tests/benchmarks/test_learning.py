"""benchmarks.learning without a run: rows from a run's files, pairs, tables, and going on from what is there."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

from benchmarks.learning.__main__ import check, main, parse, plans, rewarded
from benchmarks.learning.results import Plan, Row, differences, pairs_table, reward_metric, runs_table, steps_or_more
from benchmarks.learning.student import _T, mean_95
from configs.base import ConfigError
from configs.loader import dump, load, preset_names
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.run_trackers import RunTrackers


def plan(preset: str = "grpo", seed: int = 0, steps: int = 3) -> Plan:
    return Plan(recipe="arithmetic-cpu", preset=preset, seed=seed, steps=steps, start="abc")


def row(preset: str, seed: int, rewards: tuple[float, ...], accuracy: float) -> Row:
    before, after = (0.3, 0.2, 0.4), (accuracy, accuracy - 0.1, accuracy + 0.1)
    return Row(plan=plan(preset, seed, len(rewards)), rewards=rewards, before=before, after=after, seconds=9, wall_s=40, device="CPU")


ROWS = [
    row("grpo", 0, (0.1, 0.5, 0.7), 0.6), row("cispo", 0, (0.2, 0.7, 0.8), 0.7),
    row("grpo", 1, (0.1, 0.2, 0.3), 0.5), row("cispo", 1, (0.2, 0.3, 0.75), 0.8), row("rloo", 2, (0.5, 0.5, 0.5), 0.9),
]  # fmt: skip


def test_the_quantiles_are_students() -> None:
    for freedom, quantile in enumerate(_T, start=1):
        scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
        parts = 20_000
        width = quantile / parts
        middles = ((part + 0.5) * width for part in range(parts))
        area = width * scale * math.fsum((1 + t * t / freedom) ** (-(freedom + 1) / 2) for t in middles)
        assert area == pytest.approx(0.475, abs=5e-5)


def test_an_interval_of_differences() -> None:
    found = mean_95([1.0, 2.0, 3.0, 4.0])
    half = 3.182 * math.sqrt(5 / 3) / 2
    assert (found.value, found.low, found.high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))
    moved = mean_95([value + 7 for value in (3.0, 1.0, 4.0, 2.0)])
    assert (moved.value, moved.low, moved.high) == pytest.approx((9.5, 9.5 - half, 9.5 + half))
    one = mean_95([0.25])
    assert (one.value, one.low, one.high) == (0.25, -math.inf, math.inf)
    with pytest.raises(ValueError, match="no values"):
        mean_95([])


def write(directory: RunDirectory, steps: int, *, last: int) -> None:
    with RunTrackers(directory) as run:
        run.metrics(0, {"accuracy/validation": 0.25, "accuracy/validation/low": 0.2, "accuracy/validation/high": 0.3})
        for step in range(1, steps + 1):
            run.metrics(step, {"rewards/sum/mean": step / 10, "reward/mean": 0.9, "time/step": 2.0})
        run.metrics(last, {"accuracy/validation": 0.5, "accuracy/validation/low": 0.4, "accuracy/validation/high": 0.6})


def test_a_row_is_read_from_a_runs_files(tmp_path: Path) -> None:
    write(RunDirectory(tmp_path), 3, last=3)
    found = Row.of(plan(), RunDirectory(tmp_path), 50.0, "CPU", "rewards/sum/mean")
    assert found.rewards == (0.1, 0.2, 0.3)
    assert (found.before, found.after) == ((0.25, 0.2, 0.3), (0.5, 0.4, 0.6))
    assert (found.seconds, found.reward) == (6.0, pytest.approx(0.2))
    assert [found.steps_to(reward) for reward in (0.1, 0.15, 0.4)] == [1, 2, None]
    assert Row.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("preset", rewarded())
def test_every_presets_reward_is_of_the_same_verifier(preset: str) -> None:
    assert reward_metric(load("arithmetic-cpu", [f"preset={preset}"])) == "rewards/reasoning_gym/mean"


def test_a_run_that_is_not_whole_makes_no_row(tmp_path: Path) -> None:
    write(RunDirectory(tmp_path), 2, last=2)
    with pytest.raises(ValueError, match="no rewards/sum/mean of step 3"):
        Row.of(plan(), RunDirectory(tmp_path), 50.0, "CPU", "rewards/sum/mean")
    (tmp_path / "other").mkdir()
    write(RunDirectory(tmp_path / "other"), 3, last=2)
    with pytest.raises(ValueError, match="no validation after step 3"):
        Row.of(plan(), RunDirectory(tmp_path / "other"), 50.0, "CPU", "rewards/sum/mean")


def test_differences_are_of_the_same_seed() -> None:
    found = differences(ROWS, "grpo", lambda row: row.after[0])
    assert set(found) == {"cispo"}  # of rloo's seed there is no grpo
    seeds, of = found["cispo"]
    half = 12.706 * math.sqrt(0.02) / math.sqrt(2)  # of 0.1 and 0.3
    assert (seeds, of.value, of.low, of.high) == (2, *(pytest.approx(value) for value in (0.2, 0.2 - half, 0.2 + half)))
    assert differences(ROWS[::-1], "grpo", lambda row: row.after[0])["cispo"][1].value == pytest.approx(0.2)
    assert [steps_or_more(one, 0.7) for one in ROWS] == [3, 2, 4, 3, 4]


def test_the_tables() -> None:
    lines = runs_table(ROWS, 0.7)
    assert len({line.count("|") for line in lines}) == 1
    cells = [cell.strip() for cell in lines[4].split("|")[1:-1]]
    assert cells[:6] == ["`grpo`", "1", "–", "0.200", "0.300 → 0.500 [0.40, 0.60]", "9"]
    pairs = pairs_table(ROWS, "grpo", 0.7)
    assert len({line.count("|") for line in pairs}) == 1
    assert [cell.strip() for cell in pairs[2].split("|")[1:-1]] == [
        "`cispo`", "2", "+0.200 [-1.07, 1.47]", "+0.175 [-0.35, 0.70]", "-1.0 [-1.0, -1.0]",
    ]  # fmt: skip
    assert "[" not in pairs_table(ROWS[:2], "grpo", 0.7)[2]  # one seed
    assert pairs_table(ROWS[:1], "grpo", 0.7) == runs_table([], 0.7) == []


def test_a_rows_command_makes_that_row() -> None:
    one = Plan(recipe="arithmetic-cpu", preset="dapo", seed=3, steps=7, start="abc", overrides=("policy.loss={kl_coef: 0.1}", "name=x"))
    words = shlex.split(one.command)
    assert words[:3] == ["python", "-m", "benchmarks.learning"]
    assert plans(parse(words[3:]), "abc") == [one]
    assert parse(words[3:]).seconds == float("inf")


def test_the_whole_table_and_the_first_look() -> None:
    options = parse(["--full"])
    every = plans(options, "")
    presets = [one.preset for one in every[: len(every) // 2]]
    assert set(presets) == set(preset_names()) - {"on-policy-distillation"}  # it wants a teacher
    assert (presets[0], {one.steps for one in every}) == ("grpo", {100})
    assert len(presets) >= 10
    assert [(one.preset, one.seed) for one in every] == [(name, seed) for seed in (0, 1) for name in presets]  # pairs are there early
    check(options)
    assert (len(plans(parse([]), "")), parse([]).seconds, options.seconds) == (2, 60.0, float("inf"))
    assert [one.seed for one in plans(parse(["--full", "--seeds", "5"]), "")] == [5] * len(presets)
    with pytest.raises(ConfigError, match="grop"):
        check(parse(["--presets", "grpo", "grop"]))


def test_what_is_there_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path), "--presets", "grpo", "cispo", "--steps", "3", "warm_start={steps: 0}"]
    every = plans(parse(arguments), "")
    rows = [one.model_copy(update={"plan": of}) for one, of in zip(ROWS, every, strict=False)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in rows))
    assert main(arguments) == 0
    said = capsys.readouterr().out.strip().splitlines()
    last = json.loads(said[-1])
    assert (last["name"], last["value"], last["detail"]["rows"], last["detail"]["planned"]) == ("learning", 0.7, 2, 2)
    assert last["detail"]["presets"]["cispo"]["steps_to"] == [2]
    assert any(line.startswith("| `cispo` | 0 |") for line in said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]  # nothing ran


def test_a_warm_start_of_other_settings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "start" / "hf").mkdir(parents=True)
    (tmp_path / "start" / "config.yaml").write_text(dump(load("arithmetic-cpu", ["warm_start.lr=5e-4"])))
    assert main(["--out", str(tmp_path)]) == 2
    assert "another warm_start" in capsys.readouterr().err
