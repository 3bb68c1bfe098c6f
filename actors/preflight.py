"""Everything that can be wrong with a `grpo` or `evaluate` run and seen without starting it; preflight_sft.py has that of `sft`.

Each problem is one ConfigError that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from actors.environments import Environment, Problem, Split, build
from actors.environments.scoring.golds import check_golds
from actors.models import memory_parts, memory_plan
from actors.models.hf import check_engine_reads, check_layout, check_model_dir, check_teacher_dir, head_dim, teacher_field
from actors.models.memory_advice import advise
from actors.models.memory_parts import ModelShape
from actors.models.scratch_model import write_scratch_model
from actors.models.source import gguf_model, known_gguf, known_model, local_model
from actors.policy.objectives import advantages, registry, surrogates
from actors.rollout.examples import build_problems
from actors.rollout.prompts import Problems, PromptEncoder, PromptStream, StreamedProblems, fit
from actors.rollout.staleness import build as build_sampler
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from configs.evaluate import EvaluateConfig
from configs.run import BaseRunConfig, RunConfig
from configs.sft import SftConfig
from configs.trackers import check_installed

PROBED_PROMPTS = 512  # of each split; a generated task cannot be checked to its end
_CHECKED_ROWS = 20_000  # of each split of a data set: some seconds; longer ones are dealt with when they are drawn
_TOKENIZER_TEXTS = 2000
# Without any of these transformers makes up a tokenizer with one token.
_TOKENIZER_FILES = ("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt")
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.26: CPUAttentionBackend.get_supported_head_sizes


def prepare_model(config: RunConfig | SftConfig, directory: Path) -> str:
    """The directory of the model to train: that of `model.path` or `model.gguf`; or `directory`, into which a small model is written.

    What is elsewhere is fetched, and a GGUF file converted.

    Raises:
        ConfigError: the data, the GGUF file, the model's shape or a tracker does not work, or the model cannot be fetched.
    """
    check_installed(config.trackers)
    model = config.model
    if model.gguf is not None:
        return gguf_model(model.gguf)
    if model.path is not None:
        return local_model(model.path)
    problems: Problems = (
        build(config.environment, config.seed) if isinstance(config, RunConfig) else build_problems(config.data, config.seed)
    )
    texts = [problems.problem("train", i) for i in range(min(_TOKENIZER_TEXTS, problems.size("train")))]
    return str(write_scratch_model(directory, model, [f"{p.question} {p.answer}" for p in texts], config.seed))


def check(config: RunConfig, model_path: str) -> None:
    """Model, tokenizer, prompts and layout fit each other, and the GPUs.

    Raises:
        ConfigError: what does not, and what to change.
    """
    if config.mode == "async":
        build_sampler(config.asynchronous, config.rollout.prompts_per_step)
    registry.build(config.policy.loss.objective, config.policy)
    surrogates.find(config.policy.loss.surrogate)
    advantages.find(config.policy.loss.advantages)
    shape = check_model_dir(model_path)
    check_engine_reads(model_path)
    _check_head_size(shape)
    check_layout(config.policy.parallel, shape)
    _check_teachers(config, model_path)
    check_memory(config, ModelShape.of(shape))
    source, context = config.environment, int(shape.max_position_embeddings)
    encoder = load_encoder(model_path, shape, source.system_prompt, source.chat_template_kwargs)
    environment = build(source, config.seed)
    PromptStream(environment, config.seed, curriculum=source.curriculum)  # it refuses levels that are not there
    room = _room_for_prompts(config, context)
    problems = _asked(environment, encoder, source, room, context if config.warm_start.steps else None)
    _check_answers(config, source, problems)
    _check_sets(config, model_path, shape, room)


def with_local_models(config: EvaluateConfig) -> EvaluateConfig:
    """The run with the directories of its models, fetched if need be. Links such as runs/latest are followed: they may move meanwhile.

    Raises:
        ConfigError: as `local_model`.
    """
    found = {name: Path(local_model(path, name)) for name, path in config.models.items()}
    return config.model_copy(update={name: str(path.resolve()) for name, path in found.items()})


def check_evaluation(config: EvaluateConfig) -> int:
    """Models, tokenizers and problems of an `evaluate` run fit each other. Returns the number of problems.

    Raises:
        ConfigError: what does not, and what to change.
    """
    check_installed(config.trackers)
    source = config.source
    try:
        environment = build(source, config.seed)
    except ConfigError as error:
        raise ConfigError(str(error).replace("environment.path", "problems")) if config.problems else error from None
    problems = [environment.problem("validation", index) for index in range(environment.size("validation"))]
    for name, path in config.models.items():
        try:
            shape = check_model_dir(path)
            check_engine_reads(path)
            _check_head_size(shape)
            encoder = load_encoder(path, shape, source.system_prompt, source.chat_template_kwargs)
            room = _room_for_prompts(config, int(shape.max_position_embeddings))
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.path:", f"{name}:")) from None
        for problem in problems:
            fit(problem, encoder.prompt(problem), room, source.on_too_long)
        _check_sets(config, path, shape, room)
    _check_answers(config, source, problems[: _checked(source, environment, "validation")])
    return len(problems)


def longest_sample(config: RunConfig, model_path: str) -> int:
    """Most tokens that a prompt and its response can have."""
    context = int(check_model_dir(model_path).max_position_embeddings)
    return min(context, config.generation.max_model_len or context)


def _check_teachers(config: RunConfig, model_path: str) -> None:
    """Each teacher reads the same tokens, in the policy's layout, and as many of them."""
    if config.policy.teacher is None:
        return
    own, longest = load_encoder(model_path, check_model_dir(model_path), None).tokenizer.get_vocab(), longest_sample(config, model_path)
    for source, name in config.policy.teacher.models.items():
        field = teacher_field(source)
        path = local_model(name, field)
        shape = check_teacher_dir(path, source)
        try:
            check_layout(config.policy.parallel, shape)
            taught = load_encoder(path, shape, None).tokenizer.get_vocab()
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.path", field)) from None
        if taught != own:
            token = next(one for one in sorted({*taught, *own}) if taught.get(one) != own.get(one))
            raise ConfigError(
                f"{field}: token {token!r} is number {taught.get(token)} in {path} and {own.get(token)} in {model_path}: a teacher must "
                "have the tokenizer of the model that it teaches"
            )
        if longest > shape.max_position_embeddings:
            raise ConfigError(
                f"{field}: samples may have {longest} tokens, the context of {path} is {shape.max_position_embeddings}: lower "
                "generation.max_model_len"
            )


