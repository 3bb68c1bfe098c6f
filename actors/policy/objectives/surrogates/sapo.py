"""SAPO: a soft gate in place of the clip (Gao et al., "Soft adaptive policy optimization", arXiv 2511.20347, eq. 5 and 6)."""

from __future__ import annotations

import torch

from configs.loss import LossConfig


def sapo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, loss: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """4 / τ · sigmoid(τ (r - 1)) · A, r = π / π_old; τ is sapo_tau_positive where A > 0, else sapo_tau_negative.

    At r = 1 the gradient is that of r A; away from it, it falls off on both sides, sooner with a larger τ. Nothing is clipped.
    """
    ratio = torch.exp(torch.where(mask > 0, logprobs - old, 0.0))
    tau = torch.where(advantages > 0, loss.sapo_tau_positive, loss.sapo_tau_negative)
    return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, torch.zeros_like(mask)
