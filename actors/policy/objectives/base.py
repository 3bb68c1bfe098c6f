"""What a batch is trained for: which columns it reads, its loss, and what a step reports of it.

    columns ──► MicroBatch ──weights()──► a weight column [B, T] per loss component ──loss()──► loss, sums, maxima ──metrics()──► step
                               before the pass                                    in the pass

The loss is a sum of components over tokens, weight x term (components.py). A component without a weight column is not computed, and one
with weight 0 contributes 0 to the loss, its gradient and its sums. So weights are data: objectives that keep `Objective.loss` and have the
same aggregation are one computation, and share its CUDA graphs when each micro-batch has the columns of all of them, 0 where its own
objective has none. Supervised steps replay the graphs of a GRPO run with token_mean; with sequence_mean they have graphs of their own.

[B, T] here are sequences and tokens of the per-token columns, [S, L] of batch.py, whatever the layout of the model's input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives.components import LARGEST, SUMMED, Aggregation, Sums, token_loss
from configs.policy import PolicyConfig


class Objective(ABC):
    """An objective of one's own derives from this; the recipe names it in `policy.loss.objective`.

    Attributes:
        columns: what it reads from the data plane beside batch.BASE. A value per token, or one per row, which all its tokens get.
        components: names of the weight columns that it writes.
        aggregation: how tokens are averaged.
        summed, largest: names of what its loss reports as sums and as maxima.
    """

    columns: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    aggregation: Aggregation = "token_mean"
    summed: ClassVar[tuple[str, ...]] = SUMMED
    largest: ClassVar[tuple[str, ...]] = LARGEST

    def __init__(self, policy: PolicyConfig) -> None:
        self.config = policy.loss

    @abstractmethod
    def weights(self, b: MicroBatch) -> dict[str, torch.Tensor]:
        """The weight columns, each [B, T] float32, 0 on tokens that do not count, by `components`.

        They are relative to the denominator of `aggregation`, the response tokens or the responses of the whole batch; a component with
        another one has the quotient of the two in its weights.
        """

    def loss(self, b: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, Sums, Sums]:
        """The micro-batch's part of the loss of the whole batch, and sums and maxima for `metrics`.

        Without host reads: a CUDA graph replays it. An objective that overrides this gets graphs of its own.

        Args:
            logprobs: [B, T] float32, of each token under the policy; carries the gradient.
            entropies: [B, T] float32, of the distribution that each token came from.
        """
        return token_loss(b, logprobs, entropies, self.config, self.aggregation)

    def metrics(self, totals: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, float]:
        """What a step reports: means over the response tokens that count.

        Args:
            totals, largest: sums and maxima of `loss` over the whole batch.

        Returns:
            loss, entropy, response_tokens.
        """
        tokens = max(totals["tokens"], 1.0)
        return {"loss": totals["loss"], "entropy": totals["entropy"] / tokens, "response_tokens": totals["tokens"]}

    @property
    def computation(self) -> str:
        """A name for what the passes compute: the same for objectives that may share CUDA graphs."""
        return self.aggregation if type(self).loss is Objective.loss else type(self).__qualname__
