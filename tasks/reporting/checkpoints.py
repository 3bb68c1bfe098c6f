"""The checkpoints of a run: the newest few and the best one stay, the others go.

checkpoints/
├── step-40/              Hugging Face directories
├── step-80/
├── step-100/
├── best -> step-40       the lowest validation loss of those written
└── latest -> step-100
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tasks.reporting.run_dir import point


class Checkpoints:
    """Keeps house in one directory. The checkpoints themselves are written elsewhere (tasks/checkpoint.py).

    Args:
        keep: the newest that stay; the best one stays besides.

    Attributes:
        best: step and validation loss of the best one, or None before the first. Of equal losses the earlier.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self._steps: list[int] = []
        self.best: tuple[int, float] | None = None

    def path(self, step: int) -> Path:
        """Where a step's checkpoint is, or goes."""
        return self._root / f"step-{step}"

    def add(self, step: int, loss: float) -> None:
        """A step's checkpoint is written: set the links, and remove what need not stay."""
        self._steps.append(step)
        if self.best is None or loss < self.best[1]:
            self.best = (step, loss)
            point(self._root / "best", self.path(step))
        point(self._root / "latest", self.path(step))
        kept = sorted({*sorted(self._steps)[-self._keep :], self.best[0]})
        for gone in set(self._steps) - set(kept):
            shutil.rmtree(self.path(gone))
        self._steps = kept
