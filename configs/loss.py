"""`policy.loss`: what rollouts are trained for."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.base import StrictModel
from configs.import_path import one_of

PREFERENCE = "dpo"
OBJECTIVES, SURROGATES = ("grpo", PREFERENCE), ("clip", "gspo", "cispo", "sapo")
GROUPED = ("group_relative", "rloo", "max_likelihood")  # advantages over the other responses to a prompt
ADVANTAGES = (*GROUPED, "reinforce")
COMPONENTS = ("policy_gradient", "kl", "entropy", "cross_entropy")


class SourceLossConfig(StrictModel):
    """Weights of the components of the loss on the responses to one source's prompts; what is left out is as for the others."""

    policy_gradient_coef: NonNegativeFloat | None = None
    kl_coef: NonNegativeFloat | None = None
    entropy_coef: NonNegativeFloat | None = None
    cross_entropy_coef: NonNegativeFloat | None = None


class LossConfig(StrictModel):
    """The GRPO objective (DeepSeekMath, arXiv 2402.03300, eq. 3) and its variants; docs/algorithms.md has those that go by a name."""

    objective: Annotated[str, one_of(OBJECTIVES, "objective")] = Field(
        "grpo", description="grpo; dpo (flow sft); or package.module:Class of your own (actors/policy/objectives/base.py)."
    )
    dpo_beta: PositiveFloat = Field(0.1, description="With objective dpo: how far the policy is held to the reference.")
    policy_gradient_coef: NonNegativeFloat = Field(
        1.0, description="Weight of the policy gradient of the rewards' advantages; 0: rewards are only reported."
    )
    surrogate: Annotated[str, one_of(SURROGATES, "surrogate")] = Field(
        "clip",
        description="What is maximised per token: clip (PPO, GRPO), gspo, cispo, sapo, or package.module:function "
        "(actors/policy/objectives/surrogates).",
    )
    advantages: Annotated[str, one_of(ADVANTAGES, "advantage function")] = Field(
        "group_relative",
        description="group_relative, rloo, max_likelihood, reinforce (no baseline, a return for each token), or package.module:function of "
        "your own (actors/policy/objectives/advantages).",
    )
    normalize_advantages: Literal["group", "batch", "none"] = Field(
        "group",
        description="Divide by the standard deviation of the group's rewards, or of the whole batch's advantages (REINFORCE++); none: "
        "Dr. GRPO.",
    )
    clip_low: PositiveFloat = Field(0.2, description="Ratio is clipped to [1 - clip_low, 1 + clip_high].")
    clip_high: PositiveFloat = 0.2
    dual_clip: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="With surrogate clip: least value of a bad response's token, times its advantage; often 3.",
    )
    sapo_tau_positive: PositiveFloat = Field(1.0, description="With surrogate sapo: how sharp the gate is where the advantage is positive.")
    sapo_tau_negative: PositiveFloat = Field(1.05, description="The same where it is negative.")
    kl_coef: NonNegativeFloat = Field(0.0, description="Weight of the KL estimate against the reference; 0 skips ref_logprob.")
    kl_in: Literal["loss", "reward"] = Field(  # verl: algorithm.use_kl_in_reward
        "loss", description="loss: a term of it; reward: taken off the rewards, before advantages (tasks/advantage.py)."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="k3: unbiased, never negative; k2: biased; k1: unbiased, with kl_in reward, or kl_gradient corrected (in a loss it has "
        "no gradient of its own).",
    )
    kl_gradient: Literal["plain", "corrected"] = Field(
        "plain",
        description="plain: the gradient of the estimate; corrected: that of the KL itself, whichever the estimate is, also on samples of "
        "older weights.",
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="Weight of the entropy of the policy's distributions, a bonus; often 0.001.")
    target_entropy: PositiveFloat | None = Field(
        None,
        description="Nats: there is a bonus while the entropy is below this. Its weight begins with entropy_coef, rises by "
        "entropy_coef_step with every update below, and falls by as much with one above (Skywork-OR1).",
    )
    entropy_coef_step: PositiveFloat = Field(0.005, description="With target_entropy: how far entropy_coef moves.")
    cross_entropy_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the cross-entropy of the responses with a reward above 0 (rejection-sampling fine-tuning, RFT)."
    )
    sources: dict[str, SourceLossConfig] = Field(
        default_factory=dict,
        description="By a name of environment.sources: other weights of these components. Each component's mean is over the responses on "
        "which it has a weight.",
    )
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = Field(
        "token_mean",
        description="token_mean: over all response tokens (DAPO); sequence_mean: over responses of each one's token mean; fixed_length: "
        "over responses of each one's sum, divided by aggregation_length (Dr. GRPO).",
    )
    aggregation_length: PositiveInt | None = Field(None, description="With aggregation fixed_length; default: rollout.max_new_tokens.")
    importance_sampling: Literal["none", "token", "sequence", "geometric"] = Field(
        "none",
        description="Weight tokens by the policy's over the generating engine's probability: of each token, of its response (the product "
        "of its tokens'), or the geometric mean of those.",
    )
    importance_cap: float = Field(2.0, ge=1, allow_inf_nan=False, description="Largest such weight (truncated importance sampling).")
    importance_beyond: Literal["truncate", "mask"] = Field(
        "truncate", description="What happens to weights above the cap; mask leaves them out, and those below importance_floor (IcePop)."
    )
    importance_floor: float = Field(0.0, ge=0, le=1, description="With importance_beyond mask: smallest such weight.")
    max_sequence_logprob_error: PositiveFloat | None = Field(
        None, description="Leave a response out whose mean |policy - generation log-probability| is above this; default: none is."
    )

    @field_validator("normalize_advantages", mode="before")
    @classmethod
    def _as_it_was(cls, value: Any) -> Any:
        return {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _fit_each_other(self) -> Self:
        """What a setting needs. One that is left at its default, or that an import path may read, is never wrong."""
        by_name = self.surrogate in SURROGATES
        needs = {
            "dpo_beta": ("objective", PREFERENCE, self.objective == PREFERENCE),
            "dual_clip": ("surrogate", "clip", not by_name or self.surrogate == "clip"),
            "clip_low": ("surrogate", "clip, gspo or cispo", self.surrogate != "sapo"),
            "clip_high": ("surrogate", "clip, gspo or cispo", self.surrogate != "sapo"),
            "sapo_tau_positive": ("surrogate", "sapo", not by_name or self.surrogate == "sapo"),
            "sapo_tau_negative": ("surrogate", "sapo", not by_name or self.surrogate == "sapo"),
            "kl_in": ("kl_coef", "a number above 0", self.reads_reference),
            "kl_estimator": ("kl_coef", "a number above 0", self.reads_reference),
            "kl_gradient": ("kl_in", "loss", self.kl_in == "loss") if self.reads_reference else ("kl_coef", "a number above 0", False),
            "entropy_coef_step": ("target_entropy", "a number", self.target_entropy is not None),
            "normalize_advantages": ("advantages", "another, as it divides by the mean reward", self.advantages != "max_likelihood"),
            "aggregation_length": ("aggregation", "fixed_length", self.aggregation == "fixed_length"),
            "importance_cap": ("importance_sampling", "token, sequence or geometric", self.importance_sampling != "none"),
            "importance_beyond": ("importance_sampling", "token, sequence or geometric", self.importance_sampling != "none"),
            "importance_floor": ("importance_beyond", "mask", self.importance_beyond == "mask"),
        }
        for name, (other, wanted, met) in needs.items():
            if not met and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with {other} {getattr(self, other)}: leave it out, or set {other} to {wanted}")
        if not self.components:
            raise ValueError("nothing is trained: policy_gradient_coef, kl_coef, entropy_coef and cross_entropy_coef are all 0")
        if self.kl_estimator == "k1" and self.kl_gradient == "plain" and self.kl_in == "loss":
            raise ValueError(
                "kl_estimator k1 has a gradient of mean 0 in a loss: set kl_gradient to corrected, kl_in to reward, or kl_estimator to k2 "
                "or k3"
            )
        return self

    @model_validator(mode="after")
    def _advantages_fit(self) -> Self:
        if self.advantages == "reinforce" and self.normalize_advantages == "group":
            raise ValueError("advantages reinforce knows no groups: set normalize_advantages to batch (REINFORCE++) or none")
        if self.kl_in_reward and self.advantages == "max_likelihood":
            raise ValueError(
                "advantages max_likelihood wants rewards of 0 and above, and kl_in reward takes penalties off: set kl_in to loss"
            )
        if self.kl_in_reward and self.policy_gradient_coef == 0 and not any(s.policy_gradient_coef for s in self.sources.values()):
            raise ValueError("kl_in reward acts through the advantages, and policy_gradient_coef is 0: set kl_in to loss")
        return self

    def coefficient(self, component: str, source: str = "") -> float:
        """The weight of a component, of `COMPONENTS`, on the responses to prompts of this source."""
        name, own = f"{component}_coef", self.sources.get(source)
        found = None if own is None else getattr(own, name)
        return float(getattr(self, name) if found is None else found)

    @property
    def components(self) -> tuple[str, ...]:
        """Those of `COMPONENTS` with a weight on any response."""
        found = {one for one in COMPONENTS if self._weighs(one) and not (one == "kl" and self.kl_in == "reward")}
        found |= {"entropy"} if self.target_entropy is not None else set()
        return tuple(one for one in COMPONENTS if one in found)

    @property
    def reads_reference(self) -> bool:
        """Whether there is a KL penalty on any response, in the loss or in the reward."""
        return self._weighs("kl")

    @property
    def kl_in_reward(self) -> bool:
        """Whether rewards are less a KL penalty."""
        return self.kl_in == "reward" and self.reads_reference

    def _weighs(self, component: str) -> bool:
        return any(self.coefficient(component, source) > 0 for source in ("", *self.sources))

    @property
    def reads_entropy(self) -> bool:
        """Whether the loss has a gradient through the entropies."""
        return "entropy" in self.components
