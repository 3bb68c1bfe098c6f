"""How far a run has come that writes below a folder."""

from __future__ import annotations

import json
from pathlib import Path


def steps_done(output: Path) -> int:
    """The last step in the run's metrics; -1: there is none."""
    lines = [line for path in output.glob("*/metrics.jsonl") if not path.parent.is_symlink() for line in path.read_text().splitlines()[-1:]]
    return max((int(json.loads(line)["step"]) for line in lines), default=-1)


def the_directory(output: Path) -> Path:
    """Of the one run."""
    (found,) = [path for path in output.iterdir() if path.is_dir() and not path.is_symlink()]
    return found
