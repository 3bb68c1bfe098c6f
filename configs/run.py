"""The whole run: what the roots of all recipes share, and the root of a `grpo` recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs import settings
from configs.base import StrictModel, did_you_mean
from configs.checkpoint import CheckpointConfig, EngineRecoveryConfig, RecoveryConfig
from configs.deadlines import Deadlines
from configs.environment import EnvironmentConfig
from configs.guards import GuardsConfig
from configs.loss import GROUPED, PREFERENCE
from configs.model import ModelConfig, TeacherConfig
from configs.policy import OptimizerConfig, PolicyConfig, WarmStartConfig
from configs.redaction import Url, redacted
from configs.rewards import OWN_REWARDS, AnyReward, LengthReward, ScoringConfig
from configs.rollout import GenerationConfig, RolloutConfig
from configs.staleness import AsyncConfig
from configs.trackers import TENSORBOARD, Trackers
from configs.validation import ValidationConfig


class DataPlaneConfig(StrictModel):
    """TransferQueue."""

    num_storage_units: PositiveInt = 1  # transfer_queue: backend.SimpleStorage.num_data_storage_units
    capacity_samples: PositiveInt | None = Field(None, description="Most samples in the training partition; a put beyond it waits.")
    timeout_s: PositiveFloat = Field(120.0, description="Longest wait for one put, get or clear; a put waits as long again for space.")
    prometheus_port: int | None = Field(  # transfer_queue: metrics.enabled, metrics.port
        None, ge=0, le=65535, description="Serve TransferQueue's Prometheus metrics on 127.0.0.1 at this port; 0: any free one."
    )


class RayConfig(StrictModel):
    """The cluster: an address to join, or one started for this run alone."""

    address: str | None = Field(None, description="host:port or ray://...; default: RAY_ADDRESS, else a cluster of its own.")
    num_cpus: PositiveInt | None = Field(None, description="Logical CPUs of a cluster of its own; default: what the actors ask for.")
    object_store_mib: PositiveInt = 256
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = Field(  # ray: placement_group(strategy)
        "SPREAD", description="Of several nodes: how tensor-parallel groups and engines, each whole on one, are dealt over them."
    )

    @property
    def joined(self) -> str | None:
        """The address of the cluster that a run joins; None: it starts one of its own."""
        address = self.address or settings.ray_address()
        return None if address == "local" else address


LATEST = "latest"  # in `output_dir`, the link to the newest run


def _not_latest(name: str) -> str:
    if name == LATEST:
        raise ValueError(f"{name!r} is the link to the newest run: give the run another name")
    return name


def _local(path: str) -> str:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path):
        raise ValueError(
            f"{redacted(repr(path))} is a URL: runs are written to a disk or a shared mount; checkpoints go to object stores "
            "by checkpoint.url"
        )
    return path


class BaseConfig(StrictModel):
    """What a recipe of any flow has."""

    flow: str
    name: Annotated[str, AfterValidator(_not_latest)] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: NonNegativeInt = 0
    output_dir: Annotated[str, AfterValidator(_local)] = "runs"


class BaseRunConfig(BaseConfig):
    """What a run of any flow that trains has."""

    resume: Url = Field(
        "auto",
        min_length=1,
        description="Go on from: auto (an earlier try of this flow run, or checkpoint.url), a run directory, a URL, fork:URL, never.",
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    validate_every: PositiveInt = Field(10, description="Steps between validations; step 0 and the last step always validate.")
    model: ModelConfig = ModelConfig()
    policy: PolicyConfig = PolicyConfig()
    data_plane: DataPlaneConfig = DataPlaneConfig()
    ray: RayConfig = RayConfig()
    trackers: Trackers = Field(TENSORBOARD, description="Where metrics and samples go besides the run's directory: docs/trackers.md.")

    @property
    def deadlines(self) -> Deadlines:
        """Of everything that a run of this configuration waits for."""
        policy, graph = self.policy, self.policy.cuda_graph
        passes = 1 if graph.impl == "none" else graph.warmup_steps + 1
        return Deadlines(
            data_plane=self.data_plane.timeout_s,
            policy=policy.call_timeout_s,
            files=self.checkpoint.timeout_s,
            updates=policy.updates_per_step,
            warm_up_passes=2 * passes,  # log-probabilities, training
        )


class ScoredConfig(StrictModel):
    """What a run has that pays for responses."""

    environment: EnvironmentConfig = EnvironmentConfig()
    rewards: tuple[AnyReward, ...] = Field(
        (), description="Each with a weight; without any, or with `length` alone, the verifier that belongs to the environment comes first."
    )
    scoring: ScoringConfig = ScoringConfig()
    validation: ValidationConfig = ValidationConfig()

    @property
    def paid(self) -> tuple[AnyReward, ...]:
        """The rewards of this run: what the recipe lists; where nothing of that judges answers, the environment's verifiers before it."""
        if any(not isinstance(reward, LengthReward) for reward in self.rewards):
            return self.rewards
        return (*(OWN_REWARDS[kind] for kind in self.source.kinds), *self.rewards)

    @property
    def source(self) -> EnvironmentConfig:
        """Where the problems come from."""
        return self.environment

    def gathered(self) -> dict[str, str]:
        """What the references in its sources of problems refer to: see `EnvironmentConfig.gathered`."""
        found = self.source.gathered("environment")
        for name, source in self.validation.sets.items():
            found |= source.gathered(f"validation.sets.{name}")
        return found

    @model_validator(mode="after")
    def _rewards_have_names(self) -> Self:
        labels, success = [reward.label for reward in self.paid], self.scoring.success
        if doubled := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"rewards: two are called {doubled[0]!r}: give each a `name` of its own")
        if success is not None and success not in labels:
            hint = did_you_mean(success, labels, f"they are {', '.join(labels)}", cutoff=0.4)
            raise ValueError(f"scoring.success: no reward is called {success!r}; {hint}")
        return self


