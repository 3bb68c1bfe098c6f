"""Everything that can be wrong with an `sft` run and seen without starting it: model, layout, and every sample of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from actors.environments import Split
from actors.models.hf import check_layout, check_model_dir
from actors.models.memory_plan import ModelShape
from actors.preflight import check_memory, given_model, load_encoder, scratch_model
from actors.rollout.examples import build_problems
from actors.rollout.prompts import Problems
from actors.rollout.supervised import SampleReader, SampleTooLongError
from configs.base import ConfigError
from configs.sft import SftConfig

_PROBED = 512  # of each split of an environment, which cannot be checked to its end


@dataclass(frozen=True)
class SupervisedData:
    """What the data came to.

    Attributes:
        train, validation: samples that can be trained on.
        dropped: samples that are too long (`data.on_too_long=drop`), as far as they were looked at.
        longest: most tokens of a sample, as far as they were looked at.
        allowed: most tokens that a sample may have.
    """

    train: int
    validation: int
    dropped: int
    longest: int
    allowed: int

    def steps(self, config: SftConfig) -> int:
        """Optimizer steps of the run: `steps`, or as many batches as `epochs` passes take."""
        if config.steps is not None:
            return config.steps
        assert config.epochs is not None  # SftConfig checks it
        return -(-config.epochs * self.train // config.batch_size)


def prepare_sft_model(config: SftConfig, scratch_directory: Path) -> str:
    """The directory of the model to train: `model.path`, or what is written to `scratch_directory`.

    Raises:
        ConfigError: the data, the GGUF file or the model's shape does not work.
    """
    return given_model(config, scratch_directory) or scratch_model(config, build_problems(config.data, config.seed), scratch_directory)


def check_sft(config: SftConfig, model_path: str) -> SupervisedData:
    """Model, tokenizer, layout and samples fit each other. Reads all files, and the first samples of an environment.

    Raises:
        ConfigError: what does not, and what to change.
    """
    shape = check_model_dir(model_path)
    check_layout(config.policy.parallel, shape)
    check_memory(config, ModelShape.of(shape))
    encoder = load_encoder(model_path, shape, config.data.system)
    allowed = longest_allowed(config, int(shape.max_position_embeddings))
    problems = build_problems(config.data, config.seed)
    reader = SampleReader(encoder, allowed, config.data.on_too_long)
    (train, longest), (validation, longest_held_out) = (_fitting(config, problems, split, reader) for split in ("train", "validation"))
    return SupervisedData(train, validation, reader.dropped, max(longest, longest_held_out), allowed)


def longest_allowed(config: SftConfig, context: int) -> int:
    """Most tokens of a sample: `data.max_tokens`, within the model's context and what one micro-batch holds.

    Raises:
        ConfigError: `data.max_tokens` is more than they hold.
    """
    parallel, batching = config.policy.parallel, config.policy.batching
    align = parallel.row_multiple("cuda")  # the larger one: which device it will be is not known here
    bounds = [(context, "the model's context")]
    if batching.tokens_per_micro_batch is not None:
        bounds.append((batching.tokens_per_micro_batch // align * align, "policy.batching.tokens_per_micro_batch"))
    if batching.token_buckets:
        bounds.append((batching.token_buckets[-1], "policy.batching.token_buckets"))
    most, what = min(bounds)
    wanted = config.data.max_tokens
    if wanted is not None and wanted > most:
        raise ConfigError(f"data.max_tokens: {wanted} tokens are more than {what} holds ({most})")
    return wanted or most


def _fitting(config: SftConfig, problems: Problems, split: Split, reader: SampleReader) -> tuple[int, int]:
    # Samples of the split, and the longest one's tokens.
    size = problems.size(split)
    looked_at = size if config.data.environment is None else min(size, _PROBED)
    try:
        lengths = [len(sample) for sample in reader.read_all(problems.problem(split, i) for i in range(looked_at))]
    except SampleTooLongError as error:
        raise ConfigError(f"data: {split} sample {error}") from None
    if not lengths:
        raise ConfigError(f"data: none of {looked_at} {split} samples is short enough: give shorter ones, or a model with a longer context")
    return size - (looked_at - len(lengths)), max(lengths)
