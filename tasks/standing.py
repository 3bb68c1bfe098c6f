"""Which actors of a run go on after a loss, and which are ended so that they can start anew.

engines that answer          stay; they forget their requests, and get weights by the refit that follows
environment that answers     stays: scoring keeps no state
everything else              ends: its state is that of the checkpoint
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import ray

from actors import names
from actors.data_plane import transfer_queue as queue
from actors.waiting import ActorTimeoutError, outcomes, signals
from tasks.handles import RunActors

_ANSWER_S = 15.0
_GONE_S = 60.0
_LEAVE_S = 3.0  # Prefect kills a run that was cancelled: see checkpoint.grace_s


def keep_standing(namespace: str, handles: Mapping[str, Any], before: RunActors) -> dict[str, Any]:
    """End what must start anew. Returns the handles of what stays."""
    questions = {name: handles[name].forget_requests.remote() for name in before.engines if name in handles}
    if names.ENVIRONMENT in handles:
        questions[names.ENVIRONMENT] = handles[names.ENVIRONMENT].__ray_call__.remote(_nothing)
    asked = outcomes(questions, what="are you there", timeout_s=_ANSWER_S)
    stay = {name: handles[name] for name, _, error in asked if error is None}
    end({name: handle for name, handle in handles.items() if name not in stay})
    queue.stop(before.address)
    return {name: handle for name, handle in handles.items() if name in stay}


def end(handles: Mapping[str, Any]) -> None:
    """End these actors, the newest first. What is killed leaves Ray's semaphores behind, so the policy's leaves by itself, if it can.

    It is killed all the same: while anything holds its handle, this process takes the name of an actor that has only left for taken.
    """
    policy = handles.get(names.POLICY)
    for handle in reversed(list(handles.values())):
        if handle is policy:
            _let_leave(handle)
        ray.kill(handle)


def _let_leave(policy: Any) -> None:
    for leave in (policy.close, policy.__ray_terminate__, policy.__ray_ready__):  # the last is answered by its death
        with signals():
            done, _ = ray.wait([leave.remote()], timeout=_LEAVE_S)
        if not done:
            return


def wait_until_gone(namespace: str, stay: Collection[str]) -> None:
    """Until the cluster has no actor of the run but these, so that their names can be given anew.

    Raises:
        ActorTimeoutError: one is still there after a minute.
    """
    deadline = time.monotonic() + _GONE_S
    while left := {one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == namespace} - set(stay):
        if time.monotonic() > deadline:
            raise ActorTimeoutError(f"{', '.join(sorted(left))} did not end within {_GONE_S:.0f} s")
        time.sleep(0.1)


def _nothing(_: Any) -> None:
    """What an actor that is there can do."""
