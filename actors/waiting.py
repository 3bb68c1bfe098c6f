"""Waiting for Ray with a deadline, and with errors that name what was waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

_NOT_THERE = "actor {!r} is not in Ray namespace {!r}: it died, or the run has ended"


class ActorGoneError(RuntimeError):
    """An actor died, or was never there. The message names it and what it was doing."""


class ActorTimeoutError(TimeoutError):
    """An actor did not answer before the deadline. The message names it and what it was doing."""


class ActorUnreachableError(ActorTimeoutError):
    """Ray has lost contact with an actor: its process has ended, and Ray may start it again."""


def find(name: str, namespace: str) -> Any:
    """The handle of a named actor.

    Raises:
        ActorGoneError: no such actor in the namespace.
    """
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        raise ActorGoneError(_NOT_THERE.format(name, namespace)) from None


def look_for(name: str, namespace: str) -> None:
    """As `find`, but without a handle, which Ray makes of the actor's class: that imports the class's module, for seconds.

    Raises:
        ActorGoneError: no such actor in the namespace.
    """
    if {"name": name, "namespace": namespace} not in ray.util.list_named_actors(all_namespaces=True):
        raise ActorGoneError(_NOT_THERE.format(name, namespace))


def wait(ref: Any, *, who: str, what: str, timeout_s: float) -> Any:
    """The value of one reference. The error raised by the actor's own code comes through as it was.

    Raises:
        ActorGoneError, ActorTimeoutError.
    """
    return wait_all({who: ref}, what=what, timeout_s=timeout_s)[who]


def wait_all(refs: Mapping[str, Any], *, what: str, timeout_s: float) -> dict[str, Any]:
    """Values by name. The first failure ends the wait: its peers may be stuck in a collective with the failed one.

    Raises:
        ActorGoneError, ActorTimeoutError.
    """
    values: dict[str, Any] = {}
    for name, value, error in outcomes(refs, what=what, timeout_s=timeout_s):
        if error is not None:
            raise error
        values[name] = value
    return {name: values[name] for name in refs}


def outcomes(refs: Mapping[str, Any], *, what: str, timeout_s: float) -> Iterator[tuple[str, Any, Exception | None]]:
    """Name and value of each, or name, None and the error that `wait` would raise, as they come.

    Those that are silent at the deadline come last, each with one ActorTimeoutError that names them all.
    """
    names = {ref: name for name, ref in refs.items()}
    pending, deadline = list(names), time.monotonic() + timeout_s
    while pending:
        with signals():
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        for ref in done:
            try:
                value = _value(ref, names[ref], what)
            except Exception as error:  # noqa: BLE001  (the caller raises it)
                yield names[ref], None, error
            else:
                yield names[ref], value, None
        if not done:
            silent = [names[ref] for ref in pending]
            late = ActorTimeoutError(f"{what}: no answer from {', '.join(silent)} within {timeout_s:.0f} s")
            yield from ((name, None, late) for name in silent)
            return


def _value(ref: Any, who: str, what: str) -> Any:
    try:
        with signals():
            return ray.get(ref, timeout=10)
    except RayTaskError as error:
        raise cause(error) from error
    except ActorUnavailableError as error:
        raise ActorUnreachableError(f"{what}: {who} cannot be reached ({_reason(error)})") from error
    except RayActorError as error:
        raise ActorGoneError(f"{what}: {who} died ({_reason(error)})") from error
    except GetTimeoutError as error:
        raise ActorTimeoutError(f"{what}: the result of {who} could not be fetched within 10 s") from error


@contextmanager
def signals() -> Iterator[None]:
    """Let what a signal's handler raises through as it is, such as Prefect's TerminationSignal: Ray's waits make a SystemError of it."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def cause(error: RayTaskError) -> Exception:
    """What the actor's own code raised: Ray wraps it in a class of two bases, and a person should see the original."""
    return error.cause if isinstance(error.cause, Exception) else error


def _reason(error: RayActorError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    if "creation task" in lines[0]:
        return lines[-1]  # the constructor raised: the last line of its traceback says what
    return next((line for line in lines if "exit" in line.lower() or "killed" in line.lower()), lines[0])
