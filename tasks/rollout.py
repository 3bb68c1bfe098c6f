"""rollout: the step's prompt groups, taken from the ledger as soon as they are there.

announce(version) ─► Ledger ─► places ─► RolloutLoop ─► groups ─► Ledger ◄─ rollout-N: claim
settle: trained, or given back ──────────────────────────────────────┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prefect import get_run_logger, task
from pydantic import BaseModel

from actors import names
from actors.checkpoints.errors import CheckpointError
from actors.data_plane.meta import KVBatchMeta
from actors.rollout.collector import Collector
from actors.rollout.inputs import StepInputs
from actors.rollout.ledger_actor import LedgerActor
from actors.rollout.ledger_types import Claim
from actors.rollout.samples import StepReport
from configs.rollout import RolloutConfig
from configs.staleness import AsyncConfig
from tasks import events
from tasks.advantage import by_group, zero_variance
from tasks.call import STAGE, ask, withdrawable
from tasks.clear import data_plane_metrics

_ANSWER_S = 60.0  # beyond a claim's own wait


class Rollout(BaseModel, frozen=True):
    """What a step trains on. `uids`: of the groups that were taken."""

    meta: KVBatchMeta
    uids: tuple[str, ...]
    metrics: dict[str, float]


@task(name="rollout", task_run_name="rollout-{step}", **STAGE)
@withdrawable
def rollout(namespace: str, step: int, wanted: RolloutConfig, rules: AsyncConfig, sleep_s: float | None) -> Rollout:
    """Wait for the step's groups and take them.

    Args:
        rules: of the ledger.
        sleep_s: let the engines sleep when all groups are there, within so many seconds; None: they stay awake.

    Raises:
        LedgerStalledError: they will not come. ActorGoneError, ActorTimeoutError: the ledger is lost; or the collector, when engines were
            to sleep. EngineDiedError: one of them is.
    """
    dropped: list[str] = []
    metrics: dict[str, float] = {}

    def claim(count: int) -> Claim:
        nonlocal metrics
        taken, metrics = _wait_for(namespace, count, rules)
        return taken

    def drop(dead: list[str]) -> None:
        ask(namespace, names.LEDGER, _ANSWER_S, LedgerActor.drop, dead, "zero_variance")
        get_run_logger().info("%d groups have no reward variance; taking others", len(dead))
        dropped.extend(dead)

    claims = fill(wanted.prompts_per_step, wanted.most_gen_batches, claim, drop)
    if sleep_s is not None:  # before the trainer hears of the groups: it needs the memory
        ask(namespace, names.COLLECTOR, sleep_s, Collector.sleep_engines)
    meta = KVBatchMeta.concat([taken.meta for taken in claims])
    return Rollout(
        meta=meta,
        uids=tuple(uid for taken in claims for uid in taken.uids),
        metrics=metrics
        | {"groups/replaced": float(len(dropped)), "groups/gen_batches": float(len(claims))}
        | staleness([age for taken in claims for age in taken.ages], meta),
    )


def fill(groups: int, most_batches: int, claim: Callable[[int], Claim], drop: Callable[[list[str]], None]) -> list[Claim]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without reward variance are thrown away, and others take their place.

    Where the ledger admits one step's groups only, the others are generated for this step, under the weights that it trains.

    Args:
        most_batches: largest number of claims. What the last one brings is kept as it is.
        claim: waits for so many groups and takes them. drop: throws groups away, by their uids.

    Returns:
        What is left of each claim: `groups` in all, none without variance but for those of the last of `most_batches` claims.
    """
    claims = [claim(groups)]
    while len(claims) < most_batches:
        dead = sorted({claims[-1].meta.tags[rows[0]]["prompt_uid"] for rows in zero_variance(claims[-1].meta)})
        if not dead:
            break
        drop(dead)
        claims[-1] = _without(claims[-1], dead)
        claims.append(claim(len(dead)))
    return claims


