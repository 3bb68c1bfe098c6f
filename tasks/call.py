"""What every stage shares: the task options, and a call to a named actor."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE

from actors.waiting import find, wait

# A stage is neither cached nor persisted: its effect lies in the actors and the data plane, not in its small result.
STAGE: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}


def call(namespace: str, actor: str, method: str, *arguments: Any, timeout_s: float) -> Any:
    """Call a method of a named actor and wait for its value.

    Raises:
        ActorGoneError, ActorTimeoutError: the actor is lost or silent; the message names it and the method.
    """
    handle = find(actor, namespace)
    return wait(getattr(handle, method).remote(*arguments), who=actor, what=method, timeout_s=timeout_s)
