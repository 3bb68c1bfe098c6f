"""The long-running task of an asynchronous run: generation without pause, and how it stands."""

from __future__ import annotations

from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from actors import names
from actors.rollout.samples import Progress
from tasks.call import STAGE, call

_EVERY_S = 3.0  # between updates of the artifact
_ANSWER_S = 60.0


class GenerationEndedError(RuntimeError):
    """The collector gave up; the message says why."""


@task(name="rollout", task_run_name="rollout", **STAGE)
def generate(namespace: str, groups: int) -> dict[str, float]:
    """Generate until `stop_generating`. Returns groups and tokens in all, and per second.

    Args:
        groups: that the run will train on; what the progress artifact counts as 100 %.

    Raises:
        GenerationEndedError: the collector gave up. ActorGoneError, ActorTimeoutError: it is lost.
    """
    logger = get_run_logger()
    call(namespace, names.COLLECTOR, "begin_generating", timeout_s=_ANSWER_S)
    artifact = create_progress_artifact(progress=0.0, key="grpo-rollout", description="generation has begun")
    assert isinstance(artifact, UUID)  # prefect types the call as sync-or-async
    before: Progress | None = None
    while True:
        progress: Progress = call(namespace, names.COLLECTOR, "progress", _EVERY_S, timeout_s=_EVERY_S + _ANSWER_S)
        for line in progress.log:
            logger.warning(line)
        if progress.error is not None:
            raise GenerationEndedError(progress.error)
        buffer = call(namespace, names.REPLAY, "metrics", timeout_s=_ANSWER_S)
        update_progress_artifact(
            artifact, progress=min(100.0, 100.0 * progress.groups / groups), description=_line(progress, before, buffer)
        )
        if progress.ended:
            seconds = max(progress.seconds, 1e-9)
            return {
                "groups": float(progress.groups),
                "tokens": float(progress.tokens),
                "groups_per_s": progress.groups / seconds,
                "tokens_per_s": progress.tokens / seconds,
            }
        before = progress


def stop_generating(namespace: str) -> None:
    """End the running `generate`.

    Raises:
        ActorGoneError, ActorTimeoutError: the collector is lost.
    """
    call(namespace, names.COLLECTOR, "stop_generating", timeout_s=_ANSWER_S)


def _line(now: Progress, before: Progress | None, buffer: dict[str, float]) -> str:
    seconds = max(now.seconds - (before.seconds if before else 0.0), 1e-9)
    groups, tokens = now.groups - (before.groups if before else 0), now.tokens - (before.tokens if before else 0)
    return (
        f"{groups / seconds:.1f} groups/s, {tokens / seconds:,.0f} tokens/s; {now.in_flight} groups in flight; "
        f"buffer {100 * buffer['replay/occupancy']:.0f} % full; mean staleness {buffer.get('replay/age/mean', 0.0):.2f}"
    )