def _check_head_size(shape: Any) -> None:
    """vLLM has a kernel for the model's attention heads."""
    size = head_dim(shape)
    if not torch.cuda.is_available() and size not in _CPU_HEAD_SIZES:
        raise ConfigError(
            f"model: an attention head has {size} dimensions; vLLM on a CPU has kernels for {', '.join(map(str, _CPU_HEAD_SIZES))}: "
            "change model.hidden_size or model.num_attention_heads"
        )


def planned_memory(config: BaseRunConfig, shape: ModelShape | None = None) -> tuple[memory_plan.GpuPlan, ...]:
    """What each kind of GPU of the run holds. Empty when the policy is to be on a CPU.

    Args:
        shape: of the model; default: what `model.path` or the recipe says.

    Raises:
        ConfigError: `model.path` cannot be read.
    """
    if config.policy.device == "cpu" or (isinstance(config, RunConfig) and config.placement == "cpu"):
        return ()
    return memory_plan.plan(config, shape or _shape(config), torch.cuda.device_count())


def engine_bytes(config: EvaluateConfig) -> float:
    """What an engine of the largest model holds on each of its GPUs; 0 for models that are not there yet."""
    found = [0.0]
    for path in config.models.values():
        with suppress(ConfigError):  # the preflight says so
            found.append(memory_parts.engine_bytes(ModelShape.of(check_model_dir(known_model(path))), config.generation))
    return max(found)


def _shape(config: BaseRunConfig) -> ModelShape:
    model = config.model
    if model.gguf is not None:
        return ModelShape.of(known_gguf(model.gguf))
    return ModelShape.of(model if model.path is None else check_model_dir(known_model(model.path)))


