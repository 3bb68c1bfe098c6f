"""benchmarks.peers without TRL and without a GPU: jobs, what is missing, pairs, tables, and what TRL would be told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.environments.registry import build
from actors.rollout.validation import held_out_problems
from benchmarks.grpo_step import SIZES
from benchmarks.peers.__main__ import main, newest, parse, planned, why_not
from benchmarks.peers.jobs import Job, Result, complete_lease, learning_jobs, missing, step_jobs
from benchmarks.peers.results import first_step, late_reward, learning_pairs, learning_table, ratios, settings_lines, step_table
from benchmarks.peers.trl_side import Sums, recipe, rows, said, settings_of

SECONDS = {("ours", 1): 4.0, ("ours", 3): 2.0, ("trl", 1): 8.0}


def results_of(jobs: Sequence[Job], lease: str, slow: float = 1.0) -> list[Result]:
    return [
        Result(
            job=job, lease=lease, device="H100", steps_s=tuple(slow * SECONDS[job.side, job.engines] * part for part in (0.9, 1.0, 1.3)),
            peak_gib=30.0, settings={"beta": 0.04} if job.side == "trl" else {}, versions={"trl": "1.16.0"} if job.side == "trl" else {},
        )
        for job in jobs
    ]  # fmt: skip


def learned(job: Job, accuracy: float, rewards: Sequence[float]) -> Result:
    return Result(
        job=job, lease="a", device="H100", steps_s=(1.0,) * len(rewards), rewards=tuple(rewards), before=(0.2, 0.1, 0.3),
        after=(accuracy, accuracy - 0.1, accuracy + 0.1),
    )  # fmt: skip


def test_the_sides_take_turns_with_one_engine_first() -> None:
    jobs = step_jobs(["32x16x256"], 2, 5)
    assert [(job.side, job.engines, job.turn) for job in jobs] == [
        ("ours", 1, 0), ("ours", 3, 0), ("trl", 1, 0), ("trl", 1, 1), ("ours", 3, 1), ("ours", 1, 1),
    ]  # fmt: skip
    learning = learning_jobs("32x16x32", ["float32"], [0, 1], 100)
    assert [(job.side, job.seed) for job in learning] == [("ours", 0), ("trl", 0), ("trl", 1), ("ours", 1)]
    assert len({job.name for job in (*jobs, *learning)}) == len(jobs) + len(learning)


def test_a_size_is_measured_within_one_lease() -> None:
    jobs = step_jobs(["8x8x8", "4x4x4"], 2, 5)
    first, second = jobs[:6], jobs[6:]
    before = results_of([*first, *second[:2]], "a")
    assert missing(jobs, before, "a") == second[2:]  # the lease goes on
    assert missing(jobs, before, "b") == second  # a new one: what the other began does not count
    after = before + results_of(second, "b")
    assert missing(jobs, after, "c") == []
    assert [complete_lease(jobs, after, size) for size in ("8x8x8", "4x4x4")] == ["a", "b"]
    assert complete_lease(jobs, before, "4x4x4") is None


def test_learning_runs_count_whichever_lease_they_are_from() -> None:
    jobs = learning_jobs("32x16x32", ["float32"], [0, 1], 60)
    there = [learned(jobs[0], 0.5, [0.5]), learned(jobs[2], 0.5, [0.5])]
    assert missing(jobs, there, "another") == [jobs[1], jobs[3]]


def test_ratios_are_of_one_turn() -> None:
    jobs = step_jobs(["8x8x8"], 2, 3)
    slower = {0: 1.0, 1: 3.0}
    results = [one for job in jobs for one in results_of([job], "a", slower[job.turn])]
    ours = [one for one in results if one.job.side == "ours" and one.job.engines == 1]
    trl = [one for one in results if one.job.side == "trl"]
    assert ratios(ours, trl) == pytest.approx([2.0, 2.0])  # though the second turn was three times as slow
    assert ratios(ours, trl[:1]) == pytest.approx([2.0])


def test_the_step_table_has_complete_sizes_alone() -> None:
    jobs = step_jobs(["8x8x8", "4x4x4"], 2, 3)
    lines = step_table(jobs, results_of(jobs[:7], "a"))
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells == ["8x8x8", "1", "4.00 (3.60–5.20)", "8.00 (7.20–10.40)", "2.00, 2.00", "128", "64", "30.0", "30.0"]
    assert lines[3].split("|")[2:6] == [" 3 ", " 2.00 (1.80–2.60) ", " 8.00 (7.20–10.40) ", " 4.00, 4.00 "]
    assert step_table(jobs, results_of(jobs[:5], "a")) == []
    assert settings_lines(results_of(jobs[:6], "a")) == ["TRL, step 8x8x8: trl 1.16.0, beta 0.04"]


def test_the_learning_table_and_its_pairs() -> None:
    jobs = learning_jobs("32x16x32", ["float32"], [0, 1], 60)
    flat = [0.1] * 30
    by = {("ours", 0): (0.6, 0.5), ("trl", 0): (0.7, 0.7), ("ours", 1): (0.6, 0.6), ("trl", 1): (0.8, 0.7)}
    results = [learned(job, by[job.side, job.seed][0], flat + [by[job.side, job.seed][1]] * 30) for job in jobs]
    assert [late_reward(one) for one in results] == pytest.approx([0.5, 0.7, 0.7, 0.6])
    assert first_step(results[0], 0.5) == 31
    assert late_reward(learned(jobs[0], 0.5, [1.0] * 49)) is None
    lines = learning_table(results[::-1])
    assert [line.split("|")[2:4] for line in lines[2:]] == [[" ours ", " 0 "], [" trl ", " 0 "], [" ours ", " 1 "], [" trl ", " 1 "]]
    assert len({line.count("|") for line in lines}) == 1
    pairs = learning_pairs(results)
    assert len(pairs) == 2
    assert "ours less TRL's -0.150 [-0.79, 0.49], 2 seeds" in pairs[0]  # of -0.2 and -0.1: 12.706 times 0.05 either way
    assert learning_pairs(results[:2]) == []


@pytest.mark.parametrize(
    "job", [*step_jobs(SIZES, 1, 5), *learning_jobs("32x16x32", ["float32", "bfloat16"], [1], 100)], ids=lambda job: job.name
)
def test_trl_is_told_what_our_recipe_says(job: Job) -> None:
    config = recipe(job)
    told = settings_of(job, config)
    prompts, responses, length = map(int, job.size.split("x"))
    assert told["per_device_train_batch_size"] * told["gradient_accumulation_steps"] == prompts * responses == config.samples_per_step
    assert told["per_device_train_batch_size"] % told["num_generations"] == 0
    assert (told["num_generations"], told["max_completion_length"]) == (responses, length)
    assert (told["learning_rate"], told["beta"]) == (config.policy.optimizer.lr, config.policy.loss.kl_coef)
    assert told["max_steps"] == (8 if job.part == "step" else 100)
    assert ("generation_kwargs" in told) == (job.part == "step")
    assert config.seed == told["seed"] == job.seed


def test_the_verifier_of_the_sums_is_ours() -> None:
    config = recipe(learning_jobs("32x16x32", ["float32"], [0], 100)[0])
    environment = build(config.environment, config.seed)
    sums = Sums(config, environment)
    problems = held_out_problems(environment)[:4]
    assert len(held_out_problems(environment)) == 512
    right = [f"The final answer is {problem.answer}" for problem in problems]
    assert sums.accuracy(problems, right)[0] == 1.0
    assert sums.accuracy(problems, [right[0], "I do not know", f"{right[2]}7", right[3]])[0] == 0.5
    assert sums.verdict(problems[0], said([{"role": "assistant", "content": right[0]}])).reward == 1.0
    asked = rows(problems, chat=True)
    assert [one["number"] for one in asked] == [0, 1, 2, 3]
    assert asked[1]["prompt"] == [{"role": "user", "content": problems[1].question}]
    assert rows(problems, chat=False)[0]["prompt"].endswith("\n")


def test_without_trl_or_a_gpu_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if why_not() is None:
        pytest.skip("this machine has both")
    assert main(["step", "--out", str(tmp_path / "out")]) == 2
    said_of_it = capsys.readouterr().err
    assert said_of_it.startswith("error: ")
    assert said_of_it.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_tables_of_several_leases_are_printed_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["step", "--sizes", "8x8x8"])
    jobs = planned(options)
    for name, part in (("first", jobs[:2]), ("second", jobs)):
        (tmp_path / name).write_text("".join(f"{one.model_dump_json()}\n" for one in results_of(part, name)))
    assert main(["step", "--sizes", "8x8x8", "--table", str(tmp_path / "first"), str(tmp_path / "second")]) == 0
    printed = capsys.readouterr().out
    assert "| 8x8x8 | 1 | 4.00 " in printed
    assert printed.strip().splitlines()[-1].startswith('{"name": "peers", "value": 2.0,')


def test_of_several_tries_the_last_is_read(tmp_path: Path) -> None:
    for name in ("learning-ours-s1", "learning-ours-s1-2", "learning-ours-s1-10", "learning-ours-s10", "latest"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path, "learning-ours-s1").root.name == "learning-ours-s1-10"
