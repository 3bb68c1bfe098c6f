"""The same computations by transformers, torch.optim and a short loss: what Megatron's results are compared with."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load(path: str, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def logprobs(model: Any, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[len]; entry 0 is 0."""
    logits = model(ids[None]).logits[0, :-1].float() / temperature
    return torch.nn.functional.pad(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0], (1, 0))


def grpo(
    lp: list[torch.Tensor], old: list[torch.Tensor], ref: list[torch.Tensor] | None, columns: dict[str, list[torch.Tensor]],
    *, low: float = 0.2, high: float = 0.2, kl_coef: float = 0.0, aggregation: str = "token_mean",
) -> torch.Tensor:  # fmt: skip
    """Row by row and token by token, as in the papers."""
    rows, tokens = [], 0
    for i, mask in enumerate(columns["token_mask"]):
        tokens += int(mask.sum())
        values = []
        for t in mask.nonzero()[:, 0].tolist():
            ratio, advantage = torch.exp(lp[i][t] - old[i][t]), columns["advantages"][i]
            value = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            if ref is not None:
                gap = ref[i][t] - lp[i][t]
                value = value + kl_coef * (gap.exp() - gap - 1)
            values.append(value * columns["sample_mask"][i])
        rows.append(torch.stack(values))
    if aggregation == "token_mean":
        return torch.cat(rows).sum() / tokens
    return torch.stack([row.mean() for row in rows]).mean()


def sft(lp: list[torch.Tensor], columns: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    chosen = [(row * mask * weight).sum() for row, mask, weight in zip(lp, columns["token_mask"], columns["sample_mask"], strict=True)]
    return -torch.stack(chosen).sum() / sum(int(mask.sum()) for mask in columns["token_mask"])


def adamw(model: Any, lr: float, weight_decay: float, eps: float) -> torch.optim.AdamW:
    """Decay on matrices only, as Megatron has it."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.999),
        eps=eps,
    )
