"""What every stage shares: the task options, and a typed call to a named actor.

Which stages run again after a failure of the infrastructure (`transient`):

| task | again | because |
|---|---|---|
| logprob, ref-logprob | yes | the same values under the same keys, written over what is there |
| advantage | yes | a pure function of tags and columns, likewise |
| refit | yes | the present weights under their version, once more |
| validate, validation-loss | yes | they change nothing |
| clear of an sft step, data-plane metrics | yes | forgetting twice is no error; metrics are read |
| export-hf | yes | the same files again |
| train, pass-over, warm-start | never | a step that was applied but not answered for would be applied twice |
| rollout, and clear of a grpo step | never | the ledger counts each group once |
| checkpoint, publish-checkpoint, restore | never | a loss ends them: the run goes on from the checkpoint before |
| batch | never | it draws the next samples: the first draw's would be lost |
| launch, begin-grpo, begin-warm-start | never | they happen once, before there is anything to lose |
| put-inputs, compare | never | of a replay, which changes nothing and begins again as a whole |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, cast

import ray
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import State, TaskRun
from prefect.states import Cancelled
from prefect.utilities.annotations import quote

from actors.data_plane.interface import DataPlaneGoneError
from actors.generation.types import GenerationTimeoutError
from actors.policy.turns import WithdrawnError
from actors.waiting import ActorTimeoutError, find, wait

# A stage is neither cached nor persisted: its effect lies in the actors and the data plane, not in its small result.
STAGE: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}


def transient(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed stage is worth another try: something was silent or out of reach.

    Final are an actor that died (nothing restarts it, and its own error should end the run at once) and everything that is wrong with
    the data or the configuration.
    """
    return isinstance(state.data, ActorTimeoutError | GenerationTimeoutError | DataPlaneGoneError)


def quoted[T](value: T) -> T:
    """For an argument of a task: Prefect would otherwise walk through all of it in search of futures. The task gets the value itself."""
    return cast(T, quote(value))


# For stages that can be repeated.
RETRIED: dict[str, Any] = {**STAGE, "retries": 2, "retry_delay_seconds": [1, 5], "retry_condition_fn": transient}


def ask[A, **P, R](
    namespace: str, actor: str, timeout_s: float, method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call a method of a named actor and wait for its value: `ask(namespace, POLICY, 60, PolicyGroup.save_hf, path)`.

    Raises:
        ActorGoneError, ActorTimeoutError: the actor is lost or silent; the message names it and the method.
        WithdrawnError: the run ended meanwhile.
    """
    name = getattr(method, "__name__")  # noqa: B009  (mypy: a Callable need not have one)
    try:
        ref = getattr(find(actor, namespace), name).remote(*args, **kwargs)
        value: R = wait(ref, who=actor, what=name, timeout_s=timeout_s)
    except Exception:
        if not ray.is_initialized():  # by another thread: whatever Ray says about it is no news
            raise WithdrawnError(f"{actor}.{name}: the run ended before the answer came") from None
        raise
    return value


def withdrawable[**P, R](stage: Callable[P, R]) -> Callable[P, R | State]:
    """For the function of a task: when the stage is withdrawn, its task run ends as Cancelled."""

    @functools.wraps(stage)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | State:
        try:
            return stage(*args, **kwargs)
        except WithdrawnError as error:
            return Cancelled(message=str(error))

    return run
