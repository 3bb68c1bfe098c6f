"""The policy: its parallel layout, optimizer, loss, and supervised warm start. Values go to Megatron-Core."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.base import StrictModel
from configs.batching import BatchingConfig
from configs.compiled_graph import CompiledGraphConfig
from configs.cuda_graph import CudaGraphConfig, refuse_old_names
from configs.loss import PREFERENCE, LossConfig
from configs.model import TeacherConfig

_MOST_LENGTHS = 32  # MCore: the lru_cache of RotaryEmbedding.forward


class ParallelConfig(StrictModel):
    """How the policy's workers split the model and the batch. World size is the product of the four."""

    data: PositiveInt = 1
    tensor: PositiveInt = 1  # MCore: tensor_model_parallel_size
    pipeline: PositiveInt = 1  # MCore: pipeline_model_parallel_size
    context: PositiveInt = 1  # MCore: context_parallel_size

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica, by data-parallel index, in Megatron's default order "tp-cp-ep-dp-pp". The first one leads."""
        inner, ranks = self.tensor * self.context, range(self.world_size)
        return tuple(tuple(rank for rank in ranks if rank // inner % self.data == index) for index in range(self.data))

    def row_multiple(self, device: str) -> int:
        """What a row's tokens are padded to, to divide among ranks; on CUDA into multiples of 8, for tensor cores."""
        return (8 if device.startswith("cuda") else 1) * self.tensor * self.sequence_multiple

    @property
    def sequence_multiple(self) -> int:
        """What each sequence of a packed row is padded to: context parallelism deals two slices of it to every rank."""
        return 2 * self.context if self.context > 1 else 1


class OptimizerConfig(StrictModel):
    """AdamW by Megatron's optimizer, with its learning-rate schedule."""

    lr: PositiveFloat = 1e-4
    min_lr: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0  # MCore OptimizerParamScheduler: lr_warmup_steps
    decay_steps: PositiveInt | None = Field(  # MCore OptimizerParamScheduler: lr_decay_steps
        None, description="Optimizer steps, from the first, over which lr falls to min_lr; default: all of the run."
    )
    decay_style: Literal["constant", "linear", "cosine"] = "constant"  # MCore: lr_decay_style
    weight_decay: NonNegativeFloat = 0.0
    beta1: float = Field(0.9, ge=0, lt=1)  # MCore: adam_beta1
    beta2: float = Field(0.999, ge=0, lt=1)  # MCore: adam_beta2
    eps: PositiveFloat = 1e-8  # MCore: adam_eps
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest global gradient norm; 0 switches clipping off.")

    @model_validator(mode="after")
    def _schedule_falls(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g})")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps ({self.decay_steps}) counts from step 0 and must be above warmup_steps ({self.warmup_steps})")
        if self.decay_steps is not None and self.decay_style == "constant":
            raise ValueError("decay_steps says how fast lr falls, and decay_style is 'constant': set it to linear or cosine")
        return self

    def over(self, updates: int) -> OptimizerConfig:
        """With `decay_steps` set, for a run of so many optimizer steps (in a run that ends during the warm-up lr never falls)."""
        if self.decay_style == "constant" or self.decay_steps is not None:
            return self
        return self.model_copy(update={"decay_steps": max(updates, self.warmup_steps + 1)})


class LossScaleConfig(StrictModel):
    """float16: the loss is multiplied before the backward pass, lest gradients vanish, by a factor that follows from their overflows.

    MCore: DynamicGradScaler. A step whose gradients overflow is not made, halves the factor, and counts as one of `skipped_steps`.
    """

    initial: PositiveFloat = 65536.0  # MCore: initial_loss_scale
    minimum: PositiveFloat = Field(1.0, description="An overflow at this factor is no rounding any more: as a gradient that is not finite.")
    growth_steps: PositiveInt = Field(200, description="Steps in a row without an overflow, after which the factor doubles.")
    hysteresis: PositiveInt = Field(1, description="Overflows, not undone by a growth, from which on each halves the factor.")

    @model_validator(mode="after")
    def _begins_above_its_minimum(self) -> Self:
        if self.minimum > self.initial:
            raise ValueError(f"minimum ({self.minimum:g}) is above initial ({self.initial:g})")
        return self