def check_memory(config: BaseRunConfig, shape: ModelShape | None = None) -> list[str]:
    """The run fits the GPUs of this machine, if it has some. Returns a warning for each kind of GPU that the run nearly fills.

    Raises:
        ConfigError: it does not; with the sizes, and the setting with which it would.
    """
    capacity = memory_plan.gpu_capacity() if torch.cuda.is_available() else None
    if capacity is None:
        return []
    shape = shape or _shape(config)
    return memory_plan.check(planned_memory(config, shape), capacity, lambda: advise(config, shape, torch.cuda.device_count(), capacity))


def _check_answers(config: RunConfig | EvaluateConfig, source: EnvironmentConfig, problems: Sequence[Problem]) -> None:
    """Every answer of the data counts as right by its own reward."""
    # A generator with its own verifier holds no answers that a person could have got wrong.
    if config.rewards or source.kind != "reasoning_gym" or source.sources:
        check_golds(problems, config.paid, config.scoring, source)


def _check_sets(config: RunConfig | EvaluateConfig, model_path: str, shape: Any, room: int) -> None:
    """The further validation sets can be asked of the model, and their answers count as right."""
    for name, source in config.validation.sets.items():
        try:
            environment = build(source, config.seed)
            encoder = load_encoder(model_path, shape, source.system_prompt, source.chat_template_kwargs)
            problems = _asked(environment, encoder, source, room, splits=("validation",))
            _check_answers(config, source, problems)
        except ConfigError as error:
            raise ConfigError(f"validation.sets.{name}: {error}") from None


def _asked(
    environment: Environment,
    encoder: PromptEncoder,
    source: EnvironmentConfig,
    room: int,
    with_answer: int | None = None,
    splits: tuple[Split, ...] = ("train", "validation"),
) -> list[Problem]:
    """The problems that are looked at, after a check of their lengths.

    Args:
        room: most tokens of a prompt. with_answer: most tokens of a training prompt and its answer; None: any.
    """
    problems = []
    for split in splits:
        for index in range(_checked(source, environment, split)):
            problem = environment.problem(split, index)
            problems.append(problem)
            prompt = fit(problem, encoder.prompt(problem), room, source.on_too_long)
            if prompt is None or with_answer is None or split != "train":
                continue
            length = len(prompt) + len(encoder.answer(problem))
            if length > with_answer:
                raise ConfigError(
                    f"environment: {split} prompt {index} with its answer has {length} tokens, the context is {with_answer}: "
                    "shorten it, or set warm_start.steps=0"
                )
    return problems


def _checked(source: EnvironmentConfig, environment: Environment, split: Split) -> int:
    """How many problems of the split are looked at."""
    if split == "train" and isinstance(environment, StreamedProblems):
        return 0
    return min(_CHECKED_ROWS if "dataset" in source.kinds else PROBED_PROMPTS, environment.size(split))


def load_encoder(
    model_path: str, shape: Any, system_prompt: str | None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> PromptEncoder:
    """The model's tokenizer, which fits the model.

    Raises:
        ConfigError: there is none, its vocabulary is larger than the model's, or it has no end token.
    """
    if not any(all((Path(model_path) / name).is_file() for name in names) for names in _TOKENIZER_FILES):
        raise ConfigError(
            f"model.path: {model_path} has no tokenizer: tokenizer.json is needed (or tokenizer.model, or vocab.json with merges.txt), "
            "which the tokenizer's save_pretrained writes"
        )
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


def _room_for_prompts(config: RunConfig | EvaluateConfig, context: int) -> int:
    """Most tokens that a prompt may have beside a response. `context` is the model's."""
    limit, room = config.generation.max_model_len or context, config.prompt_room(context)
    if limit > context:
        raise ConfigError(f"generation.max_model_len: {limit} is above the model's context of {context} tokens")
    if room < 1:
        field = "rollout" if isinstance(config, RunConfig) else "sampling"
        raise ConfigError(f"{field}.max_new_tokens: {limit - room} leaves no room for a prompt in a context of {limit} tokens")
    return room
