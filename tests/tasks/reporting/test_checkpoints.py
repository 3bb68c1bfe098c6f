"""Which checkpoints stay and where the links point, by a run of losses against a plain rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.reporting.checkpoints import Checkpoints


def write(checkpoints: Checkpoints, step: int, loss: float) -> None:
    checkpoints.path(step).mkdir(parents=True)
    (checkpoints.path(step) / "model.safetensors").write_text(str(step))
    checkpoints.add(step, loss)


def found(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if not path.is_symlink()}


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 1.5), (50, 1.0)):
        write(checkpoints, step, loss)
    assert found(tmp_path) == {"step-20", "step-40", "step-50"}
    assert checkpoints.best == (20, 1.0)  # of equal losses the earlier
    assert (tmp_path / "best").readlink() == Path("step-20")
    assert (tmp_path / "latest" / "model.safetensors").read_text() == "50"


def test_a_better_one_takes_the_link_and_the_old_best_goes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step, loss in ((1, 2.0), (2, 3.0), (3, 1.0)):
        write(checkpoints, step, loss)
    assert found(tmp_path) == {"step-3"}
    assert (tmp_path / "best").readlink() == (tmp_path / "latest").readlink() == Path("step-3")


@settings(deadline=None)  # files: the time is the disk's
@given(losses=st.lists(st.floats(0, 10), min_size=1, max_size=12), keep=st.integers(1, 4))
def test_after_every_checkpoint(losses: list[float], keep: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(root, keep)
    for step, loss in enumerate(losses, start=1):
        write(checkpoints, step, loss)
        best = losses.index(min(losses[:step])) + 1
        assert found(root) == {f"step-{s}" for s in range(1, step + 1) if s > step - keep or s == best}
        assert (root / "best").readlink() == Path(f"step-{best}")
        assert (root / "latest").readlink() == Path(f"step-{step}")


def test_steps_need_not_rise(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step, loss in ((10, 1.0), (30, 2.0), (20, 3.0)):
        write(checkpoints, step, loss)
    assert found(tmp_path) == {"step-10", "step-30"}
