"""Supervised fine-tuning: the next batch, and the loss on the held-out samples. (`train` and `clear` are those of every flow.)"""

from __future__ import annotations

from dataclasses import dataclass

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from actors.policy.group import PolicyGroup
from actors.preflight_sft import measure
from actors.rollout.supervised import SupervisedCollector
from tasks.call import RETRIED, STAGE, ask


@dataclass(frozen=True)
class SupervisedBatch:
    """What the batch stage returns. (Prefect takes a bare meta for a mapping, because it has `keys`.)

    Attributes:
        dropped: training samples that were too long up to here.
    """

    meta: KVBatchMeta
    dropped: int


# Of large data; may run in a Ray worker.
measure_samples = task(name="measure-samples", task_run_name="measure-{part.split}", **STAGE)(measure)


@task(name="batch", task_run_name="batch-{step}", **STAGE)
def supervised_batch(namespace: str, step: int, timeout_s: float) -> SupervisedBatch:
    """Put the next prompts and responses into the data plane."""
    meta = ask(namespace, names.COLLECTOR, timeout_s, SupervisedCollector.supervised, step)
    return SupervisedBatch(meta, meta.extra_info.get("dropped_samples", 0))


@task(name="validation-loss", task_run_name="validation-loss-{step}", **RETRIED)
def validation_loss(namespace: str, step: int, timeout_s: float) -> float:
    """Mean negative log-likelihood per response token over all held-out samples, in nats; with objective dpo its mean over pairs."""
    total = tokens = 0.0
    for index in range(ask(namespace, names.COLLECTOR, timeout_s, SupervisedCollector.validation_batches)):
        meta = ask(namespace, names.COLLECTOR, timeout_s, SupervisedCollector.validation_batch, index)
        try:
            found = ask(namespace, names.POLICY, timeout_s, PolicyGroup.evaluate, meta)
        finally:
            ask(namespace, names.COLLECTOR, timeout_s, SupervisedCollector.clear, meta)
        weight = found.get("pairs", found["response_tokens"])  # what the loss is a mean over
        total += found["loss"] * weight
        tokens += weight
    return total / tokens