@task(name="settle", task_run_name="clear-{step}", **STAGE)
def settle(
    namespace: str, step: int, fates: Mapping[str, Sequence[str]], timeout_s: float, inputs: StepInputs | None, directory: Path
) -> dict[str, float]:
    """The step's groups were trained on, and their rows go; or they were not, and may be claimed again.

    Args:
        fates: uids by what became of them: trained, released (they may be claimed again), or why they are dropped.
        inputs: what is kept of the step in this directory, before its rows go. None: nothing.

    Returns:
        What the data plane did for the run so far; checkpoint/inputs_s, the seconds of keeping.
    """
    kept = {} if inputs is None else _keep(namespace, inputs, directory, timeout_s)
    for fate, uids in fates.items():
        match fate:
            case "trained":
                ask(namespace, names.LEDGER, _ANSWER_S, LedgerActor.trained, list(uids))
            case "released":
                ask(namespace, names.LEDGER, _ANSWER_S, LedgerActor.release, list(uids))
            case reason:
                ask(namespace, names.LEDGER, _ANSWER_S, LedgerActor.drop, list(uids), reason)
    return data_plane_metrics(namespace, timeout_s) | kept


def report(namespace: str) -> StepReport:
    """What the rollout loop did since it was asked last."""
    return ask(namespace, names.COLLECTOR, _ANSWER_S, Collector.report)


def announce(namespace: str, version: int) -> None:
    """The engines have the weights of this version; the next step trains them. Groups that are too old for it go."""
    ask(namespace, names.LEDGER, _ANSWER_S, LedgerActor.set_version, version)


def close_ledger(namespace: str) -> None:
    """The run has ended: rows that nobody trained go, and the journal ends."""
    ask(namespace, names.LEDGER, _ANSWER_S, LedgerActor.close)


def staleness(ages: Sequence[int], meta: KVBatchMeta) -> dict[str, float]:
    """How old the claimed groups are, in weight versions, and how many versions sampled each response.

    Returns:
        staleness/mean, /max and /age_K (fraction of the groups of age K); weight_versions/mean (per response), /max, and /mixed (fraction
        of the responses that more than one version sampled).
    """
    counts = Counter(ages)
    versions = [int(tag["weight_versions"]) for tag in meta.tags]
    return {
        "staleness/mean": math.fsum(ages) / len(ages),
        "staleness/max": float(max(ages)),
        **{f"staleness/age_{age}": count / len(ages) for age, count in sorted(counts.items())},
        "weight_versions/mean": math.fsum(versions) / len(versions),
        "weight_versions/max": float(max(versions)),
        "weight_versions/mixed": sum(version > 1 for version in versions) / len(versions),
    }


def _wait_for(namespace: str, groups: int, rules: AsyncConfig) -> tuple[Claim, dict[str, float]]:
    """The groups, and the ledger's metrics."""
    wait_s = rules.stall_report_every_s
    while True:
        reply = ask(namespace, names.LEDGER, wait_s + _ANSWER_S, LedgerActor.claim, groups, wait_s)
        for line in reply.log:
            get_run_logger().warning(line)
            events.stalled(line)
        if reply.claim is not None:
            return reply.claim, reply.metrics


def _keep(namespace: str, inputs: StepInputs, directory: Path, timeout_s: float) -> dict[str, float]:
    try:
        seconds = ask(namespace, names.COLLECTOR, timeout_s, Collector.keep_inputs, inputs, str(directory))
    except CheckpointError as error:  # a full disk; the step itself is well
        get_run_logger().warning("step %d cannot be replayed: %s", inputs.step, error)
        return {}
    return {"checkpoint/inputs_s": seconds}


def _without(taken: Claim, uids: Sequence[str]) -> Claim:
    gone = set(uids)
    kept = [index for index, uid in enumerate(taken.uids) if uid not in gone]
    rows = [row for group in by_group(taken.meta) for row in group if taken.meta.tags[row]["prompt_uid"] not in gone]
    return Claim(tuple(taken.uids[i] for i in kept), taken.meta.subset(rows), taken.version, tuple(taken.ages[i] for i in kept))
