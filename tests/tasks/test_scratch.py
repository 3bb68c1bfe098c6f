"""A run's temporary place: gone with it, or with the next start; nobody else's is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from configs import settings
from tasks import scratch as module
from tasks.scratch import note_raylet, remove_semaphores, scratch, sweep
from tests.conftest import ROOT

HOLD = """
import sys, tempfile, pathlib
from tasks.scratch import note_raylet, scratch
with scratch() as place:
    note_raylet(place, int(sys.argv[1]))
    pathlib.Path(tempfile.mkdtemp(), "file").write_text("x")
    print(place, flush=True)
    sys.stdin.read()
"""
SHM = Path("/dev/shm")


@contextmanager
def holding(raylet: int) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process inside of a block, and its place."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(raylet)], cwd=ROOT, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def ended_pid() -> int:
    """A number that no process has, and none will get: those of ended ones come again within minutes on a busy machine."""
    return int(Path("/proc/sys/kernel/pid_max").read_text()) + os.getpid()


@pytest.fixture
def semaphores() -> Iterator[list[Path]]:
    """Files as Ray leaves them, of a raylet that has ended; the third is older than the test."""
    pid, now = ended_pid(), time.time_ns() + 10**9
    paths = [SHM / f"sem.{kind}{pid}-{at}" for kind, at in (("hdr", now), ("obj", now), ("hdr", now - 10**12))]
    for path in paths:
        path.write_bytes(bytes(32))
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def pid_in(path: Path) -> int:
    return int(path.name[7:].partition("-")[0])


def test_everything_temporary_is_inside_and_ends_with_the_block(temporary: Path) -> None:
    with scratch() as place:
        assert place.parent == temporary
        assert place.stat().st_mode & 0o077 == 0
        with scratch() as inner:
            assert inner == place
        Path(tempfile.mkdtemp(), "a").write_text("x")
        child = subprocess.run(
            [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"], capture_output=True, text=True, check=True
        )
        assert Path(child.stdout.strip()).parent == place
        assert [path for path in temporary.iterdir() if path != place] == []
    assert list(temporary.iterdir()) == []
    assert tempfile.gettempdir() == settings.get("TMPDIR") == str(temporary)


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(temporary: Path, semaphores: list[Path]) -> None:
    others = [temporary / "grpo-notours1", temporary / "grpo-checkpoints-ab", temporary / "other", temporary / "grpo-training"]
    for path in others:
        path.mkdir()
    (temporary / "grpo-training" / "lock").write_text("another program's")
    target = temporary / "other" / "kept"
    target.mkdir()
    (target / "lock").touch()
    others[0].rmdir()
    others[0].symlink_to(target)
    with holding(os.getpid()) as (alive, living), holding(pid_in(semaphores[0])) as (killed, left):
        sweep()
        assert living.exists()
        assert left.exists()
        killed.kill()
        killed.wait()
        with scratch():
            assert living.exists()
            assert not left.exists()
        assert [path.exists() for path in semaphores] == [False, False, True]
        assert set(temporary.iterdir()) == {*others, living}
        assert (target / "lock").exists()
        alive.communicate()
    assert set(temporary.iterdir()) == set(others) | {living}  # Ray's process, which is this one, runs: the next start looks again


def test_semaphores_of_a_living_raylet_and_those_of_others_stay(semaphores: list[Path]) -> None:
    mine, foreign = SHM / f"sem.hdr{os.getpid()}-1", SHM / f"sem.mp-{pid_in(semaphores[0])}-1"
    for path in (mine, foreign):
        path.touch()
    try:
        assert not remove_semaphores(os.getpid())
        assert remove_semaphores(pid_in(semaphores[0]))
        assert mine.exists()
        assert foreign.exists()
        assert not any(path.exists() for path in semaphores)
    finally:
        mine.unlink()
        foreign.unlink()


def test_a_raylet_that_ends_late_is_waited_for(temporary: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]) as raylet:
        with scratch() as place:
            note_raylet(place, raylet.pid)
            left = SHM / f"sem.obj{raylet.pid}-{time.time_ns()}"
            left.touch()
        assert not left.exists()
        assert list(temporary.iterdir()) == []


def test_where_ray_s_sockets_would_have_too_long_a_path_the_place_is_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("a" * 50)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert module._base() == Path("/tmp")


def test_a_place_that_is_handed_over_lives_as_long_as_its_process(temporary: Path) -> None:
    with module.handed_over() as (place, lock):
        heir = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[lock], env=module.environment(place))
    sweep()
    assert place.exists()
    heir.kill()
    heir.wait()
    sweep()
    assert list(temporary.iterdir()) == []
