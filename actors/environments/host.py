"""The process of a user's environment: it makes the object, and answers calls of its methods until the other end closes the line.

line ──► reader thread ── calls ──► main thread: the user's object ──► ("value", "", value) or (exception's type, its text, None)
             └── closed: the process ends, whatever the object does
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from actors.environments.base import Environment
from actors.environments.hosted import Start
from actors.environments.registry import imported_here


def main() -> None:
    """Serve the process at the socket that is file descriptor number `argv[1]`."""
    line = Connection(int(sys.argv[1]))
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, calls), daemon=True).start()
    start: Start = pickle.loads(calls.get())
    sys.path[:] = start.path
    made = _answer(lambda: imported_here(start.environment))
    if made[0] != "value":
        line.send_bytes(pickle.dumps(made))
        return
    environment: Environment = made[2]
    levels = _answer(lambda: getattr(environment, "levels", None))
    streamed = all(hasattr(environment, name) for name in ("next_train", "stream_state", "restore_stream"))
    leveled = hasattr(environment, "problem_at") and levels[2] is not None
    line.send_bytes(pickle.dumps(("value", "", {"streamed": streamed, "levels": int(levels[2]) if leveled else None})))
    while True:
        method, arguments = pickle.loads(calls.get())
        line.send_bytes(_packed(_answer(lambda: getattr(environment, method)(*arguments))))  # noqa: B023  (called at once)


def _read(line: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            calls.put(line.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _answer(call: Any) -> tuple[str, str, Any]:
    try:
        return "value", "", call()
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's class may raise anything)
        return type(error).__name__, str(error), None


def _packed(answer: tuple[str, str, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001  (of a value's own __reduce__)
        return pickle.dumps((type(error).__name__, f"what it returned cannot be sent: {error}", None))


if __name__ == "__main__":
    main()
