"""What every stage shares: the task options, and a call to a named actor.

Which stages run again after a failure of the infrastructure (`transient`):

| task | again | because |
|---|---|---|
| logprob, ref-logprob | yes | the same values under the same keys, written over what is there |
| advantage | yes | a pure function of the tags, likewise |
| refit | yes | the present weights under their version, once more |
| validate, validation-loss | yes | they change nothing |
| clear, data-plane metrics | yes | forgetting twice is no error; metrics are read |
| export-hf, checkpoint | yes | the same files again; a checkpoint is moved into place when it is whole |
| train, warm-start | never | a step that was applied but not answered for would be applied twice |
| claim, and clear of an asynchronous step | never | the replay buffer counts each group once |
| rollout, batch | never | they draw the next prompts: the first draw's samples would be lost, or be under keys that nobody clears |
| launch, begin-grpo, begin-warm-start | never | they happen once, before there is anything to lose |
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.states import Cancelled

from actors import names
from actors.data_plane.interface import DataPlaneGoneError
from actors.generation.types import GenerationTimeoutError
from actors.policy.turns import Turn, WithdrawnError
from actors.waiting import ActorTimeoutError, find, wait
from tasks.coming import HEAD_START_S, Batch

# A stage is neither cached nor persisted: its effect lies in the actors and the data plane, not in its small result.
STAGE: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}


def transient(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed stage is worth another try: something was silent or out of reach.

    Final are an actor that died (nothing restarts it, and its own error should end the run at once) and everything that is wrong with
    the data or the configuration.
    """
    return isinstance(state.data, ActorTimeoutError | GenerationTimeoutError | DataPlaneGoneError)


# For stages that can be repeated.
RETRIED: dict[str, Any] = {**STAGE, "retries": 2, "retry_delay_seconds": [1, 5], "retry_condition_fn": transient}


# Set when the task run that was submitted with it has sent its first call.
_sent: ContextVar[threading.Event | None] = ContextVar("_sent", default=None)


def submit_and_send[**P, R](task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> PrefectFuture[R]:
    """Submit a task, and return when its call has left this process.

    Python runs one thread at a time: whatever the caller went on with would hold up the stage that the actors wait for.
    """
    sent = threading.Event()
    future = submit_and_note(sent, task, *args, **kwargs)
    sent.wait(HEAD_START_S)
    return future


def submit_and_note[**P, R](sent: threading.Event, task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> PrefectFuture[R]:
    """Submit a task that sets `sent` when its call has left this process."""
    token = _sent.set(sent)  # the task's thread runs in a copy of this context
    try:
        future: PrefectFuture[R] = task.submit(*args, **kwargs)
    finally:
        _sent.reset(token)
    future.add_done_callback(lambda _: sent.set())  # it may call nobody
    return future


def call(namespace: str, actor: str, method: str, *arguments: Any, timeout_s: float) -> Any:
    """Call a method of a named actor and wait for its value.

    Raises:
        ActorGoneError, ActorTimeoutError: the actor is lost or silent; the message names it and the method.
    """
    ref = getattr(find(actor, namespace), method).remote(*arguments)
    if sent := _sent.get():
        sent.set()
    return wait(ref, who=actor, what=method, timeout_s=timeout_s)


def call_policy(namespace: str, method: str, *arguments: Any, turn: Turn | None, timeout_s: float) -> Any:
    """A stage of the policy group, which may be sent before it is its turn. To be returned by a task as it is.

    Returns:
        The stage's metrics; or, of a stage that was withdrawn, the state that its task run ends in.

    Args:
        arguments: a `Batch` is waited for.
        timeout_s: of one stage; those before it take their own time.

    Raises:
        ActorGoneError, ActorTimeoutError: as `call`.
    """
    patience = turn.patience if turn else 1
    try:
        arguments = tuple(argument.meta() if isinstance(argument, Batch) else argument for argument in arguments)
        return call(namespace, names.POLICY, method, *arguments, turn, timeout_s=timeout_s * patience)
    except WithdrawnError as error:
        return Cancelled(message=str(error))
