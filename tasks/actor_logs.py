"""What the actors of a run print and log, in the flow run's log, each line with its actor's name.

    actor, vLLM, Megatron ── stdout, stderr ──► Ray's log files ── Ray's log monitor, every node ──► GCS
                                                                                                    │ subscribed, as Ray's own driver does
    flow run's log ◄── every 2 s: "[engine-0] ..." ◄── the last lines of each actor ◄───────────────┘

Ray's stream rather than a handler in each actor: it carries what libraries write past Python's logging, costs a step no call, and covers
all nodes and the last words of an actor that died. Per actor the newest 50 lines of each 2 s on stdout and on stderr are shown, and how
many were left out: progress on the one does not push an error off the other.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

import ray
import ray.util.client
from prefect.logging import get_run_logger
from ray._private.state import state as gcs_state
from ray._private.worker import global_worker
from ray._raylet import GcsLogSubscriber  # type: ignore[attr-defined]

_EVERY_S, _MOST_LINES = 2.0, 50
_LAST_WORDS_S = 3.0  # from an actor's line to here, when the run has failed; otherwise what is on its way by then is not waited for
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 40}


class LineBuffer:
    """The newest lines of each actor and stream since the last `take`. Pure; one thread."""

    def __init__(self, most_lines: int = _MOST_LINES) -> None:
        self._most = most_lines
        self._lines: dict[tuple[str, bool], deque[str]] = {}
        self._left_out: Counter[tuple[str, bool]] = Counter()

    def add(self, actor: str, lines: list[str], stderr: bool = False) -> None:
        """More lines, oldest first; blank ones do not count."""
        kept = self._lines.setdefault((actor, stderr), deque(maxlen=self._most))
        for line in lines:
            if line.strip():
                self._left_out[actor, stderr] += len(kept) == self._most
                kept.append(line)

    def take(self) -> list[tuple[int, str]]:
        """(level, text) of each line to log, stream by stream; what was left out comes first. Empties the buffer."""
        taken = []
        for (actor, stderr), lines in self._lines.items():
            if missing := self._left_out[actor, stderr]:
                taken.append((30, f"[{actor}] ... {missing} lines left out; Ray's log directory has all"))
            taken += [(level(line), f"[{actor}] {line}") for line in lines]
        self._lines, self._left_out = {}, Counter()
        return taken


def level(line: str) -> int:
    """The level that a line names within its first words; INFO if none."""
    found = _LEVEL.search(line[:60])
    return _LEVELS[found[1]] if found else 20


class ActorLogs:
    """Use as a context manager inside the flow, while Ray is joined; the actors may come later."""

    def __init__(self) -> None:
        self._job = ray.get_runtime_context().get_job_id()
        self._log: Any = get_run_logger()
        self._names: dict[tuple[str, int], str] = {}
        self._looked: dict[tuple[str, int], float] = {}  # when a process that has no name was looked for last
        self._buffer = LineBuffer()
        self._ending = threading.Event()
        self._until = float("inf")
        # In this context: Prefect's settings are in it, and a thread without them would report to a server of its own.
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name="actor-logs", daemon=True)

    def __enter__(self) -> Self:
        if ray.util.client.ray.is_connected():
            self._log.warning("the actors' lines are not shown: a ray:// client has no link to Ray's log stream; join by host:port")
            return self
        self._subscriber = GcsLogSubscriber(address=global_worker.gcs_client.address)  # type: ignore[attr-defined]
        self._subscriber.subscribe()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._until = time.monotonic() + (0.0 if kind is None else _LAST_WORDS_S)
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _work(self) -> None:
        try:
            flushed = time.monotonic()
            while not self._ending.is_set() or time.monotonic() < self._until:
                data = self._subscriber.poll(timeout=0.5)
                if data is not None and data["job"] == self._job:
                    self._buffer.add(self._name(data), data["lines"], data["is_err"])
                if time.monotonic() - flushed >= _EVERY_S:
                    self._flush()
                    flushed = time.monotonic()
        except Exception:  # noqa: BLE001  (the run does not need its actors' lines)
            self._log.warning("the actors' log lines end here", exc_info=True)
        finally:
            self._flush()
            self._subscriber.close()

    def _flush(self) -> None:
        for number, text in self._buffer.take():
            self._log.log(number, text)

    def _name(self, data: dict[str, Any]) -> str:
        process = str(data["ip"]), int(data["pid"])
        if process not in self._names and time.monotonic() - self._looked.get(process, 0.0) > 1.0:
            self._looked[process] = time.monotonic()
            actors = gcs_state.actor_table(None, job_id=ray.JobID.from_hex(self._job)).values()  # also those that died meanwhile
            self._names |= {(actor["Address"]["IPAddress"], actor["Pid"]): actor["Name"] for actor in actors if actor["Name"]}
        return self._names.get(process) or f"{data['actor_name'] or 'worker'} {data['pid']}"
