"""Everything that can be wrong with a run and seen without starting it. Each problem is one ConfigError that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from actors.environments import Environment, Split, build
from actors.environments.scoring.golds import check_golds
from actors.models import memory_plan
from actors.models.gguf import convert_gguf, gguf_config
from actors.models.hf import check_layout, check_model_dir, head_dim
from actors.models.scratch_model import write_scratch_model
from actors.policy.objectives import advantages, registry
from actors.rollout.prompts import Problems, PromptEncoder, PromptStream, StreamedProblems, fit
from actors.rollout.staleness import build as build_sampler
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from configs.model import ModelConfig
from configs.rollout import GenerationConfig
from configs.run import BaseRunConfig, RunConfig, ScoredConfig

_FIELD = "rollout.max_new_tokens"
_PROBED_PROMPTS = 512  # of each split; a generated task cannot be checked to its end
_CHECKED_ROWS = 20_000  # of each split of a data set: some seconds; longer ones are dealt with when they are drawn
_TOKENIZER_TEXTS = 2000
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.26: CPUAttentionBackend.get_supported_head_sizes


def prepare_model(config: RunConfig, scratch_directory: Path) -> str:
    """The directory of the model to train: `model.path`, or what is written to `scratch_directory`.

    Raises:
        ConfigError: the environment, the GGUF file or the model's shape does not work.
    """
    return given_model(config, scratch_directory) or scratch_model(config, build(config.environment, config.seed), scratch_directory)


def given_model(config: BaseRunConfig, directory: Path) -> str | None:
    """The directory of the model that the recipe names, if it names one: `model.path`, or `model.gguf` converted into `directory`.

    Raises:
        ConfigError: there is no such file.
    """
    if config.model.gguf is not None:
        return str(convert_gguf(config.model.gguf, directory))
    return config.model.path


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
    registry.build(config.policy.loss.objective, config.policy)
    advantages.find(config.policy.loss.advantages)
    shape = check_model_dir(model_path)
    check_head_size(shape)
    check_layout(config.policy.parallel, shape)
    check_memory(config, memory_plan.ModelShape.of(shape))
    encoder = load_encoder(model_path, shape, config.environment.system_prompt, config.environment.chat_template_kwargs)
    environment = build(config.environment, config.seed)
    PromptStream(environment, config.seed, curriculum=config.environment.curriculum)  # it refuses levels that are not there
    _check_prompts(config, encoder, environment, int(shape.max_position_embeddings))
    check_answers(config, config.environment, environment, config.seed)
    room = room_for_prompts(config.generation, config.rollout.max_new_tokens, int(shape.max_position_embeddings), _FIELD)
    for name, source in config.validation.sets.items():
        check_set(config, name, source, model_path, shape, room, config.seed)


def longest_sample(config: RunConfig, model_path: str) -> int:
    """Most tokens that a prompt and its response can have."""
    context = int(check_model_dir(model_path).max_position_embeddings)
    return min(context, config.generation.max_model_len or context)


def check_head_size(shape: Any) -> None:
    """vLLM has a kernel for the model's attention heads.

    Raises:
        ConfigError: it has none.
    """
    size = head_dim(shape)
    if not torch.cuda.is_available() and size not in _CPU_HEAD_SIZES:
        raise ConfigError(
            f"model: an attention head has {size} dimensions; vLLM on a CPU has kernels for {', '.join(map(str, _CPU_HEAD_SIZES))}: "
            "change model.hidden_size or model.num_attention_heads"
        )


def planned_memory(config: BaseRunConfig, shape: memory_plan.ModelShape | None = None) -> dict[str, memory_plan.Parts]:
    """Bytes on a GPU, by part, of a policy worker and of an engine. Empty when the policy is to be on a CPU.

    Args:
        shape: of the model; default: what `model.path` or the recipe says.

    Raises:
        ConfigError: `model.path` cannot be read.
    """
    if config.policy.device == "cpu":
        return {}
    if shape is None:
        shape = _planned_shape(config.model)
    if not isinstance(config, RunConfig):
        return {"policy worker": memory_plan.policy_memory(shape, config.policy, shape.context)}
    longest = min(shape.context, config.generation.max_model_len or shape.context)
    worker = memory_plan.policy_memory(shape, config.policy, longest)
    colocated = config.placement == "colocated" or (config.placement == "auto" and torch.cuda.device_count() < config.gpus_apart)
    if colocated and config.generation.refit in ("auto", "ipc"):
        worker |= memory_plan.ipc_memory(shape, config.policy, config.generation)
    return {"policy worker": worker, "engine": memory_plan.engine_memory(shape, config.generation)}


def check_memory(config: BaseRunConfig, shape: memory_plan.ModelShape) -> None:
    """A worker and an engine fit a GPU of this machine, both at once where there is only one. Nothing is checked without a GPU.

    Raises:
        ConfigError: they do not; with the sizes, and what to change.
    """
    capacity = memory_plan.gpu_capacity() if torch.cuda.is_available() else None
    planned = planned_memory(config, shape)
    if capacity is None or not planned:
        return
    worker, engine = planned["policy worker"], planned.get("engine")
    advice = "take fewer tokens per micro-batch (policy.batching), or more GPUs (policy.parallel)"
    memory_plan.check_fits(worker, capacity, "policy: a worker", advice)
    if engine is not None:
        advice = "lower generation.kv_cache_gib, or raise generation.tensor_parallel_size"
        memory_plan.check_fits(engine, capacity, "generation: an engine", advice)
    if engine is not None and isinstance(config, RunConfig) and torch.cuda.device_count() == 1:
        both = {f"worker's {name}": size for name, size in memory_plan.resident(worker).items()}
        both |= {f"engines' {name}": size * config.generation.num_engines for name, size in engine.items()}
        advice = "lower generation.kv_cache_gib or generation.num_engines, or take a second GPU"
        memory_plan.check_fits(both, capacity, "policy and generation on one GPU", advice)


def _planned_shape(model: ModelConfig) -> memory_plan.ModelShape:
    if model.gguf is not None:
        return memory_plan.ModelShape.of(gguf_config(model.gguf))
    return memory_plan.ModelShape.of_scratch(model) if model.path is None else memory_plan.ModelShape.of(check_model_dir(model.path))


def check_answers(config: ScoredConfig, source: EnvironmentConfig, environment: Environment, seed: int) -> None:
    """Every answer of the data counts as right by its own reward. Nothing is checked of a generator with its own verifier.

    Raises:
        ConfigError: some do not; names the first of them.
    """
    if not _are_checked(config, source):
        return
    splits: tuple[Split, ...] = ("train", "validation")
    problems = [environment.problem(split, i) for split in splits for i in range(_checked(source, environment, split))]
    check_golds(problems, config.paid, config.scoring, source, seed)


def check_set(config: ScoredConfig, name: str, source: EnvironmentConfig, model_path: str, shape: Any, room: int, seed: int) -> None:
    """A further validation set can be asked of the model, and its answers count as right.

    Args:
        name: of the set, in `validation.sets`. shape: the model's configuration. room: most tokens of a prompt.

    Raises:
        ConfigError: names the set, and what to change.
    """
    try:
        environment = build(source, seed)
        encoder = load_encoder(model_path, shape, source.system_prompt, source.chat_template_kwargs)
        problems = [environment.problem("validation", index) for index in range(_checked(source, environment, "validation"))]
        for problem in problems:
            fit(problem, encoder.prompt(problem), room, source.on_too_long)
        if _are_checked(config, source):
            check_golds(problems, config.paid, config.scoring, source, seed)
    except ConfigError as error:
        raise ConfigError(f"validation.sets.{name}: {error}") from None


def _are_checked(config: ScoredConfig, source: EnvironmentConfig) -> bool:
    # A generator with its own verifier holds no answers that a person could have got wrong.
    return bool(config.rewards) or source.kind != "reasoning_gym" or bool(source.sources)


def _checked(source: EnvironmentConfig, environment: Environment, split: Split) -> int:
    """How many problems of the split are looked at."""
    if split == "train" and isinstance(environment, StreamedProblems):
        return 0
    return min(_CHECKED_ROWS if "dataset" in source.kinds else _PROBED_PROMPTS, environment.size(split))


def load_encoder(
    model_path: str, shape: Any, system_prompt: str | None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> PromptEncoder:
    """The model's tokenizer, which fits the model.

    Raises:
        ConfigError: there is none, its vocabulary is larger than the model's, or it has no end token.
    """
    try:
        encoder = PromptEncoder(model_path, system_prompt, chat_template_kwargs)
    except ConfigError:
        raise
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


def room_for_prompts(generation: GenerationConfig, max_new_tokens: int, context: int, field: str) -> int:
    """Most tokens that a prompt may have beside a response. `field` is the recipe's name of `max_new_tokens`.

    Raises:
        ConfigError: there is no room.
    """
    limit = min(context, generation.max_model_len or context)
    if generation.max_model_len is not None and generation.max_model_len > context:
        raise ConfigError(f"generation.max_model_len: {generation.max_model_len} is above the model's context of {context} tokens")
    room = limit - max_new_tokens
    if room < 1:
        raise ConfigError(f"{field}: {max_new_tokens} leaves no room for a prompt in a context of {limit} tokens")
    return room


def _check_prompts(config: RunConfig, encoder: PromptEncoder, environment: Environment, context: int) -> None:
    room = room_for_prompts(config.generation, config.rollout.max_new_tokens, context, _FIELD)
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        for index in range(_checked(config.environment, environment, split)):
            problem = environment.problem(split, index)
            prompt = fit(problem, encoder.prompt(problem), room, config.environment.on_too_long)
            if prompt is None:
                continue
            length = len(prompt)
            answer = len(encoder.answer(problem)) if config.warm_start.steps and split == "train" else 0
            if length + answer > context:
                raise ConfigError(
                    f"environment: {split} prompt {index} with its answer has {length + answer} tokens, the context is {context}: "
                    "shorten it, or set warm_start.steps=0"
                )
