"""GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3): the clipped surrogate of group-relative advantages, with a KL penalty."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives.base import Objective
from actors.policy.objectives.importance import correction_metrics
from configs.policy import PolicyConfig


class Grpo(Objective):
    """Its options are `policy.loss`."""

    def __init__(self, policy: PolicyConfig) -> None:
        super().__init__(policy)
        self.aggregation = policy.loss.aggregation
        self.columns, self.components = ("advantages", "generation_logprobs"), ("policy_gradient",)
        if policy.why_no_logprob() is None:
            self.columns += ("policy_logprobs",)
        if policy.why_no_ref_logprob() is None:
            self.columns += ("reference_logprobs",)
            self.components += ("kl",)

    def weights(self, b: MicroBatch) -> dict[str, torch.Tensor]:
        """1 for the surrogate, kl_coef for the penalty."""
        counted = b.counted
        return {"policy_gradient": counted} | ({"kl": self.config.kl_coef * counted} if "kl" in self.components else {})

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Also kl, clip_fraction, ratio and ratio/max, logprob_error/mean and /max, and `correction_metrics`."""
        tokens = max(totals["tokens"], 1.0)
        surrogate = {
            "kl": totals["kl"] / tokens,
            "clip_fraction": totals["clipped"] / tokens,
            "ratio": totals["ratio"] / tokens,
            "ratio/max": totals["ratio/max"],
            "logprob_error/mean": totals["logprob_error"] / tokens,
            "logprob_error/max": totals["logprob_error/max"],
        }
        return super().metrics(totals) | surrogate | correction_metrics(totals, self.config)
