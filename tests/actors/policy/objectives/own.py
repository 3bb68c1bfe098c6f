"""What a recipe may name by import path: an objective, a surrogate and an advantage function that are not of this project."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives.base import Objective
from configs.loss import LossConfig


class FilteredImitation(Objective):
    """Cross-entropy of the responses that were better than their group, by how much they were."""

    columns = ("advantages",)
    components = ("cross_entropy",)

    def weights(self, b: MicroBatch) -> dict[str, torch.Tensor]:
        return {"cross_entropy": b.counted * b.columns["advantages"].clamp(min=0)}


def above_the_worst(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    return [reward - min(rewards) for reward in rewards]


def of_one_reward(reward: float) -> float:
    return reward


def unclipped(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, loss: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.exp(torch.where(mask > 0, logprobs - old, 0.0)) * advantages, torch.zeros_like(mask)
