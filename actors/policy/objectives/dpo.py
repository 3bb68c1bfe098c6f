"""DPO: responses that were preferred to others (Rafailov et al., "Direct preference optimization", arXiv 2305.18290, eq. 7).

    L = mean over pairs of -log σ(β m),   m = [log π(chosen) - log π_ref(chosen)] - [log π(rejected) - log π_ref(rejected)]
    ∇L = mean over pairs of -β σ(-β m) [∇ log π(chosen) - ∇ log π(rejected)]

So on each token the gradient is that of a cross-entropy with the weight ±β σ(-β m): once m is known, the rows of a pair need not meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from actors.data_plane.meta import KVBatchMeta
from actors.policy.batch import MicroBatch
from actors.policy.objectives.base import Objective
from configs.policy import PolicyConfig


class Dpo(Objective):
    """For the `sft` flow. Rows have the tags `pair`, a number within the batch, and `chosen`."""

    components = ("cross_entropy",)
    temperature = 1.0

    def __init__(self, policy: PolicyConfig) -> None:
        super().__init__(policy)
        self._found: dict[str, float] = {}

    def prefer(
        self, meta: KVBatchMeta, sums: torch.Tensor, counts: torch.Tensor, most: int, group: torch.distributed.ProcessGroup | None
    ) -> torch.Tensor:
        """Each row's weight ±β σ(-β m) / pairs, 0 where a pair is not whole. A collective of the group, the data-parallel ranks.

        Args:
            sums: [rows] float32, of log π - log π_ref over the row's tokens that count. counts: [rows], how many they are.
            most: more than the largest number of a pair.
        """
        beta, device = self.config.dpo_beta, sums.device
        pairs = torch.tensor([tag.get("pair", 0) for tag in meta.tags], device=device)
        signs = torch.tensor([(1.0 if tag["chosen"] else -1.0) if "pair" in tag else 0.0 for tag in meta.tags], device=device)
        signs = signs * (counts > 0)
        both = torch.zeros(2, most, device=device)
        both.index_add_(1, pairs, torch.stack((signs * sums, signs.abs())))
        if group is not None:
            torch.distributed.all_reduce(both, group=group)
        margins, whole = beta * both[0], both[1] == 2
        number = whole.sum().clamp(min=1)
        found = {
            "loss": (torch.nn.functional.softplus(-margins) * whole).sum() / number,
            "preference/accuracy": ((margins > 0) & whole).sum() / number,
            "preference/margin": (margins * whole).sum() / number,
            "pairs": whole.sum(),
        }
        self._found = dict(zip(found, torch.stack([value.float() for value in found.values()]).tolist(), strict=True))
        return (beta * torch.sigmoid(-margins) * whole / number)[pairs] * signs

    def weights(self, b: MicroBatch) -> dict[str, torch.Tensor]:
        """As `prefer` gave them: the loss that they are of is a sum, and the denominator is the pairs'."""
        return {"cross_entropy": b.columns["cross_entropy"] * b.counted * b.totals[0]}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """loss, and means over the batch's pairs: preference/accuracy (m > 0), preference/margin (β m); pairs, entropy, response_tokens."""
        return super().metrics(totals) | self._found


def by_row(values: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], rows: int) -> torch.Tensor:
    """[rows] sums over the tokens that count, of a tensor [S, L] per micro-batch; zeros where there are none."""
    found = micro_batches[0].counted.new_zeros(rows)
    for value, b in zip(values, micro_batches, strict=False):  # earlier pipeline stages have no values
        found[list(b.rows)] = (value * b.counted).sum(dim=1)[: len(b.rows)]
    return found
