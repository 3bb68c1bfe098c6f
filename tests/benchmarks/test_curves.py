"""benchmarks.curves: one picture of several runs' metrics."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.curves import main


def run(directory: Path, *values: float) -> Path:
    directory.mkdir()
    lines = [{"step": 5 * index, "accuracy/validation": value} for index, value in enumerate(values)]
    (directory / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n{json.dumps({'step': line['step'], 'loss': 1})}\n" for line in lines)
    )
    return directory


def test_each_run_is_a_line_of_its_chart(tmp_path: Path) -> None:
    slow, fast = run(tmp_path / "slow", 0.25, 0.375, 0.5), run(tmp_path / "fast", 0.25, 0.75)
    assert (
        main([str(tmp_path / "out.svg"), "--chart", "Sums", f"GRPO={slow}", f"a teacher={fast}", "--chart", "Alone", f"GRPO={slow}"]) == 0
    )
    picture = ElementTree.parse(tmp_path / "out.svg")
    lines = [one.get("d", "") for one in picture.iter("{http://www.w3.org/2000/svg}path") if (one.get("class") or "").startswith("line")]
    assert [path.count("L") for path in lines] == [2, 1, 2]
    said = " ".join(picture.getroot().itertext())
    assert all(word in said for word in ("Sums", "Alone", "GRPO", "a teacher", "0.75", "0.5"))


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = run(tmp_path / "there", 0.5)
    assert main([str(tmp_path / "out.svg"), "--chart", "Sums", f"GRPO={there}", "--metric", "reward/mean"]) == 2
    assert main([str(tmp_path / "out.svg"), "--chart", "Sums", f"GRPO={tmp_path / 'nowhere'}"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: GRPO: no reward/mean in its metrics"
    assert "nowhere" in second
