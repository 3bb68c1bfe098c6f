"""What a person sees of an `evaluate` run: a model alone, and beside a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.reporting.html import render_report
from tasks.reporting.run_dir import RunDirectory, point_latest
from tasks.reporting.summary import Summary, render_summary_text


def evaluated(**changes: Any) -> Summary:
    fields: dict[str, Any] = {
        "flow": "evaluate", "name": "mine", "recipe": "evaluate-cpu", "seed": 7, "status": "completed", "steps": 0, "seconds": 41.0,
        "tokens": 0, "accuracy_after": 0.875, "reward_after": 0.75, "seconds_per_stage": {"launch": 40.0, "validate": 1.0},
    }  # fmt: skip
    return Summary(**fields | changes)


BESIDE = {"accuracy_before": 0.5, "reward_before": 0.25}


def sample(step: int, phase: str, response: str, reward: float) -> dict[str, Any]:
    return {
        "step": step, "phase": phase, "prompt": "3 + 4?", "response": response, "answer": "7", "reward": reward, "weight_version": 0,
    }  # fmt: skip


def test_text() -> None:
    assert render_summary_text(evaluated()).splitlines() == [
        "mine: completed in 41.0 s, seed 7",
        "  accuracy      0.875",
        "  reward        0.750",
        "  time          launch 40.0 s, validate 1.0 s",
    ]
    assert "  accuracy      0.500 -> 0.875" in render_summary_text(evaluated(**BESIDE))


def test_report_beside_a_baseline() -> None:
    page = render_report(evaluated(**BESIDE), [], [sample(0, "before", "8", 0.0), sample(1, "after", "7", 1.0)], "")
    assert "<th>baseline</th>" in page
    assert "<th>model</th>" in page
    assert "baseline → model" in page
    assert 'class="up"' in page
    for absent in ("Curves", "Time per step", "tokens trained on", "before (step"):
        assert absent not in page


def test_report_of_a_model_alone() -> None:
    page = render_report(evaluated(), [], [sample(1, "before", "7", 1.0)], "")
    assert "<h2>Answers</h2>" in page
    assert "<th>model</th>" in page
    assert "baseline" not in page


def test_latest_stays_with_the_newest_model(tmp_path: Path) -> None:
    trained = RunDirectory.create(tmp_path, "trained")
    point_latest(trained)
    assert RunDirectory.create(tmp_path, "measured").root.is_dir()
    assert (tmp_path / "latest").resolve() == trained.root
