from datetime import datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.summary import Summary, render_summary_text
from tests.tasks.reporting.runs import SETS, sft_summary, summary


def test_round_trip(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    written = summary(error="RuntimeError: é")
    written.write(directory)
    assert Summary.read(directory.summary) == written
    assert datetime.fromisoformat(written.finished_at).tzinfo is not None


def test_strict() -> None:
    with pytest.raises(ValidationError, match="status"):
        summary(status="fine")
    with pytest.raises(ValidationError, match="reward_befor"):
        summary(reward_befor=1.0)


def test_text_of_a_completed_run() -> None:
    assert render_summary_text(summary()).splitlines() == [
        "tiny: completed, 4 steps in 1 min 16 s, seed 7",
        "  accuracy      0.125 -> 0.875",
        "  reward        0.250 -> 0.750",
        "  tokens        8,000 (800 per second)",
        "  logprob error 2.00e-06 (mean of |generation - training|)",
        "  time          launch 1 min 00 s, train 6.0 s, rollout 4.0 s",
    ]


def test_text_of_a_run_that_failed_at_once() -> None:
    nothing = dict.fromkeys(["reward_before", "reward_after", "accuracy_before", "accuracy_after", "mean_logprob_error"])
    text = render_summary_text(summary(**nothing, status="failed", steps=0, tokens=0, seconds_per_stage={}, error="Oh:\n  no"))
    assert text.splitlines() == [
        "tiny: failed, 0 steps in 1 min 16 s, seed 7",
        "  accuracy      - -> -",
        "  reward        - -> -",
        "  tokens        0 (- per second)",
        "  logprob error - (mean of |generation - training|)",
        "  error         Oh: no",
    ]
    assert text.isascii()


def test_text_of_an_sft_run() -> None:
    assert render_summary_text(sft_summary()).splitlines() == [
        "taught: completed, 4 steps in 1 min 16 s, seed 7",
        "  valid. loss   5.250 -> 1.500 (best checkpoint: 1.250, step 2)",
        "  stopped by    early stop",
        "  tokens        8,000 (800 per second)",
        "  compute       0.0125 TFLOP/s per worker",
        "  time          launch 1 min 00 s, train 9.0 s, batch 1.0 s",
    ]


def test_text_of_an_sft_run_that_failed_at_once() -> None:
    nothing = dict.fromkeys(
        [
            "stopped_because",
            "validation_loss_before",
            "validation_loss_after",
            "validation_loss_best",
            "best_step",
            "mean_tflops_per_worker",
        ]
    )
    text = render_summary_text(sft_summary(**nothing, status="failed", steps=0, tokens=0, seconds_per_stage={}, error="no"))
    assert text.splitlines()[1:] == [
        "  valid. loss   - -> - (best checkpoint: -, step -)",
        "  stopped by    -",
        "  tokens        0 (- per second)",
        "  compute       - TFLOP/s per worker",
        "  error         no",
    ]


def test_tokens_per_second_are_those_of_the_flows_own_stages() -> None:
    assert sft_summary(seconds_per_stage={"rollout": 90.0, "batch": 2.0, "train": 6.0}).tokens_per_s == 1000
    assert summary(seconds_per_stage={"rollout": 2.0, "batch": 90.0, "train": 6.0}).tokens_per_s == 1000


def test_text_with_intervals_other_sets_and_responses_without_reward() -> None:
    text = render_summary_text(summary(sets=SETS, timed_out=0.004, failed=0.0, accuracy_before=0.25, accuracy_after=0.75))
    assert text.splitlines()[1:7] == [
        "  accuracy      0.250 [0.19, 0.31] -> 0.750 [0.69, 0.81] (+0.500 [0.41, 0.59])",
        "  reward        0.250 -> 0.750",
        "  tokens        8,000 (800 per second)",
        "  logprob error 2.00e-06 (mean of |generation - training|)",
        "  gsm8k         0.125 [0.06, 0.19] -> 0.375 [0.31, 0.44] (+0.250 [0.15, 0.35])",
        "  not scored    0.4% timed out",
    ]
    assert text.isascii()


def test_text_of_a_run_that_was_validated_once() -> None:
    text = render_summary_text(summary(sets={"validation": {"before": (0.125, 0.1, 0.15)}}, accuracy_after=None))
    assert "  accuracy      0.125 [0.10, 0.15] -> -" in text.splitlines()


def test_an_error_cannot_write_to_the_terminal() -> None:
    assert render_summary_text(summary(error="Oh:\x1b[2J\x07")).splitlines()[-1] == "  error         Oh:\\x1b[2J\\x07"


def test_sets_survive_the_file(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    written = summary(sets=SETS, timed_out=0.5)
    written.write(directory)
    assert Summary.read(directory.summary) == written
