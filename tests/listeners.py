"""Where processes listen, and what a stranger does there."""

from __future__ import annotations

import ipaddress
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq

from tests.patience import WAIT_S

_PICKLED = b"\xc1\xfe\xed"  # the frame after which TransferQueue unpickles the next one
_EVERY_S = 0.5


def said_by(user: int, code: str, argument: str) -> str:
    """What Python prints, also of an error, when another user runs the code: `sys.argv[1]` is the argument. Root only.

    It has os, socket and sys: another user may not read where Python's modules lie.
    """
    drop = f"import os, socket, sys; os.setuid({user}); "
    done = subprocess.run([sys.executable, "-I", "-c", drop + code, argument], capture_output=True, text=True, timeout=WAIT_S)
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Listener:
    """A TCP socket that waits for connections, and the process's title."""

    title: str
    ip: str
    port: int

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.ip.removeprefix("::ffff:")).is_loopback


class Command:
    """Unpickling it runs a shell command."""

    def __init__(self, line: str) -> None:
        self._line = line

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._line,)


def title(process: psutil.Process) -> str:
    """Its command line; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Of these processes, now. A socket that several processes share counts as that of one of them.

    All sockets of the machine are read at once: process by process costs several times as much.
    """
    wanted, found = set(pids), set()
    for one in psutil.net_connections("inet"):
        if one.pid in wanted and one.status == psutil.CONN_LISTEN:
            with suppress(psutil.Error):  # it ended while we looked
                found.add(Listener(title(psutil.Process(one.pid))[:80].strip(), one.laddr.ip, one.laddr.port))
    return found


@contextmanager
def watching(pids: Callable[[], Iterable[int]]) -> Iterator[set[Listener]]:
    """Those of these processes at any time of the block."""
    seen: set[Listener] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_EVERY_S):
            seen.update(listeners(pids()))

    thread = threading.Thread(target=look, name="listeners")
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def attack(
    places: Iterable[str], mark: Path, dial: Callable[[zmq.Socket[bytes]], None] = lambda stranger: None, wait_s: float = 2.0
) -> None:
    """Two frames to TransferQueue's sockets at these places, which make a file that begins with `mark` of each that unpickles them.

    Args:
        dial: gets each socket before it connects.
    """
    with zmq.Context() as context, ExitStack() as stack:
        context.linger = 0
        for number, place in enumerate(places):
            stranger = stack.enter_context(context.socket(zmq.DEALER))
            stranger.identity = b"TQ_STORAGE_stranger"  # a storage unit listens to such names only
            dial(stranger)
            stranger.connect(place)
            stranger.send_multipart([_PICKLED, pickle.dumps(Command(f"touch {mark}-{number}"))])
        time.sleep(wait_s)


def reached_from_outside(ports: Iterable[int]) -> list[tuple[str, int]]:
    """Those of these ports that take a connection at an address of this machine's network cards."""
    addresses = {
        place.address
        for places in psutil.net_if_addrs().values()
        for place in places
        if place.family in (socket.AF_INET, socket.AF_INET6)
        and "%" not in place.address
        and not ipaddress.ip_address(place.address).is_loopback
    }
    reached = []
    for address in addresses:
        for port in set(ports):
            with suppress(OSError), socket.create_connection((address, port), timeout=1):
                reached.append((address, port))
    return reached
