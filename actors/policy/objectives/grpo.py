"""GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3): the clipped surrogate of group-relative advantages, a KL penalty, an entropy bonus."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from actors.data_plane.meta import KVBatchMeta
from actors.policy.batch import CANDIDATES, MicroBatch
from actors.policy.objectives.base import Objective
from actors.policy.objectives.importance import correction_metrics
from configs.policy import PolicyConfig


class Grpo(Objective):
    """Its options are `policy.loss`."""

    def __init__(self, policy: PolicyConfig) -> None:
        super().__init__(policy)
        loss = policy.loss
        self.aggregation, self.components = loss.aggregation, loss.components
        self.own_denominators = bool(loss.sources) or "cross_entropy" in loss.components
        self.columns = ("advantages", "generation_logprobs")
        if policy.why_no_logprob() is None:
            self.columns += ("policy_logprobs",)
        if "kl" in loss.components:
            self.columns += CANDIDATES if policy.has_candidates else ("reference_logprobs",)

    def row_weights(self, meta: KVBatchMeta) -> dict[str, list[float]]:
        """The coefficients of each row's source; cross-entropy counts rows with a reward above 0 (RFT, arXiv 2308.01825)."""
        if not self.own_denominators:
            return {}
        of_source = {name: [self._coefficient(name, tag.get("source", "")) for tag in meta.tags] for name in self.components}
        if "cross_entropy" in of_source:
            rewards = [tag.get("reward", 0.0) for tag in meta.tags]
            of_source["cross_entropy"] = [w * (reward > 0) for w, reward in zip(of_source["cross_entropy"], rewards, strict=True)]
        return of_source

    def weights(self, b: MicroBatch) -> dict[str, torch.Tensor]:
        """The coefficient of each component, `policy.loss.*_coef`, on the tokens that count."""
        counted = b.counted
        if self.own_denominators:
            return {name: b.columns[name] * counted for name in self.components}
        return {name: self._coefficient(name) * counted for name in self.components}

    def _coefficient(self, component: str, source: str = "") -> float:
        own = self.config.sources.get(source)
        adapts = component == "entropy" and (own is None or own.entropy_coef is None)
        return self.entropy_control.active if adapts else self.config.coefficient(component, source)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Also kl, clip_fraction, ratio and ratio/max, logprob_error/mean and /max, entropy_coef if it adapts, and `correction_metrics`."""
        tokens = max(totals["tokens"], 1.0)
        surrogate = {
            "clip_fraction": totals["clipped"] / tokens,
            "ratio": totals["ratio"] / tokens,
            "ratio/max": totals["ratio/max"],
            "logprob_error/mean": totals["logprob_error"] / tokens,
            "logprob_error/max": totals["logprob_error/max"],
        }
        if not self.config.kl_in_reward:  # of which the advantage stage has said it
            surrogate["kl"] = totals["kl"] / max(totals["kl_tokens"], 1.0)
        adapted = {} if self.config.target_entropy is None else {"entropy_coef": self.entropy_control.active}
        return super().metrics(totals) | surrogate | adapted | correction_metrics(totals, self.config)
