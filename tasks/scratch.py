"""What a run keeps on its machine outside its own directory: all in one place, which ends with it, however it ends.

<temporary directory>/grpo-1a2b3c4d/
├── lock        held (flock) for as long as the run's process lives: the kernel lets go when it ends, also by SIGKILL
├── raylet      pid of the Ray that the run started; Ray's semaphores are /dev/shm/sem.hdr<pid>-<time>, sem.obj<pid>-<time>
├── r/          Ray's session: sockets and logs. Ray opens this folder to all users; the place above it stays shut
└── ...         temporary files of the run's process and of all that it starts (TMPDIR)

the run ends ──► its place is removed          it was killed ──► the next start on this machine gets the lock, and removes it
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from configs import settings

_PREFIX = "grpo-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")
_LOCK, _RAYLET = "lock", "raylet"
_OURS = b"grpo-flows: this directory is removed when nobody holds a lock on this file\n"
_SEMAPHORES = Path("/dev/shm")
RAY = "r"
_LONGEST_BASE = 22  # Ray's sockets lie deeper by up to 81 characters, and a socket's path has at most 103
_PATIENCE_S, _LOOK_S = 5.0, 0.05  # for processes that are ending and still write

_here = threading.Lock()
_open = ExitStack()
_place: Path | None = None
_users = 0


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for everything temporary of this process and of those that it starts inside the block. Blocks may lie in each other."""
    global _place, _users
    with _here:
        if _place is None:
            sweep()
            _place = _enter(_base())
        _users += 1
        place = _place
    try:
        yield place
    finally:
        with _here:
            _users -= 1
            if _users == 0:
                _place = None
                _open.close()


@contextmanager
def handed_over() -> Iterator[tuple[Path, int]]:
    """A place for a process that outlives this one. Yields it and its lock, which that process must inherit, and then holds alone."""
    sweep()
    place, lock = _take(_base())
    try:
        yield place, lock
    finally:
        os.close(lock)


def environment(place: Path) -> dict[str, str]:
    """Variables of processes whose temporary files go to the place; compiled kernels do not: they are a cache for the runs to come."""
    cache = settings.get("TORCHINDUCTOR_CACHE_DIR") or str(place.parent / f"torchinductor_{os.getuid()}")
    return {"TMPDIR": str(place), "TORCHINDUCTOR_CACHE_DIR": cache}


def note_raylet(place: Path, pid: int) -> None:
    """Ray's semaphores, which carry this pid, go with the place."""
    (place / _RAYLET).write_text(str(pid))


def sweep() -> None:
    """Remove the places of this user's processes that have ended without."""
    for path in _base().glob(f"{_PREFIX}*"):
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(OSError):  # another start was faster
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(lock, len(_OURS) + 1) == _OURS:
                    _clear(path, patience_s=0.0)
            finally:
                os.close(lock)


def remove_semaphores(pid: int, since_ns: int = 0) -> bool:
    """Of a raylet that has ended. False: there is a process of that number, and nothing was removed.

    Args:
        since_ns: Unix time. Older ones are those of another that had the same number.
    """
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return False
    for path in _SEMAPHORES.glob(f"sem.*{pid}-*"):
        name = re.fullmatch(rf"sem\.(?:hdr|obj){pid}-(\d+)", path.name)
        if name and int(name[1]) >= since_ns:
            with suppress(OSError):
                path.unlink()
    return True


def _base() -> Path:
    if _place is not None:
        return _place.parent
    base = Path(tempfile.gettempdir())
    return base if len(str(base)) <= _LONGEST_BASE else Path("/tmp")


def _enter(base: Path) -> Path:
    place, lock = _take(base)
    _open.callback(os.close, lock)
    _open.callback(_clear, place, _PATIENCE_S)
    _open.enter_context(_temporary_files_in(place))
    return place


def _take(base: Path) -> tuple[Path, int]:
    # Under another name until the lock is held: no sweep finds it before.
    fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
    lock = os.open(fresh / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, _OURS)
    return fresh.rename(fresh.with_name(fresh.name.removeprefix("."))), lock


@contextmanager
def _temporary_files_in(place: Path) -> Iterator[None]:
    before = tempfile.tempdir
    with settings.variables(**environment(place)):
        tempfile.tempdir = str(place)
        try:
            yield
        finally:
            tempfile.tempdir = before


def _clear(place: Path, patience_s: float) -> None:
    """All but the lock, then the lock: what cannot be removed yet is found by the next sweep."""
    deadline = time.monotonic() + patience_s
    while not _is_clear(place):
        if time.monotonic() > deadline:
            return
        time.sleep(_LOOK_S)
    (place / _LOCK).unlink()
    place.rmdir()


def _is_clear(place: Path) -> bool:
    raylet = place / _RAYLET
    if raylet.exists() and not remove_semaphores(int(raylet.read_text()), (place / _LOCK).stat().st_mtime_ns):
        return False
    for path in place.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
    return [path.name for path in place.iterdir()] == [_LOCK]
