"""Supervised fine-tuning: the mean negative log-likelihood of the response tokens."""

from __future__ import annotations

import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives.base import Objective


class Sft(Objective):
    """For the `sft` flow and the warm start. Of the model's own distribution, whatever the rollout's temperature is."""

    components = ("cross_entropy",)
    temperature = 1.0

    def weights(self, b: MicroBatch) -> dict[str, torch.Tensor]:
        """1 on each response token."""
        return {"cross_entropy": b.counted}
