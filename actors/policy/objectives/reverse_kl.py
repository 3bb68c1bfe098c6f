"""The reverse KL of a token's distribution, KL(student || teacher), over the tokens that the teacher holds most probable.

On samples of the student: on-policy distillation (GKD, Agarwal et al., arXiv 2306.13649, eq. 2 with the reverse KL; MiniLLM, Gu et al.,
arXiv 2306.08543), without the variance of an estimate from the sampled token.
"""

from __future__ import annotations

import torch

_LEAST = torch.finfo(torch.float32).eps  # of the rest: what is left of 1 when float32 has summed k probabilities


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL between the two distributions over k + 1 outcomes: each of the k tokens, and the rest of the vocabulary as one.

        sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest),   p_rest = 1 - sum_i p_i,   q_rest = 1 - sum_i q_i

    By the log-sum inequality it is at most the KL over the whole vocabulary, grows with k, is never negative, and equals it when the k
    tokens are all. Mass that the student has outside of them costs what it has too much there, and so comes back, but is not told to which
    token. NeMo-RL renormalises both distributions over the k tokens instead, which says nothing of that mass, or gives the teacher's rest
    a log-probability of -100 (`zero_outside_topk`). What float32 cannot tell from 0, a rest below 1.2e-7, counts as that much.

    Args:
        student, teacher: [..., k] float32, log-probabilities of the same k different tokens; the student's carry the gradient.

    Returns:
        [...], nats.
    """
    rest, taught = ((1 - log_p.exp().sum(dim=-1)).clamp(min=_LEAST) for log_p in (student, teacher))
    return (student.exp() * (student - teacher)).sum(dim=-1) + rest * (rest.log() - taught.log())
