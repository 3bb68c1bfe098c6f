import math
from pathlib import Path

from tasks.reporting.jsonl import read_lines
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.run_trackers import RunTrackers
from tests.tasks.reporting.runs import Said


def test_read_gives_what_was_written(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    # Line separators of Unicode, newlines, and a lone surrogate as a broken token leaves it: one sample stays one line.
    odd = "a\nb\r\n\u2028c\x85d\x00 \udc80 答"
    with RunTrackers(directory) as run:
        run.samples(0, "before", [Said("p", odd, "3", 0.25, 5), Said("q", "", "4", math.nan, 5)])
        run.samples(1, "train", [])
    assert directory.samples.read_bytes().count(b"\n") == 2
    plain = {
        "uid": "", "source": "", "success": None, "outcome": "scored", "rewards": {}, "tokens": 1, "truncated": False,
        "error": "",
    }  # fmt: skip
    assert read_lines(directory.samples) == [
        {"step": 0, "phase": "before", "prompt": "p", "response": odd, "answer": "3", "reward": 0.25, "weight_version": 5, **plain},
        {"step": 0, "phase": "before", "prompt": "q", "response": "", "answer": "4", "reward": None, "weight_version": 5, **plain},
    ]