class RunConfig(BaseRunConfig, ScoredConfig):
    """Everything that `grpo` needs. `configs.loader.load` builds it from a recipe and overrides."""

    flow: Literal["grpo"] = "grpo"
    mode: Literal["sync", "async"] = Field(
        "sync", description="sync: each step generates, then trains; async: generation goes on while training, as `asynchronous` says."
    )
    asynchronous: AsyncConfig = AsyncConfig()
    placement: Literal["auto", "cpu", "colocated", "separate"] = Field(
        "auto",
        description="colocated: each GPU has an engine and a policy worker; separate: GPUs of their own; auto: separate where there are "
        "GPUs enough, else colocated, and cpu without any.",
    )
    steps: PositiveInt = 50
    recovery: EngineRecoveryConfig = EngineRecoveryConfig()
    guards: GuardsConfig = GuardsConfig()
    rollout: RolloutConfig = RolloutConfig()
    generation: GenerationConfig = GenerationConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    logged_samples: PositiveInt = Field(8, description="Responses per step, and validation answers, that a person can read afterwards.")

    @property
    def deadlines(self) -> Deadlines:
        generation = self.generation
        return replace(
            super().deadlines,
            generation=generation.timeout_s,
            scoring=self.scoring.batch_timeout_s,
            engines=generation.num_engines if self.mode == "async" else 1,
        )

    def prompt_room(self, context: int) -> int:
        """Most tokens of a prompt beside a response. Args: context: of the model."""
        return min(context, self.generation.max_model_len or context) - self.rollout.max_new_tokens

    @property
    def ledger(self) -> AsyncConfig:
        """How prompt groups are admitted and served. Synchronous: exactly the next step's, in the order of drawing."""
        if self.mode == "async":
            return self.asynchronous
        return AsyncConfig(
            sampler="in_order",
            max_trajectory_age_steps=0,
            buffer_capacity=2 * self.rollout.prompts_per_step,  # the step before may still hold its rows
            stall_timeout_s=self.deadlines.rollout,
            stall_report_every_s=min(30.0, self.deadlines.rollout),
        )

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.responses_per_prompt

    @model_validator(mode="before")
    @classmethod
    def _fixed_length(cls, values: Any) -> Any:
        """Responses are divided by the most tokens that they may have, unless the recipe says by how many."""
        match values:
            case {"policy": {"loss": {"aggregation": "fixed_length", **loss} as whole} as policy} if loss.get("aggregation_length") is None:
                longest = (values.get("rollout") or {}).get("max_new_tokens", RolloutConfig.model_fields["max_new_tokens"].default)
                return {**values, "policy": {**policy, "loss": {**whole, "aggregation_length": longest}}}
        return values

    @model_validator(mode="after")
    def _learns_from_rewards(self) -> Self:
        if self.policy.loss.objective == PREFERENCE:
            raise ValueError(
                f"policy.loss.objective {PREFERENCE} learns from pairs of a file: it is of the flow sft, with data.rejected_field"
            )
        return self

    @model_validator(mode="after")
    def _sources_are_there(self) -> Self:
        names, teacher = [source.name for source in self.environment.sources], self.policy.teacher
        for setting, given in (("loss", self.policy.loss.sources), ("teacher", teacher.sources if teacher else {})):
            for name in given:
                if name not in names:
                    hint = did_you_mean(name, names, f"they are {', '.join(names)}" if names else "it has none", cutoff=0.4)
                    raise ValueError(f"policy.{setting}.sources: {name!r} is no name in environment.sources; {hint}")
        if teacher is not None and teacher.sources:
            self._each_is_taught(teacher, names)
        return self

    def _each_is_taught(self, teacher: TeacherConfig, names: Sequence[str]) -> None:
        """By one teacher where there is a KL term; and each teacher teaches."""
        wanted = {name for name in names if self.policy.loss.coefficient("kl", name) > 0}
        if idle := [name for name in teacher.sources if name not in wanted]:
            raise ValueError(
                f"policy.teacher.sources.{idle[0]} would never be asked: policy.loss.sources.{idle[0]}.kl_coef is 0: raise it, or leave "
                "the teacher out"
            )
        others = sorted(wanted.difference(teacher.sources))
        if others and teacher.path is None:
            raise ValueError(
                f"policy.teacher.sources has no teacher for {others[0]!r}, whose KL term wants one: name it, set policy.teacher.path for "
                f"all others, or policy.loss.sources.{others[0]}.kl_coef=0"
            )
        if teacher.path is not None and not others:
            raise ValueError(
                "policy.teacher.path would never be asked, as policy.teacher.sources names a teacher for every source: leave it out"
            )

    @model_validator(mode="after")
    def _weights_of_what_was_sampled(self) -> Self:
        how = self.policy.loss.importance_sampling
        if self.rollout.top_p < 1 and how in ("sequence", "geometric"):
            raise ValueError(
                f"rollout.top_p ({self.rollout.top_p:g}) and policy.loss.importance_sampling {how}: the engine's probabilities are of the "
                "tokens that top_p left, the policy's of all tokens, so a response's weight falls with its length towards 0: set "
                "rollout.top_p=1 or importance_sampling=none"
            )
        return self

    @model_validator(mode="after")
    def _a_group_has_a_baseline(self) -> Self:
        loss, alone = self.policy.loss, self.rollout.responses_per_prompt == 1
        if alone and "policy_gradient" in loss.components and loss.advantages in GROUPED:
            raise ValueError(
                "rollout.responses_per_prompt: a group of 1 has no baseline, so every advantage is 0: use 2 or more; 1 is "
                "enough for policy.loss.advantages reinforce and for a teacher alone"
            )
        if alone and self.rollout.dynamic_sampling:
            raise ValueError(
                "rollout.responses_per_prompt: a group of 1 has equal rewards, and dynamic_sampling leaves all such out: use 2 or more"
            )
        return self

    @property
    def trained_multiple(self) -> int | None:
        """What the rows of a step must divide by once dynamic sampling has left groups out; None: none is left out."""
        return self.policy.parallel.data * self.policy.updates_per_step if self.rollout.dynamic_sampling else None

    @property
    def gpus_apart(self) -> int:
        """GPUs for every engine and every policy worker to have its own."""
        return self.generation.num_engines * self.generation.tensor_parallel_size + self.policy.parallel.world_size

    def placement_on(self, gpus: int) -> Literal["cpu", "colocated", "separate"]:
        """`placement`, where it is auto as so many GPUs allow."""
        if self.placement != "auto":
            return self.placement
        if gpus == 0 or self.policy.device == "cpu":
            return "cpu"
        return "separate" if gpus >= self.gpus_apart or not self.may_share_gpus else "colocated"

    @property
    def may_share_gpus(self) -> bool:
        """Whether each GPU can have an engine and a worker, or a single one several engines and a worker."""
        engines, workers = self.generation.num_engines, self.policy.parallel.world_size
        return self.generation.tensor_parallel_size == 1 and (engines == workers or workers == 1)

    @property
    def optimizer(self) -> OptimizerConfig:
        """`policy.optimizer`, its schedule over all updates of this run."""
        return self.policy.optimizer.over(self.steps * self.policy.updates_per_step)

    @model_validator(mode="after")
    def _validation_fits(self) -> Self:
        self.validation.check_temperature(self.rollout.validation_temperature, "rollout.validation_temperature")
        return self

    @model_validator(mode="after")
    def _trains_on_something_else(self) -> Self:
        source = self.environment
        if source.path is not None and source.path == source.validation_path:
            raise ValueError("environment.validation_path is environment.path: the prompts that measure the model would train it")
        return self

    @model_validator(mode="after")
    def _guards_see_something(self) -> Self:
        if self.guards.kl is not None and (why := self.policy.why_no_ref_logprob()):
            raise ValueError(f"guards.kl would never trip ({why}): set policy.loss.kl_coef, or leave the guard out")
        if self.guards.kl is not None and self.policy.loss.kl_in_reward:
            raise ValueError("guards.kl would never trip: it sees the KL in the loss, and policy.loss.kl_in is reward: leave it out")
        return self

    @model_validator(mode="after")
    def _groups_without_variance(self) -> Self:
        if self.rollout.dynamic_sampling and self.policy.loss.advantages == "reinforce":
            raise ValueError(
                "rollout.dynamic_sampling leaves groups of equal rewards out because they have no gradient, and with "
                "policy.loss.advantages reinforce they have one: set rollout.dynamic_sampling=false"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        for reward in self.rewards:
            most = self.rollout.max_new_tokens
            if isinstance(reward, LengthReward) and reward.max_tokens is None and (reward.cache_tokens or 0) > most:
                raise ValueError(f"rewards.{reward.label}.cache_tokens ({reward.cache_tokens}) is above rollout.max_new_tokens ({most})")
        return self

    @model_validator(mode="after")
    def _sync_fits(self) -> Self:
        space = self.data_plane.capacity_samples
        if self.mode == "sync" and space is not None and space < self.samples_per_step:
            raise ValueError(
                f"data_plane.capacity_samples ({space}) is below the samples of a step, rollout.prompts_per_step x "
                f"rollout.responses_per_prompt = {self.samples_per_step}: raise it, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _async_fits(self) -> Self:
        if self.mode == "sync":
            return self
        if self.policy.loss.importance_sampling == "none":
            raise ValueError(
                "mode async trains on responses that older weights have sampled, and policy.loss.importance_sampling is none: "
                "set it to token or sequence, so that the loss corrects for them"
            )
        groups = self.asynchronous.capacity(self.rollout.prompts_per_step)
        if groups < self.rollout.prompts_per_step:
            raise ValueError(
                f"asynchronous.buffer_capacity ({groups} groups) is below rollout.prompts_per_step ({self.rollout.prompts_per_step}): "
                "a step could never be filled"
            )
        samples, space = groups * self.rollout.responses_per_prompt, self.data_plane.capacity_samples
        if space is not None and space < samples:
            raise ValueError(
                f"data_plane.capacity_samples ({space}) is below the replay buffer's {groups} groups x {self.rollout.responses_per_prompt} "
                f"responses = {samples}: raise it, or lower asynchronous.buffer_capacity"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        dp, updates = self.policy.parallel.data, self.policy.updates_per_step
        if self.samples_per_step % (dp * updates):
            raise ValueError(
                f"rollout.prompts_per_step x rollout.responses_per_prompt = {self.samples_per_step} samples do not divide by "
                f"policy.parallel.data x policy.updates_per_step = {dp} x {updates}: change one of them"
            )
        if self.warm_start.steps and self.warm_start.batch_size % dp:
            raise ValueError(f"warm_start.batch_size ({self.warm_start.batch_size}) does not divide by policy.parallel.data ({dp})")
        return self
