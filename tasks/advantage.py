"""advantage: rewards to advantages, written as a column: one number per row, of `reinforce` one per token.

rewards (tags) ──────────────────────────────► less the penalties ──► of each group ──► over the batch ──► advantages
policy_logprobs, reference_logprobs ──► KL ──► with loss.kl_in reward
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from prefect import task
from pydantic import BaseModel

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.meta import KVBatchMeta
from actors.policy.objectives import advantages as functions
from actors.policy.objectives.advantages.group_relative import over_the_batch
from actors.policy.objectives.advantages.reinforce import returns, whiten
from actors.policy.objectives.components import kl_estimate
from configs.loss import LossConfig
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
        meta: with `loss.kl_in` reward, of rows that have `policy_logprobs` and `reference_logprobs`.
        keep_multiple_of: leave out groups of equal rewards (dynamic sampling), but for rows that make the batch divide by this.
    """
    plane, groups, dead = connect(address, timeout_s=timeout_s), by_group(meta), zero_variance(meta)
    metrics = group_metrics(meta) | {"groups/zero_variance": len(dead) / len(groups)}
    read = ["policy_logprobs", "reference_logprobs"] if loss.kl_in_reward else []
    columns = plane.get(meta, ["token_mask", *read]) if read or loss.advantages == "reinforce" else {}
    masks, penalties = columns.get("token_mask", []), list[torch.Tensor]()
    if loss.kl_in_reward:
        estimates = kl_of_tokens(columns["policy_logprobs"], columns["reference_logprobs"], masks, loss)
        penalties = [k * loss.coefficient("kl", tag.get("source", "")) for k, tag in zip(estimates, meta.tags, strict=True)]
        metrics |= kl_metrics(meta, estimates, penalties, masks)
    if loss.advantages == "reinforce":
        values = token_advantages(meta, loss, penalties, masks)
    else:
        values = [torch.tensor(value) for value in response_advantages(meta, loss, penalties)]
    meta = plane.put(meta, {"advantages": values}, overwrite=True)
    chosen = meta if keep_multiple_of is None else drop_dead_groups(meta, dead, keep_multiple_of)
    return Advantages(meta=chosen, metrics=metrics | {"groups/trained": float(len(by_group(chosen)))})


def kl_of_tokens(
    policy: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], loss: LossConfig
) -> list[torch.Tensor]:
    """`loss.kl_estimator` of each sampled token, under the weights that the step begins with (InstructGPT, arXiv 2203.02155, eq. 2).

    Args:
        policy, reference: log-probabilities, [len] per row. masks: [len] bool, true on sampled tokens.

    Returns:
        [len] float64 per row, 0 on other tokens.
    """
    gaps = [torch.where(mask, r.double() - p.double(), 0.0) for p, r, mask in zip(policy, reference, masks, strict=True)]
    return [kl_estimate(gap, loss.kl_estimator) for gap in gaps]


def response_advantages(meta: KVBatchMeta, loss: LossConfig, penalties: Sequence[torch.Tensor] = ()) -> list[float]:
    """One advantage per row, of its reward less the sum of its penalties: as verl (`use_kl_in_reward`) and TRL's RLOO take it.

    Args:
        penalties: [len] per row; none: the rewards as they are.
    """
    function = functions.find(loss.advantages)
    paid = [float(tag["reward"]) for tag in meta.tags]
    for row, penalty in enumerate(penalties):
        paid[row] -= float(penalty.sum())
    values = [0.0] * len(meta)
    for rows in by_group(meta):
        kept = [row for row in rows if not meta.tags[row]["dropped"]]  # the others leave the group's mean, and have no gradient
        advantages = function([paid[row] for row in kept], normalize=loss.normalize_advantages == "group") if kept else []
        for row, value in zip(kept, advantages, strict=True):
            values[row] = float(value)
    if loss.normalize_advantages == "batch":
        kept = [row for row, tag in enumerate(meta.tags) if not tag["dropped"]]
        for row, value in zip(kept, over_the_batch([values[row] for row in kept]), strict=True):
            values[row] = value
    return values


def token_advantages(
    meta: KVBatchMeta, loss: LossConfig, penalties: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The return from each token on, [len] float32 per row, 0 off the masks and on dropped rows: REINFORCE++ (reinforce.py).

    Args:
        penalties, masks: [len] per row; no penalties: every token of a response has its reward.
    """
    kept = [mask & (not tag["dropped"]) for mask, tag in zip(masks, meta.tags, strict=True)]
    lost = penalties or [torch.zeros(len(mask), dtype=torch.float64) for mask in masks]
    values = [returns(float(tag["reward"]), penalty) * mask for tag, penalty, mask in zip(meta.tags, lost, kept, strict=True)]
    if loss.normalize_advantages == "batch":
        values = whiten(values, kept)
    return [value.float() for value in values]


def kl_metrics(
    meta: KVBatchMeta, estimates: Sequence[torch.Tensor], penalties: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]
) -> dict[str, float]:
    """kl: mean estimate per sampled token. reward/kl_penalty: mean over responses of each one's sum of penalties."""
    kept = [row for row, tag in enumerate(meta.tags) if not tag["dropped"]]
    tokens = sum(int(masks[row].sum()) for row in kept)
    return {
        "kl": math.fsum(float(estimates[row].sum()) for row in kept) / max(tokens, 1),
        "reward/kl_penalty": math.fsum(float(penalties[row].sum()) for row in kept) / max(len(kept), 1),
    }


def by_group(meta: KVBatchMeta) -> list[list[int]]:
    """Row numbers of each prompt's responses, in order of first appearance."""
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row, tag in enumerate(meta.tags):
        groups[tag["prompt_uid"], tag["weight_version"]].append(row)
    return list(groups.values())


def zero_variance(meta: KVBatchMeta) -> list[list[int]]:
    """Row numbers of the groups that have no gradient: their rewards are all equal (dropped rows do not count), or all rows are masked."""

    def dead(tags: Sequence[Mapping[str, Any]]) -> bool:
        return len({float(tag["reward"]) for tag in tags if not tag["dropped"]}) < 2 or all(tag["masked"] for tag in tags)

    return [rows for rows in by_group(meta) if dead([meta.tags[row] for row in rows])]


def drop_dead_groups(meta: KVBatchMeta, dead: list[list[int]], multiple_of: int) -> KVBatchMeta:
    """Without the given groups, but for as many of their rows as make the batch divide; such rows have no gradient,
    but for that of a KL in the reward.

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
