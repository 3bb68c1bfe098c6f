"""Everything that can be wrong with a run and seen without starting it. Each problem is one ConfigError that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from actors.environments import Environment, build
from actors.policy.hf import check_model_dir, head_dim
from actors.policy.scratch import write_scratch_model
from actors.rollout.prompts import Problems, PromptEncoder
from actors.rollout.staleness import build as build_sampler
from configs.base import ConfigError
from configs.policy import ParallelConfig
from configs.run import BaseRunConfig, RunConfig

_PROBED_PROMPTS = 512  # prompts of each split whose length is checked; a generated task cannot be checked to its end
_TOKENIZER_TEXTS = 2000
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.26: CPUAttentionBackend.get_supported_head_sizes


def prepare_model(config: RunConfig, scratch_directory: Path) -> str:
    """The directory of the model to train: `model.path`, or a small model written to `scratch_directory`.

    Raises:
        ConfigError: the environment or the model's shape does not work.
    """
    if config.model.path is not None:
        return config.model.path
    return scratch_model(config, build(config.environment, config.seed), scratch_directory)


def scratch_model(config: BaseRunConfig, problems: Problems, directory: Path) -> str:
    """Write a small model with a tokenizer of these problems. Returns the directory.

    Raises:
        ConfigError: the model's shape does not work.
    """
    texts = [problems.problem("train", i) for i in range(min(_TOKENIZER_TEXTS, problems.size("train")))]
    write_scratch_model(directory, config.model, [f"{p.question} {p.answer}" for p in texts], config.seed)
    return str(directory)


def check(config: RunConfig, model_path: str) -> None:
    """Model, tokenizer, prompts and layout fit each other.

    Raises:
        ConfigError: what does not, and what to change.
    """
    if config.mode == "async":
        build_sampler(config.asynchronous, config.rollout.prompts_per_step)
    shape = check_model_dir(model_path)
    _check_head_size(shape)
    check_layout(config.policy.parallel, shape)
    encoder = load_encoder(model_path, config.environment.system_prompt, shape)
    _check_prompts(config, encoder, build(config.environment, config.seed), int(shape.max_position_embeddings))


def longest_sample(config: RunConfig, model_path: str) -> int:
    """Most tokens that a prompt and its response can have."""
    context = int(check_model_dir(model_path).max_position_embeddings)
    return min(context, config.generation.max_model_len or context)


def _check_head_size(shape: Any) -> None:
    size = head_dim(shape)
    if not torch.cuda.is_available() and size not in _CPU_HEAD_SIZES:
        raise ConfigError(
            f"model: an attention head has {size} dimensions; vLLM on a CPU has kernels for {', '.join(map(str, _CPU_HEAD_SIZES))}: "
            "change model.hidden_size or model.num_attention_heads"
        )


def check_layout(parallel: ParallelConfig, shape: Any) -> None:
    """The parallel layout divides the model.

    Raises:
        ConfigError: it does not; names the field.
    """
    for name, total, parts in (
        ("num_attention_heads", shape.num_attention_heads, parallel.tensor),
        ("num_key_value_heads", shape.num_key_value_heads, parallel.tensor),
        ("num_hidden_layers", shape.num_hidden_layers, parallel.pipeline),
    ):
        if total % parts:
            field = "pipeline" if "layers" in name else "tensor"
            raise ConfigError(f"policy.parallel.{field}: {parts} does not divide the model's {name} ({total})")


def load_encoder(model_path: str, system_prompt: str | None, shape: Any) -> PromptEncoder:
    """The model's tokenizer, which fits the model.

    Raises:
        ConfigError: there is none, its vocabulary is larger than the model's, or it has no end token.
    """
    try:
        encoder = PromptEncoder(model_path, system_prompt)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no tokenizer can be loaded from {model_path}: {str(error).splitlines()[0]}") from None
    largest = max(encoder.tokenizer.get_vocab().values())
    if largest >= shape.vocab_size:
        raise ConfigError(
            f"model.path: the tokenizer in {model_path} has token id {largest}, but the model's vocab_size is {shape.vocab_size}: "
            "take the tokenizer that belongs to this model"
        )
    if encoder.tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path: the tokenizer in {model_path} has no eos_token, so no response would ever end: set it in tokenizer_config.json"
        )
    return encoder


def _check_prompts(config: RunConfig, encoder: PromptEncoder, environment: Environment, context: int) -> None:
    limit = min(context, config.generation.max_model_len or context)
    if config.generation.max_model_len is not None and config.generation.max_model_len > context:
        raise ConfigError(f"generation.max_model_len: {config.generation.max_model_len} is above the model's context of {context} tokens")
    room = limit - config.rollout.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_new_tokens: {config.rollout.max_new_tokens} leaves no room for a prompt in a context of {limit} tokens"
        )
    for split in ("train", "validation"):
        for index in range(min(_PROBED_PROMPTS, environment.size(split))):
            problem = environment.problem(split, index)
            length = len(encoder.prompt(problem))
            if length > room:
                raise ConfigError(
                    f"environment: {split} prompt {index} has {length} tokens; a context of {limit} less rollout.max_new_tokens = "
                    f"{config.rollout.max_new_tokens} leaves {room}: shorten the prompts, lower rollout.max_new_tokens, or take a model "
                    f"with a longer context. It begins {problem.question[:60]!r}"
                )
            answer = len(encoder.answer(problem)) if config.warm_start.steps and split == "train" else 0
            if length + answer > context:
                raise ConfigError(
                    f"environment: {split} prompt {index} with its answer has {length + answer} tokens, the context is {context}: "
                    "shorten it, or set warm_start.steps=0"
                )
