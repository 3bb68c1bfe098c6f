"""An environment of the user's own class, in a process that has only the environment variables that it is given.

    preflight, collector ... ── hosted() ──► Environment here ── call ──► host.py: the user's object, in a process of its own
                                                              ◄─ answer ─┘ plain values alone: nothing of the user's is imported here

The process ends with the object here, and with the process that has it, whichever way that ends.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

from actors.environments.base import Environment, Problem, Split
from configs import settings
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from configs.redaction import redacted
from configs.secrets import resolve

_END_S = 5.0
# Beside containers, numbers and text, which need none: what an answer may be made of. None of these runs code that an answer brings.
_CLASSES: tuple[type, ...] = (
    Problem, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction,
    set, frozenset, complex, bytearray,
)  # fmt: skip
_PLAIN = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}


class EnvironmentEndedError(RuntimeError):
    """The process of the user's class ended, or its answer is none."""


class UserEnvironmentError(RuntimeError):
    """A method of the user's class raised; the message has its exception's type and text."""


@dataclass(frozen=True)
class Start:
    """What a host is told: `sys.path` of the process that starts it, so that both import the same, and the class with its options."""

    path: tuple[str, ...]
    environment: EnvironmentConfig


@dataclass(frozen=True)
class Abilities:
    """What an object has beside `size` and `problem`. Levels: how many; None: it has none."""

    streamed: bool
    levels: int | None


class _Plain(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _PLAIN[module_name, global_name]
        except KeyError:
            raise EnvironmentEndedError(
                f"environment: a problem holds a {module_name}.{global_name}: give plain values in its columns "
                "(text, numbers, dates, None, and lists, sets and mappings of these)"
            ) from None


class _Host:
    """The process, and one call at a time."""

    def __init__(self, start: Start) -> None:
        self._start, self._lock = start, threading.Lock()
        self._begin()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actors.environments.host", str(theirs.fileno())],
                env=settings.bare_environment(self._start.environment.environment_variables, self._start.path),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which ends it
            )
        self._line = Connection(ours.detach())
        self._end = weakref.finalize(self, _end, self._line, self._process)
        kind, text, value = self._exchange(self._start)
        text = redacted(text)  # a client's message, say, with the URL that it asked
        if kind != "value":
            raise ConfigError(text if kind == ConfigError.__name__ else f"environment.import_path: {kind}: {text}")
        self.abilities = Abilities(**value)

    def ask(self, method: str, *arguments: Any, repeatable: bool = True) -> Any:
        """
        Args:
            repeatable: a host that ends meanwhile is started anew, once, and asked again.

        Raises:
            IndexError, ConfigError: the method raised it. UserEnvironmentError: the method raised something else.
            EnvironmentEndedError: the process ended.
        """
        with self._lock:
            try:
                kind, text, value = self._exchange((method, arguments))
            except (EOFError, OSError):
                if not repeatable:
                    raise self._ended() from None
                self._end()
                self._begin()
                kind, text, value = self._last_exchange((method, arguments))
        if kind == "value":
            return value
        text = redacted(text)
        known = {"IndexError": IndexError, "ConfigError": ConfigError}.get(kind)
        raise known(text) if known else UserEnvironmentError(f"environment: {method}: {kind}: {text}")

    def _last_exchange(self, message: Any) -> tuple[str, str, Any]:
        try:
            return self._exchange(message)
        except (EOFError, OSError):
            raise self._ended() from None

    def _exchange(self, message: Any) -> tuple[str, str, Any]:
        self._line.send_bytes(pickle.dumps(message))
        try:
            return cast(tuple[str, str, Any], _Plain(io.BytesIO(self._line.recv_bytes())).load())
        except pickle.UnpicklingError as error:
            raise EnvironmentEndedError(f"environment: its process answered something else than values: {error}") from None

    def _ended(self) -> EnvironmentEndedError:
        self._end()
        name = self._start.environment.import_path
        return EnvironmentEndedError(f"environment: the process of {name!r} ended (exit code {self._process.returncode})")


def _end(line: Connection, process: subprocess.Popen[bytes]) -> None:
    line.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class HostedEnvironment(Environment):
    """See the module. `score` is not asked for here: rewards have objects of their own, in the scoring processes."""

    def __init__(self, host: _Host) -> None:
        self._host = host

    def size(self, split: Split) -> int:
        return int(self._host.ask("size", split))

    def problem(self, split: Split, index: int) -> Problem:
        return _a_problem(self._host.ask("problem", split, index))


class _Streamed(HostedEnvironment):
    def next_train(self) -> Problem:
        return _a_problem(self._host.ask("next_train", repeatable=False))

    def stream_state(self) -> dict[str, Any]:
        return dict(self._host.ask("stream_state", repeatable=False))

    def restore_stream(self, state: dict[str, Any]) -> None:
        self._host.ask("restore_stream", state, repeatable=False)


class _Leveled(HostedEnvironment):
    @property
    def levels(self) -> int:
        return self._host.abilities.levels or 0

    def problem_at(self, level: int, split: Split, index: int) -> Problem:
        return _a_problem(self._host.ask("problem_at", level, split, index))


class _StreamedAndLeveled(_Streamed, _Leveled):
    pass


def hosted(config: EnvironmentConfig) -> HostedEnvironment:
    """The object of a `python` environment, made in a process of its own. Its secrets are looked up in this one.

    Raises:
        ConfigError: no such class, or options that it does not take.
    """
    options = resolve(config.options, "environment.options")
    host = _Host(Start(tuple(sys.path), config.model_copy(update={"options": options})))
    can = host.abilities
    if can.streamed:
        return _Streamed(host) if can.levels is None else _StreamedAndLeveled(host)
    return HostedEnvironment(host) if can.levels is None else _Leveled(host)


def _a_problem(value: Any) -> Problem:
    if not isinstance(value, Problem):
        raise UserEnvironmentError(f"environment: a Problem is wanted, this is {type(value).__name__}")
    return value
