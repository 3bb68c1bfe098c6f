"""Processes that outlive the command that started them: `make up` records them here, and `make down` finds and stops exactly these.

 <home>/.grpo/up.json   the boot, and of every part: process id, start time, address
 <home>/.grpo/*.log     what each part says

Each part leads a session (setsid) of its own, so whatever it starts is found by the session's id, also after the part itself has died.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from configs.base import ConfigError

PACKAGE = Path(__file__).parent.parent.parent  # with the four rooms: a checkout, or site-packages
_TAIL_LINES = 15
_KILLED_S = 30.0  # longest wait after SIGKILL: on a loaded machine a process gets the core time that its end needs late


@dataclass(frozen=True)
class Process:
    """One line of /proc: who it is."""

    pid: int
    session: int
    started: int  # clock ticks since boot: with the pid, an identity that no later process of this boot shares


@dataclass(frozen=True)
class Part:
    """A started process. `address` is what it was started for: where it listens, or where it reports."""

    name: str
    pid: int
    started: int
    address: str

    def alive(self) -> bool:
        """Whether this very process runs (and not another one that got its number)."""
        return look(self.pid) == Process(self.pid, self.pid, self.started)

    def members(self) -> list[Process]:
        """The part and everything that it started and still runs."""
        leader = look(self.pid)
        if leader is not None and leader.started != self.started:
            return []  # the number is someone else's now, so the session has ended
        return [process for process in processes() if process.session == self.pid and process.started >= self.started]

    def stop(self, first: signal.Signals, timeout_s: float) -> None:
        """Ask the part to end, then those that stayed, each within the timeout; then make them. Idempotent."""
        if self.alive():
            _send(self.pid, first)
            _await_end(self.alive, timeout_s)
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _KILLED_S)):
            for process in self.members():
                _send(process.pid, number)
            _await_end(lambda: bool(self.members()), wait_s)


def is_checkout() -> bool:
    """Whether this code is of a checkout, and not of an installed wheel."""
    return (PACKAGE / "pyproject.toml").is_file()


def default_home() -> Path:
    """Where `up` works unless it is told: the checkout; of an installed wheel, the working directory."""
    return PACKAGE if is_checkout() else Path.cwd()


class Record:
    """The parts that run from one home directory. Every change is on disk at once, so a killed command leaves a true record."""

    def __init__(self, home: Path) -> None:
        self.directory = home / ".grpo"
        self._file = self.directory / "up.json"
        self.parts: dict[str, Part] = {}
        if self._file.is_file():
            data = json.loads(self._file.read_text())
            if data["boot"] == _boot():  # else the machine was started anew, and nothing of it runs
                self.parts = {part["name"]: Part(**part) for part in data["parts"]}

    @classmethod
    @contextmanager
    def locked(cls, home: Path) -> Iterator[Self]:
        """The record, for one command at a time.

        Raises:
            ConfigError: another command holds it.
        """
        directory = home / ".grpo"
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError("another `make up` or `make down` is at work in this directory: wait for its end") from None
            yield cls(home)

    def log(self, name: str) -> Path:
        """Where a part's output goes."""
        return self.directory / f"{name}.log"

    def start(
        self, name: str, address: str, command: Sequence[str], environment: Mapping[str, str], cwd: Path, holds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a part and record it. Args: holds: file descriptors that it inherits."""
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,
                pass_fds=holds,
                # A shell starts background commands with SIGINT ignored, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        _, found = _status(process.pid)  # also of one that has ended: it is a zombie until it is waited for
        self.parts[name] = Part(name, process.pid, found.started, address)
        self._write()
        return process

    def stop(self, name: str, first: signal.Signals, timeout_s: float) -> None:
        """Stop a part and forget it."""
        self.parts[name].stop(first, timeout_s)
        del self.parts[name]
        self._write()

    def await_true(self, name: str, what: str, check: Callable[[], bool], timeout_s: float) -> None:
        """Until the check holds.

        Raises:
            ConfigError: the part died or took too long; with the last lines of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not check():
            if not self.parts[name].alive():
                raise self._dead(name)
            if time.monotonic() > deadline:
                raise ConfigError(f"{name}: {what} took longer than {timeout_s:.0f} s; {self._last_lines(name)}")
            time.sleep(0.2)
        if not self.parts[name].alive():  # whatever the check saw, it was not this part
            raise self._dead(name)

    def _dead(self, name: str) -> ConfigError:
        """The error of a part that ended by itself."""
        return ConfigError(f"{name}: it ended by itself; {self._last_lines(name)}")

    def _last_lines(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n  ".join([f"the end of {self.log(name)}:", *lines])

    def _write(self) -> None:
        if not self.parts:
            self._file.unlink(missing_ok=True)
            return
        text = json.dumps({"boot": _boot(), "parts": [asdict(part) for part in self.parts.values()]}, indent=2)
        new = self._file.with_suffix(".new")
        new.write_text(text)
        new.replace(self._file)


def look(pid: int) -> Process | None:
    """The running process of that number; one that has ended and awaits its parent's look counts as none."""
    try:
        state, process = _status(pid)
    except OSError:
        return None
    return None if state in "ZX" else process


def _status(pid: int) -> tuple[str, Process]:
    """State and identity of the process of that number. Raises OSError if there is none."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # proc(5): the name may hold anything; then state is field 3, session 6, starttime 22
    return fields[0], Process(pid, int(fields[3]), int(fields[19]))


def processes() -> list[Process]:
    """All that run."""
    found = (look(int(path.name)) for path in Path("/proc").glob("[0-9]*"))
    return [process for process in found if process is not None]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _await_end(runs: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while runs() and time.monotonic() < deadline:
        time.sleep(0.1)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
