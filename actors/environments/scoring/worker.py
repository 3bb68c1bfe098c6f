"""A scoring process: calls in, one answer for each, in order. It is killed from outside when a call takes too long.

    zygote ── fork ──► keeper ── fork ──► worker: build rewards ─► {"ready"} ─► calls ─► {"call": 7, "value": 1.0} ... {"rest"} ─► calls ...

`rest` says that all calls of a message are answered, and whether a verifier left threads or processes behind: then the worker ends itself.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping

from actors.environments.rewards.base import Reward
from actors.environments.scoring import confine
from actors.environments.scoring.verdict import Part, part_of
from actors.environments.scoring.wire import Call, message, one_line


def serve(line: socket.socket, build: Callable[[], Mapping[str, Reward]]) -> None:
    """Answer calls until the pool closes the line. In the main thread: verifiers may want signals."""
    try:
        rewards = build()
    except BaseException as error:  # noqa: BLE001  (a user's constructor may raise anything)
        line.sendall(message(ready=False, error=_said(error)))
        return
    line.sendall(message(ready=True))
    threads, own = threading.active_count(), os.getpid()
    incoming = line.makefile("rb")
    while incoming.peek(1):
        for call in pickle.load(incoming):
            part = answer(rewards, call)
            if os.getpid() != own:
                os._exit(0)  # a fork that the call made and that came back from it: its answer would be taken for one to the next call
            line.sendall(message(call=call.number, **vars(part)))
        dirty = threading.active_count() > threads or confine.has_children()
        line.sendall(message(rest=True, dirty=dirty))
        if dirty:
            return


def answer(rewards: Mapping[str, Reward], call: Call) -> Part:
    """What the reward says, or why it says nothing."""
    began = time.perf_counter()
    try:
        value = rewards[call.label].score(call.problem, call.response)
    except BaseException as error:  # noqa: BLE001  (exit(), MemoryError, anything: this response has no reward)
        return Part(None, "failed", time.perf_counter() - began, _said(error))
    return part_of(value, time.perf_counter() - began)


def _said(error: BaseException) -> str:
    try:
        return one_line(f"{type(error).__name__}: {error}")
    except BaseException:  # noqa: BLE001  (an exception whose text raises)
        return type(error).__name__
