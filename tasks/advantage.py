"""advantage: rewards to advantages, from tags alone, written as one scalar column."""

from __future__ import annotations

from collections import defaultdict

import torch
from prefect import task
from pydantic import BaseModel

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.meta import KVBatchMeta
from actors.policy.objectives import advantages as functions
from configs.policy import LossConfig
from tasks.call import RETRIED


class Advantages(BaseModel, frozen=True):
    """What the advantage stage returns: the rows to train on, and statistics of the whole batch."""

    meta: KVBatchMeta
    metrics: dict[str, float]


@task(name="advantage", task_run_name="advantage-{step}", **RETRIED)
def advantage(
    address: DataPlaneAddress, step: int, meta: KVBatchMeta, loss: LossConfig, keep_multiple_of: int | None, timeout_s: float
) -> Advantages:
    """Write `advantages`, by the function that `loss.advantages` names.

    Args:
        keep_multiple_of: leave out groups of equal rewards (dynamic sampling), but for rows that make the batch divide by this.
    """
    function = functions.find(loss.advantages)
    groups = by_group(meta)
    values = [0.0] * len(meta)
    for rows in groups:
        kept = [row for row in rows if not meta.tags[row]["dropped"]]  # the others leave the group's mean, and have no gradient
        advantages = function([meta.tags[row]["reward"] for row in kept], normalize=loss.normalize_advantages) if kept else []
        for row, value in zip(kept, advantages, strict=True):
            values[row] = float(value)
    dead = zero_variance(meta)
    meta = connect(address, timeout_s=timeout_s).put(meta, {"advantages": [torch.tensor(value) for value in values]}, overwrite=True)
    metrics = group_metrics(meta) | {"groups/zero_variance": len(dead) / len(groups)}
    chosen = meta if keep_multiple_of is None else drop_dead_groups(meta, dead, keep_multiple_of)
    return Advantages(meta=chosen, metrics=metrics | {"groups/trained": float(len(by_group(chosen)))})


def by_group(meta: KVBatchMeta) -> list[list[int]]:
    """Row numbers of each prompt's responses, in order of first appearance."""
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row, tag in enumerate(meta.tags):
        groups[tag["prompt_uid"], tag["weight_version"]].append(row)
    return list(groups.values())


def zero_variance(meta: KVBatchMeta) -> list[list[int]]:
    """Row numbers of the groups whose rewards are all equal, so that every advantage is 0. Dropped rows do not count."""
    return [rows for rows in by_group(meta) if len({float(meta.tags[row]["reward"]) for row in rows if not meta.tags[row]["dropped"]}) < 2]


def drop_dead_groups(meta: KVBatchMeta, dead: list[list[int]], multiple_of: int) -> KVBatchMeta:
    """Without the given groups, but for as many of their rows as make the batch divide; such rows have no gradient.

    If every group is dead, the batch stays whole: the step then only counts.
    """
    gone = [row for rows in dead for row in rows]
    alive = len(meta) - len(gone)
    if alive == 0:
        return meta
    filler = set(gone[: -alive % multiple_of])
    left_out = set(gone) - filler
    return meta.subset([row for row in range(len(meta)) if row not in left_out])


def group_metrics(meta: KVBatchMeta) -> dict[str, float]:
    """Mean and spread of the rewards that are trained on (0 where there is none), and lengths over the batch."""
    rewards = torch.tensor([float(tag["reward"]) for tag in meta.tags if not tag["dropped"]] or [0.0])
    lengths = torch.tensor([float(tag["response_length"]) for tag in meta.tags])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "response_length/mean": float(lengths.mean()),
        "truncated_fraction": sum(bool(tag["truncated"]) for tag in meta.tags) / len(meta),
    }
