"""How responses are sampled, and the engines that sample them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from configs.base import StrictModel


class RolloutConfig(StrictModel):
    """One step's batch: `prompts_per_step` groups of `responses_per_prompt` responses (the G of GRPO)."""

    prompts_per_step: PositiveInt = 16
    responses_per_prompt: PositiveInt = 8
    max_new_tokens: PositiveInt = 16
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    validation_temperature: NonNegativeFloat = Field(0.0, description="0 is greedy.")
    dynamic_sampling: bool = Field(
        False,
        description="Leave out groups whose rewards are all equal, as they have no gradient, and generate others in their place (DAPO).",
    )
    max_num_gen_batches: PositiveInt = Field(  # verl: algorithm.filter_groups.max_num_gen_batches
        4,
        description="With dynamic_sampling: most batches of groups that a step generates, the first included, each as large as what the "
        "ones before it leave missing. After the last, the step trains on fewer groups.",
    )

    overlong_filtering: bool = Field(  # trl: mask_truncated_completions
        False,
        description="Leave responses that max_new_tokens cut off out of the loss; their rewards still count in their group (DAPO).",
    )

    @property
    def most_gen_batches(self) -> int:
        """Batches of groups that a step generates at most."""
        return self.max_num_gen_batches if self.dynamic_sampling else 1

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        if not self.dynamic_sampling and self.max_num_gen_batches not in (1, type(self).model_fields["max_num_gen_batches"].default):
            raise ValueError(
                f"max_num_gen_batches ({self.max_num_gen_batches}) has no effect without dynamic_sampling: leave it out, or set "
                "dynamic_sampling to true"
            )
        return self


class GenerationConfig(StrictModel):
    """vLLM. Every field proxies the engine argument of the same name unless its comment names another."""

    num_engines: PositiveInt = 1
    executor: Literal["in_process", "async"] = Field(
        "in_process", description="in_process: LLMEngine inside the actor (starts twice as fast); async: AsyncLLM and its own processes."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    max_model_len: PositiveInt | None = Field(None, description="Default: the model's context length.")
    max_num_seqs: PositiveInt = 256
    tensor_parallel_size: PositiveInt = 1
    kv_cache_gib: PositiveFloat = 1.0  # vLLM: VLLM_CPU_KVCACHE_SPACE on a CPU, kv_cache_memory_bytes on a GPU
    sleep_level: Literal[0, 1, 2] = Field(  # vLLM: enable_sleep_mode, and sleep(level)
        0,
        description="Free GPU memory from the end of a rollout to the refit: 1: KV cache and weights, which are kept in host memory; "
        "2: both, for good (the refit brings new weights); 0: nothing.",
    )
    refit: Literal["auto", "host", "ipc", "nccl"] = Field(  # vLLM: WeightTransferConfig.backend
        "auto",
        description="How weights travel: ipc: within a GPU's memory, when engines and policy share GPUs; nccl: broadcast to engines on "
        "GPUs of their own; host: through host memory; auto: as the placement allows.",
    )
    refit_buffer_mib: PositiveInt = Field(  # vLLM: packed_buffer_size_bytes
        1024, description="ipc, nccl: weights travel in pieces of this size; beside it, memory for one gathered tensor is needed."
    )
    enforce_eager: bool = True
    compilation_config: dict[str, Any] = Field(
        {},
        description="What vLLM compiles and captures where enforce_eager is false; default: what vLLM chooses. "
        "{mode: 0, cudagraph_mode: FULL} is CUDA graphs without torch.compile: it starts sooner, and generates more slowly.",
    )
    enable_prefix_caching: bool = False  # cached blocks belong to old weights after a refit
    timeout_s: PositiveFloat = Field(300.0, description="Longest wait for one batch of responses, and for an engine to start.")
