"""A user's reward that does what the response says: for tests of what scoring processes survive."""

import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


def obey(completions: list[str], **columns: object) -> list[object]:
    """The response names one of the actions below, with an argument after a space."""
    (text,) = completions
    name, _, argument = text.partition(" ")
    return [ACTIONS[name](argument)]


def _fork_bomb(_: str) -> float:
    while True:
        os.fork()


def _come_back_twice(_: str) -> float:
    """2 in a fork, and later 1."""
    if os.fork() == 0:
        return 2.0
    time.sleep(0.5)
    return 1.0


def _leave_a_child(mark: str) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            fcntl.flock(os.open(mark, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
            Path(f"{mark}.held").touch()
            time.sleep(600)
        os._exit(0)
    while not Path(f"{mark}.held").exists():
        time.sleep(0.01)
    return 1.0


def _leave_a_thread(_: str) -> float:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return 1.0


def _print_a_gigabyte(_: str) -> float:
    for _ in range(1024):
        print("x" * 2**20)
        sys.stderr.write("x" * 2**20)
    return 1.0


def _deep(n: int) -> int:
    return _deep(n + 1)


def _write_to_every_descriptor(text: str) -> float:
    for fd in range(64):
        try:
            os.write(fd, text.encode())
        except OSError:
            continue
    return 1.0


def _fill_descriptors(_: str) -> float:
    for fd in range(64):
        try:
            os.set_blocking(fd, False)
            while os.write(fd, b"x" * 65536):
                pass
        except OSError:
            continue
    return 1.0


def _spawn(command: str) -> float:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return 1.0


ACTIONS = {
    "value": float,
    "text": lambda text: text,
    "none": lambda _: None,
    "list": lambda _: [1.0],
    "complex": lambda _: 1 + 2j,
    "huge": lambda _: 10**400,
    "true": lambda _: True,
    "loop": lambda _: all(zero == 0 for zero in iter(int, 1)),
    "sleep": lambda seconds: time.sleep(float(seconds)) or 1.0,
    "ignore_signals": lambda _: (
        [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)] and time.sleep(600)
    ),
    "memory": lambda _: len(bytearray(1 << 40)) * 1.0,
    "grow": lambda _: len([bytearray(1 << 24) for _ in range(100_000)]) * 1.0,
    "recursion": lambda _: float(_deep(0)),
    "exit": lambda code: sys.exit(code),
    "quit": lambda _: exit(),
    "hard_exit": lambda code: os._exit(int(code)),
    "kill": lambda number: os.kill(os.getpid(), int(number)) or 1.0,
    "kill_parent": lambda _: os.kill(os.getppid(), signal.SIGKILL) or 1.0,
    "kill_all": lambda _: os.kill(-1, signal.SIGKILL) or 1.0,
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP) or 1.0,
    "segfault": lambda _: ctypes.string_at(0) and 1.0,
    "fork_bomb": _fork_bomb,
    "come_back_twice": _come_back_twice,
    "leave_a_child": _leave_a_child,
    "leave_a_thread": _leave_a_thread,
    "spawn": _spawn,
    "print": _print_a_gigabyte,
    "raise": lambda text: (_ for _ in ()).throw(ValueError(text)),
    "interrupt": lambda _: (_ for _ in ()).throw(KeyboardInterrupt()),
    "bad_exception": lambda _: (_ for _ in ()).throw(_Unprintable()),
    "close_descriptors": lambda _: os.closerange(0, 1024) or 1.0,
    "write_descriptors": _write_to_every_descriptor,
    "fill_descriptors": _fill_descriptors,
    "secret": lambda name: 1.0 if name in os.environ else 0.0,
    "environ": lambda text: 1.0 if any(text in value for value in os.environ.values()) else 0.0,
    "connect": lambda port: float(socket.create_connection(("127.0.0.1", int(port)), 1).fileno() > 0),
    "thread_bomb": lambda _: [threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(100_000)] and 1.0,
    "big_file": lambda path: Path(path).write_bytes(bytes(2**30)) * 1.0,
}


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)
