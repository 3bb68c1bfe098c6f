"""What a batch is trained for: the columns that it reads, its loss, and what a step reports.

    columns, row_weights() ──► MicroBatch ── weights() ──► a weight column [B, T] per loss component ── loss() ──► loss, report
                                              before the pass (weighing.py)                         in the pass         └ metrics() ──► step

The loss is a sum of components over tokens, weight x term (components.py). A component without a weight column is not computed; one with
weight 0 adds 0 to loss, gradient and report. So objectives that keep `Objective.loss` and have the same aggregation share CUDA graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from actors.data_plane.meta import KVBatchMeta
from actors.policy.batch import MicroBatch
from actors.policy.objectives.components import REPORTED, Aggregation, Report, token_loss
from actors.policy.objectives.entropy_control import EntropyControl
from configs.policy import PolicyConfig


class Objective(ABC):
    """An objective of one's own derives from this; `policy.loss.objective` names it. [B, T]: sequences, and tokens of the longest.

    Attributes:
        columns: names of the columns that it reads beside batch.BASE: a value per token, or one per row, which all its tokens get.
        components: names of its weight columns.
        aggregation: the mean over tokens that the loss is.
        own_denominators: each component's mean is over the tokens, or responses, where its weight is not 0, of the whole batch; without
            it over all that `aggregation` counts.
        reported: names of what its loss reports.
        temperature: of the distribution whose log-probabilities it gets; None: the rollout's.
        entropy_control: the coefficient of the entropy bonus; the caller shows it the metrics of every update, and keeps its state.
    """

    columns: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    aggregation: Aggregation = "token_mean"
    own_denominators: bool = False
    reported: tuple[str, ...] = REPORTED
    temperature: float | None = None

    def __init__(self, policy: PolicyConfig) -> None:
        self.config, self.entropy_control = policy.loss, EntropyControl(policy.loss)

    def row_weights(self, meta: KVBatchMeta) -> dict[str, list[float]]:
        """By component a value per row of the batch, from its tags, which `weights` finds among the columns. Default: none."""
        return {}

    @abstractmethod
    def weights(self, b: MicroBatch) -> dict[str, torch.Tensor]:
        """The weight columns by `components`: [B, T] float32, 0 on tokens that do not count.

        Relative to the denominator of `aggregation`: response tokens or responses of the whole batch. With `own_denominators` the caller
        multiplies each column by the quotient of the two.
        """

    def loss(self, b: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, Report]:
        """The micro-batch's part of the loss of the whole batch, and its report. Without host reads: a CUDA graph replays it.

        An objective that overrides this has CUDA graphs of its own. With policy.teacher.top_k there is a column `components.EXACT_KL`.

        Args:
            logprobs: [B, T] float32, of each token under the policy; carries the gradient.
            entropies: [B, T] float32, of the distribution that each token came from; carries a gradient if `policy.loss.entropy_coef` is
                above 0.
        """
        return token_loss(b, logprobs, entropies, self.config, self.aggregation)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """From the report of the whole batch to what a step reports: loss, and means over response tokens."""
        tokens = max(totals["tokens"], 1.0)
        return {"loss": totals["loss"], "entropy": totals["entropy"] / tokens, "response_tokens": totals["tokens"]}

    @property
    def computation(self) -> str:
        """The name of what a pass computes: the same for objectives that share CUDA graphs."""
        return self.aggregation if type(self).loss is Objective.loss else type(self).__qualname__
