"""generate: the long-running task beside all steps, which shows how generation stands."""

from __future__ import annotations

from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from actors import names
from actors.rollout.collector import Collector
from actors.rollout.ledger_actor import LedgerActor
from actors.rollout.samples import Progress
from tasks import events
from tasks.call import STAGE, ask, withdrawable

_EVERY_S = 3.0  # between updates of the artifact
_ANSWER_S = 60.0


class GenerationEndedError(RuntimeError):
    """The collector gave up; the message says why."""


@task(name="generate", task_run_name="generate", **STAGE)
@withdrawable
def generate(namespace: str, groups: int) -> dict[str, float]:
    """Generate until `stop_generating`. Returns groups and tokens in all, and per second.

    Args:
        groups: that the run will train on; what the progress artifact counts as 100 %.

    Raises:
        GenerationEndedError: the collector gave up. ActorGoneError, ActorTimeoutError: it is lost.
    """
    logger = get_run_logger()
    ask(namespace, names.COLLECTOR, _ANSWER_S, Collector.begin_generating)
    artifact = create_progress_artifact(progress=0.0, key="grpo-rollout", description="generation has begun")
    assert isinstance(artifact, UUID)  # prefect types the call as sync-or-async
    before: Progress | None = None
    while True:
        progress = ask(namespace, names.COLLECTOR, _EVERY_S + _ANSWER_S, Collector.progress, _EVERY_S)
        for line in progress.log:
            logger.warning(line)
        for change in progress.engines:
            if change.standing == "healthy":
                events.engine_back(change.engine)
            elif change.standing == "dead":
                events.engine_lost(change.engine, change.reason)
        if progress.error is not None:
            raise GenerationEndedError(progress.error)
        buffer = ask(namespace, names.LEDGER, _ANSWER_S, LedgerActor.metrics)
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
    ask(namespace, names.COLLECTOR, _ANSWER_S, Collector.stop_generating)


def _line(now: Progress, before: Progress | None, buffer: dict[str, float]) -> str:
    seconds = max(now.seconds - (before.seconds if before else 0.0), 1e-9)
    groups, tokens = now.groups - (before.groups if before else 0), now.tokens - (before.tokens if before else 0)
    return (
        f"{groups / seconds:.1f} groups/s, {tokens / seconds:,.0f} tokens/s; {now.in_flight} groups in flight; "
        f"buffer {100 * buffer['replay/occupancy']:.0f} % full; mean staleness {buffer.get('replay/age/mean', 0.0):.2f}"
    )
