"""Which columns each stage of the policy reads."""

from __future__ import annotations

from configs.policy import PolicyConfig

BASE = ("input_ids", "token_mask", "sample_mask")


def train_columns(config: PolicyConfig, objective: str) -> list[str]:
    """The columns that a train step reads, for "sft" or "grpo"."""
    names = list(BASE)
    if objective == "grpo":
        names += ["advantages", "generation_logprobs"]
        if config.why_no_ref_logprob() is None:
            names.append("reference_logprobs")
        if config.why_no_logprob() is None:
            names.append("policy_logprobs")
    return names
