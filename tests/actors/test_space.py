"""Room on a disk: what a run needs, and what is said when it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.checkpoints.manifest import kept
from actors.space import MARGIN, Need, NoSpaceError, Room, Sizes, check_room, free_bytes, planned, require
from configs.base import ConfigError
from configs.checkpoint import CheckpointConfig

SIZES = Sizes(checkpoint=1000.0, reference=0.0, export=10.0)


@given(
    steps=st.integers(1, 60), every=st.integers(1, 20), last=st.integers(1, 4), keep=st.none() | st.integers(1, 12),
    best=st.booleans(), chosen=st.integers(0, 100),
)  # fmt: skip
def test_the_plan_holds_all_checkpoints_that_stand_at_any_time(
    steps: int, every: int, last: int, keep: int | None, best: bool, chosen: int
) -> None:
    """Against the rule that removes them, with any of them as the best; one is written before the others are looked at."""
    rules = CheckpointConfig(every_steps=every, keep_last=last, keep_every=keep, keep_best=best)
    standing: dict[int, float | None] = {}
    most, saved = 0, [step for step in range(1, steps + 1) if step % every == 0 or step == steps]
    for step in saved:
        standing[step] = 1.0 if step == saved[chosen % len(saved)] else 0.0
        most = max(most, len(standing))
        stay = kept(standing, last=last, every=keep, best=best)
        standing = {one: score for one, score in standing.items() if one in stay}
    (_, need) = planned(SIZES, rules, steps, Path("/c"), Path("/r"), 1)
    assert most * SIZES.checkpoint <= need.most
    assert need.least <= need.most


def test_sizes_of_a_model() -> None:
    """bf16 weights; float32 masters and two moments."""
    assert Sizes.of(1000, 2, reference=True) == Sizes(checkpoint=12_000, reference=2000, export=2000)
    assert Sizes.of(1000, 4, reference=False) == Sizes(checkpoint=12_000, reference=0, export=4000)


def test_a_store_elsewhere_needs_room_for_one_draft() -> None:
    needs = planned(SIZES, CheckpointConfig(every_steps=1, keep_last=5), 100, None, Path("/r"), 2)
    assert {need.path for need in needs} == {Path("/r")}
    assert sum(need.most for need in needs) == 1020


def test_too_little_is_refused_with_path_needed_and_free(tmp_path: Path) -> None:
    needs = [Need(tmp_path / "not" / "yet", "hf", 2**30, 2**30), Need(tmp_path, "2 checkpoints", 3 * 2**30, 8 * 2**30)]
    with pytest.raises(
        NoSpaceError, match=rf"^{tmp_path}/not/yet: the run will write at least 4\.0 GiB there \(up to: hf 1\.0 GiB, 2 check"
    ):
        check_room(needs, lambda _: 4 * 2**30)
    (warning,) = check_room(needs, lambda _: 4 * 2**30 + MARGIN)
    assert "may write 9.0 GiB there" in warning
    assert "4.0 GiB are free" in warning
    assert check_room(needs, lambda _: 9 * 2**30 + MARGIN) == []
    assert issubclass(NoSpaceError, ConfigError)


def test_each_disk_for_itself(tmp_path: Path) -> None:
    """/proc is another one than the temporary directory's."""
    needs = [Need(tmp_path, "hf", 10, 10), Need(Path("/proc"), "2 checkpoints", 20, 20)]
    asked: list[Path] = []

    def free(path: Path) -> int:
        asked.append(path)
        return MARGIN + 20

    assert check_room(needs, free) == []
    assert asked == [tmp_path, Path("/proc")]


def test_a_write_without_room_does_not_begin(tmp_path: Path) -> None:
    require(tmp_path, 100, "a model", lambda _: MARGIN + 100)
    with pytest.raises(NoSpaceError, match=r"no room for a model: 17\.0 MiB are needed, and 16\.0 MiB are free"):
        require(tmp_path, 2**20, "a model", lambda _: MARGIN)
    require(tmp_path / "not" / "yet", 0, "nothing", lambda _: MARGIN)
    assert free_bytes(tmp_path / "not" / "yet") > 0


@given(free=st.integers(0, 12_000), saves=st.integers(1, 12), last=st.integers(1, 3), exports=st.integers(0, 2), best=st.booleans())
def test_a_disk_that_fills_ends_the_run_with_a_checkpoint_and_room_for_its_export(
    free: int, saves: int, last: int, exports: int, best: bool
) -> None:
    """Simulated: no write ever lacks room, and whoever stops where it is told still has room for what the end writes."""
    rules, here = CheckpointConfig(keep_last=last, keep_best=best), Path("/")
    standing = 0
    room = Room(SIZES, exports, here, here, lambda _: free - standing * 1000 + MARGIN)
    for step in range(1, saves + 1):
        try:
            full = room.require_checkpoint(rules, step, standing, with_reference=False)
        except NoSpaceError:
            assert step == 1  # a later one was announced by the one before
            assert free < 1000
            return
        assert free - standing * 1000 >= 1000
        standing = min(standing + 1, last + best)
        if full:
            assert free - standing * 1000 < 1000 + exports * 10
            return
    assert free - standing * 1000 >= exports * 10


def test_checkpoints_that_are_larger_than_shapes_say(tmp_path: Path) -> None:
    room = Room(SIZES, 0, tmp_path, tmp_path, lambda _: MARGIN + 1500)
    room.require_checkpoint(CheckpointConfig(), 1, 3, with_reference=False)
    room.learn(1501)
    with pytest.raises(NoSpaceError, match="no room for the checkpoint of step 2"):
        room.require_checkpoint(CheckpointConfig(), 2, 3, with_reference=False)