class PolicyConfig(StrictModel):
    """Megatron workers and what they optimise."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    loss_scale: LossScaleConfig = LossScaleConfig()
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest", description="How the bfloat16 working copy, of trainer and engines, comes from the float32 masters (an experiment)."
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batching: BatchingConfig = BatchingConfig()
    updates_per_step: PositiveInt = Field(1, description="Optimizer steps per rollout; above 1 the batch is split (off-policy).")
    compiled_graph: CompiledGraphConfig = CompiledGraphConfig()
    cuda_graph: CudaGraphConfig = CudaGraphConfig()
    recompute_logprobs: Literal["auto", "always"] = Field(
        "auto",
        description="auto: skip the logprob stage when there is one update per rollout (the training pass computes the same), unless "
        "rewards need it (policy.loss.kl_in).",
    )
    teacher: TeacherConfig | None = Field(
        None, description="The reference of the KL penalty (on-policy distillation); default: the policy's weights before its first step."
    )
    fetch: Literal["auto", "independent", "leader_broadcast"] = Field(
        "auto",
        description="Who reads columns: each worker, or one of each replica (TP x CP x PP), which broadcasts; auto: that, above one rank.",
    )
    timeout_s: PositiveFloat = Field(600.0, description="Longest wait for any one call to the workers.")

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, values: Any) -> Any:
        refuse_old_names(values)
        return values

    @model_validator(mode="after")
    def _rounding_has_a_grid(self) -> Self:
        if self.rounding == "stochastic" and self.dtype != "bfloat16":
            raise ValueError(f"rounding 'stochastic' is for dtype bfloat16; dtype is {self.dtype!r}")
        return self

    @model_validator(mode="after")
    def _teacher_is_asked(self) -> Self:
        if self.teacher is not None and (why := self.why_no_ref_logprob()):
            raise ValueError(f"teacher would never be asked ({why}): set policy.loss.kl_coef, or leave the teacher out")
        if self.has_candidates:
            self._kl_is_exact()
        return self

    def _kl_is_exact(self) -> None:
        """With teacher.top_k: what is about an estimate, or wants one, is not set (loss.kl_gradient corrected is what it has anyhow)."""
        loss = self.loss
        if loss.objective == PREFERENCE:
            raise ValueError(f"teacher.top_k has no effect with loss.objective {PREFERENCE}, which has no KL term: leave it out")
        if loss.kl_in_reward:
            raise ValueError("teacher.top_k gives the KL in the loss a gradient, and loss.kl_in is reward: leave one of them out")
        if loss.kl_estimator != LossConfig.model_fields["kl_estimator"].default:
            raise ValueError("loss.kl_estimator has no effect with teacher.top_k, with which the KL is no estimate: leave it out")
        if self.parallel.context > 1:
            raise ValueError("teacher.top_k does not work with parallel.context above 1: leave one of them out")

    @model_validator(mode="after")
    def _context_fits(self) -> Self:
        if self.parallel.context == 1:
            return self
        named = f"parallel.context {self.parallel.context}"
        for name, value, wanted in (
            ("device", self.device, ("auto", "cuda")),
            ("dtype", self.dtype, ("bfloat16", "float16")),  # float32 runs on Megatron's own attention, which has no context parallelism
            ("cuda_graph.impl", self.cuda_graph.impl, ("none",)),
        ):
            if value not in wanted:
                raise ValueError(f"{named}: {name} is {value!r} and must be {' or '.join(wanted)}")
        self._buckets_divide(named)
        return self

    def _buckets_divide(self, named: str) -> None:
        multiple = self.parallel.row_multiple("cuda")
        if uneven := [bucket for bucket in self.batching.token_buckets if bucket % multiple]:
            raise ValueError(f"{named}: batching.token_buckets: {uneven[0]} does not divide by {multiple}, as rows on a GPU must here")

    @model_validator(mode="after")
    def _graphs_fit(self) -> Self:
        if self.cuda_graph.impl == "none":
            return self
        named = f"cuda_graph.impl {self.cuda_graph.impl!r}"
        if self.device == "cpu":
            raise ValueError(f"{named} needs a GPU, and device is 'cpu': set cuda_graph.impl=none, or device=auto")
        if self.parallel.pipeline > 1:
            raise ValueError(
                f"{named}: stages of a pipeline wait for each other on the host: set parallel.pipeline=1 or cuda_graph.impl=none"
            )
        needed = ("token_buckets",) if self.batching.mode == "padded" else ("token_buckets", "sequence_buckets")
        for name in needed:
            if not getattr(self.batching, name):
                raise ValueError(f"{named}: without batching.{name} every batch has a shape of its own, and a graph has one: set them")
        self._buckets_divide(named)
        if len(self.batching.token_buckets) > _MOST_LENGTHS:
            raise ValueError(
                f"{named}: {len(self.batching.token_buckets)} batching.token_buckets are more than the {_MOST_LENGTHS} lengths whose "
                "rotary embeddings Megatron-Core keeps; a graph would read freed memory: take fewer"
            )
        return self

    @property
    def call_timeout_s(self) -> float:
        """Longest wait for the work of one call to the workers, in whichever way it goes."""
        return max(self.timeout_s, self.compiled_graph.timeout_s or 0.0)

    def why_no_logprob(self) -> str | None:
        """The reason to skip the logprob stage, or None when it is needed."""
        if self.recompute_logprobs == "auto" and self.updates_per_step == 1 and not self.loss.kl_in_reward:
            return "one update per rollout: the training pass computes the same log-probabilities"
        return None

    def why_no_ref_logprob(self) -> str | None:
        """The reason to skip the ref_logprob stage, or None when it is needed."""
        reads = self.loss.reads_reference or self.loss.objective == PREFERENCE
        return None if reads else "policy.loss.kl_coef is 0: no KL term, no reference"

    @property
    def has_candidates(self) -> bool:
        """Whether the teacher says of several tokens at each position how probable it holds them."""
        return self.teacher is not None and self.teacher.top_k is not None

    @property
    def keeps_reference(self) -> bool:
        """Whether weights of the policy itself are its reference, and part of its state."""
        return self.why_no_ref_logprob() is None and self.teacher is None


class WarmStartConfig(StrictModel):
    """Supervised steps on the environment's own answers, so that GRPO starts from a model that sometimes succeeds."""

    steps: NonNegativeInt = 0
    batch_size: PositiveInt = 64
    lr: PositiveFloat = 1e-3
    check_every: PositiveInt = Field(20, description="Supervised steps between looks at the validation accuracy.")
    stop_at_accuracy: float | None = Field(None, gt=0, le=1, description="Stop early once validation accuracy reaches this.")

    @model_validator(mode="after")
    def _stop_needs_steps(self) -> Self:
        if self.stop_at_accuracy is not None and self.steps == 0:
            raise ValueError("stop_at_accuracy needs steps above 0")
        return self
