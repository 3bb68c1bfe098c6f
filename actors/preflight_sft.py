"""Everything that can be wrong with an `sft` run and seen without starting it: model, layout, and every sample of a file."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.environments import Split
from actors.models.hf import check_layout, check_model_dir
from actors.models.memory_parts import ModelShape
from actors.preflight import PROBED_PROMPTS, check_memory, load_encoder
from actors.rollout.examples import build_problems
from actors.rollout.prompts import Problems, PromptEncoder
from actors.rollout.supervised import SampleReader, SampleTooLongError
from configs.base import ConfigError
from configs.sft import SftConfig

_SPLITS: tuple[Split, ...] = ("train", "validation")
PART = 50_000  # samples that are measured together: about 10 s


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


def check_sft(config: SftConfig, model_path: str) -> tuple[Problems, int]:
    """Model, tokenizer and layout fit each other, and the data can be read. Returns them, and most tokens of a sample.

    Raises:
        ConfigError: what does not, and what to change.
    """
    shape = check_model_dir(model_path)
    check_layout(config.policy.parallel, shape)
    check_memory(config, ModelShape.of(shape))
    load_encoder(model_path, shape, config.data.system)
    allowed = longest_allowed(config, int(shape.max_position_embeddings))
    return build_problems(config.data, config.seed), allowed


@dataclass(frozen=True)
class Part:
    """Some samples of one split; `problems` are pickled, because Prefect walks through the lists that it gives to a task."""

    split: Split
    problems: bytes


@dataclass(frozen=True)
class Lengths:
    """Of a part: number of samples, how many of them are too long, and most tokens of the others."""

    split: Split
    samples: int
    dropped: int
    longest: int


def sample_parts(config: SftConfig, problems: Problems) -> Iterator[Part]:
    """All samples of files and the first ones of an environment, at most `PART` at a time."""
    for split in _SPLITS:
        size = problems.size(split) if config.data.environment is None else min(problems.size(split), PROBED_PROMPTS)
        for start in range(0, size, PART):
            rows = [problems.problem(split, index) for index in range(start, min(size, start + PART))]
            yield Part(split, pickle.dumps(rows))


def measure(part: Part, config: SftConfig, model_path: str, allowed: int) -> Lengths:
    """Tokenise the samples of a part.

    Raises:
        ConfigError: one is too long, and must not be.
    """
    reader = SampleReader(PromptEncoder(model_path, config.data.system), allowed, config.data.on_too_long)
    problems = pickle.loads(part.problems)
    try:
        longest = max((len(sample) for sample in reader.read_all(problems)), default=0)
    except SampleTooLongError as error:
        raise ConfigError(f"data: {part.split} sample {error}") from None
    return Lengths(part.split, len(problems), reader.dropped, longest)


def data_of(problems: Problems, lengths: Sequence[Lengths], allowed: int) -> SupervisedData:
    """What all parts came to.

    Raises:
        ConfigError: a split has no sample that is short enough.
    """
    dropped = {split: sum(one.dropped for one in lengths if one.split == split) for split in _SPLITS}
    for split in _SPLITS:
        looked_at = sum(one.samples for one in lengths if one.split == split)
        if dropped[split] == looked_at:
            raise ConfigError(
                f"data: none of {looked_at} {split} samples is short enough: give shorter ones, or a model with a longer context"
            )
    train, validation = (problems.size(split) - dropped[split] for split in _SPLITS)
    return SupervisedData(train, validation, sum(dropped.values()), max(one.longest for one in lengths), allowed)


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
