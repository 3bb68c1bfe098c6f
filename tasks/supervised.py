"""Supervised fine-tuning: the next batch, and the loss on the held-out samples. (`train` and `clear` are those of every flow.)"""

from __future__ import annotations

from dataclasses import dataclass

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from tasks.call import RETRIED, STAGE, call


@dataclass(frozen=True)
class SupervisedBatch:
    """What the batch stage returns. (Prefect takes a bare meta for a mapping, because it has `keys`.)

    Attributes:
        dropped: training samples that were too long up to here.
    """

    meta: KVBatchMeta
    dropped: int


@task(name="batch", task_run_name="batch-{step}", **STAGE)
def supervised_batch(namespace: str, step: int, timeout_s: float) -> SupervisedBatch:
    """Put the next prompts and responses into the data plane."""
    meta: KVBatchMeta = call(namespace, names.COLLECTOR, "supervised", step, timeout_s=timeout_s)
    return SupervisedBatch(meta, meta.extra_info.get("dropped_samples", 0))


@task(name="validation-loss", task_run_name="validation-loss-{step}", **RETRIED)
def validation_loss(namespace: str, step: int, timeout_s: float) -> float:
    """Mean negative log-likelihood per response token over all held-out samples, in nats."""
    total = tokens = 0.0
    for index in range(call(namespace, names.COLLECTOR, "validation_batches", timeout_s=timeout_s)):
        meta = call(namespace, names.COLLECTOR, "validation_batch", index, timeout_s=timeout_s)
        try:
            found = call(namespace, names.POLICY, "evaluate", meta, timeout_s=timeout_s)
        finally:
            call(namespace, names.COLLECTOR, "clear", meta, timeout_s=timeout_s)
        total += found["loss"] * found["response_tokens"]
        tokens += found["response_tokens"]
    return total / tokens
