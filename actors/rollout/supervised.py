"""Supervised batches: prompts with the responses to learn, as columns in the data plane.

    PromptStream ──problems──► SampleReader ──tokens──► SupervisedBatches ──put(columns)──► data plane
                                  └── too long: an error, or dropped and counted       └──► meta: keys, lengths, tags

`SupervisedCollector` is the actor of the `sft` flow; GRPO's collector makes the warm start's batches of the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.interface import DataPlane
from actors.data_plane.meta import KVBatchMeta, mint_key
from actors.data_plane.usage import OperationUsage
from actors.environments import Problem
from actors.heap import freeze_heap
from actors.rollout.assemble import SUPERVISED_FIELDS, Trajectory, token_columns
from actors.rollout.cut import FILE, StreamState
from actors.rollout.examples import REJECTED, build_problems
from actors.rollout.prompts import PromptEncoder, PromptStream
from configs.secrets import know
from configs.sft import SftConfig

OnTooLong = Literal["error", "drop"]


class SampleTooLongError(ValueError):
    """A sample has more tokens than it may; the message names it, with both numbers."""


@dataclass(frozen=True)
class TokenSample:
    """One sample as the model sees it: the loss is on `response`, whose last token ends it.

    Attributes:
        rejected: a worse response, if there is one: the sample is a pair then, of two rows.
    """

    uid: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    rejected: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt) + max(len(self.response), len(self.rejected))

    @property
    def responses(self) -> tuple[tuple[int, ...], ...]:
        """One for each row."""
        return (self.response, self.rejected) if self.rejected else (self.response,)


class SampleReader:
    """From problems to samples that are short enough. Prompt and response are tokenised apart, as they are in a rollout.

    Args:
        longest: most tokens of a sample.

    Attributes:
        dropped: samples left out so far.
    """

    def __init__(self, encoder: PromptEncoder, longest: int, on_too_long: OnTooLong) -> None:
        self._encoder, self._longest, self._on_too_long = encoder, longest, on_too_long
        self.dropped = 0

    def read(self, uid: str, problem: Problem) -> TokenSample | None:
        """The sample; None: it is too long, and dropped.

        Raises:
            SampleTooLongError: it is too long, and must not be.
        """
        worse = problem.columns.get(REJECTED)
        rejected = () if worse is None else self._encoder.answer(replace(problem, answer=worse))
        sample = TokenSample(uid, tuple(self._encoder.prompt(problem)), tuple(self._encoder.answer(problem)), tuple(rejected))
        if len(sample) <= self._longest:
            return sample
        if self._on_too_long == "error":
            raise SampleTooLongError(
                f"{problem.uid}: {len(sample)} tokens with the response, at most {self._longest} are allowed: shorten it, "
                "or (flow sft) set data.on_too_long=drop"
            )
        self.dropped += 1
        return None

    def read_all(self, problems: Iterable[Problem]) -> Iterator[TokenSample]:
        """The samples of all problems that are short enough, each with its number as uid."""
        found = (self.read(str(number), problem) for number, problem in enumerate(problems))
        return (sample for sample in found if sample is not None)

    def draw(self, problems: PromptStream, count: int) -> list[TokenSample]:
        """The next `count` training samples.

        Raises:
            SampleTooLongError: see `read`; or every sample of an epoch was dropped.
        """
        too_long = SampleTooLongError(f"each of the {problems.size} training samples is too long and was dropped")
        return problems.draw_kept(count, self.read, too_long)


class SupervisedBatches:
    """Writes samples into one partition of the data plane."""

    def __init__(self, plane: DataPlane, partition: str) -> None:
        self._plane, self._partition = plane, partition
        plane.register_partition(partition, fields=SUPERVISED_FIELDS)

    def put(self, samples: list[TokenSample], name: str, multiple_of: int = 1) -> KVBatchMeta:
        """Columns input_ids, token_mask and sample_mask of the samples. Returns keys and lengths, and of pairs the tags `pair`, `chosen`.

        Args:
            name: what the batch is for, in messages.
            multiple_of: rows are filled up to a multiple of this, with copies of the shortest that count for nothing.
        """
        real = [(number, one, i) for number, one in enumerate(samples) for i in range(len(one.responses))]
        shortest = min(samples, key=lambda one: len(one.prompt) + len(one.response))
        fillers = -len(real) % multiple_of
        rows = [*((one.prompt, one.responses[i]) for _, one, i in real), *[(shortest.prompt, shortest.response)] * fillers]
        columns = token_columns([Trajectory.demonstration(*row) for row in rows])
        columns = {name: columns[name] for name in SUPERVISED_FIELDS}
        columns["sample_mask"][len(real) :] = [torch.tensor(0.0)] * fillers
        tags: list[dict[str, Any]] = [
            {"response_length": len(one.responses[i])} | ({"pair": number, "chosen": i == 0} if one.rejected else {})
            for number, one, i in real
        ]
        meta = KVBatchMeta(
            partition_id=self._partition,
            task_name=name,
            keys=(
                *(mint_key(0, one.uid, i) for _, one, i in real),
                *(mint_key(0, shortest.uid, len(shortest.responses) + i) for i in range(fillers)),
            ),
            sequence_lengths=tuple(len(prompt) + len(response) for prompt, response in rows),
            tags=(*tags, *({"response_length": 0} for _ in range(fillers))),
        )
        return self._plane.put(meta, columns)


class SavedSamples(BaseModel):
    """Where the training samples of an `sft` run stand. dropped: samples that were too long so far."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: NonNegativeInt
    dropped: NonNegativeInt
    stream: StreamState


class SupervisedCollector:
    """Holds data and tokenizer of an `sft` run. Wrapped by `ray.remote` where the run starts its actors.

    Args:
        longest: most tokens of a sample.
        secrets: what the references of `data` refer to, where this process cannot look.
    """

    def __init__(
        self,
        config: SftConfig,
        model_path: str,
        address: DataPlaneAddress,
        longest: int,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        know(secrets)
        problems = build_problems(config.data, config.seed)
        encoder = PromptEncoder(model_path, config.data.system)
        self._replicas = config.policy.parallel.data
        self._batch_size, self._validation_batch_size = config.batch_size, config.validation_batch_size or config.batch_size
        self._reader = SampleReader(encoder, longest, config.data.on_too_long)
        self._stream = PromptStream(problems, config.seed)
        held_out = SampleReader(encoder, longest, config.data.on_too_long)
        self._held_out = list(held_out.read_all(problems.problem("validation", i) for i in range(problems.size("validation"))))
        self._plane = connect(address, timeout_s=config.data_plane.timeout_s)
        self._train, self._validation = SupervisedBatches(self._plane, "train"), SupervisedBatches(self._plane, "validation")

    def ready(self) -> str:
        """A line for the log, once the actor can work."""
        freeze_heap()
        return f"{self._stream.size} training and {len(self._held_out)} validation samples"

    def supervised(self, step: int) -> KVBatchMeta:
        """The next training batch. `extra_info["dropped_samples"]` counts the samples that were too long up to here."""
        meta = self._train.put(self._reader.draw(self._stream, self._batch_size), f"train batch {step}")
        return meta.model_copy(update={"extra_info": {"dropped_samples": self._reader.dropped}})

    def cut(self, directory: str, step: int) -> None:
        """Write where the training samples stand after `step` steps, as rollout.json in this directory."""
        saved = SavedSamples(step=step, dropped=self._reader.dropped, stream=StreamState.model_validate(self._stream.state()))
        (Path(directory) / FILE).write_text(saved.model_dump_json())

    def restore(self, directory: str) -> None:
        """Go on where `cut` was made.

        Raises:
            CheckpointError: the file is missing or damaged. ConfigError: the seed or the number of samples is another.
        """
        path = Path(directory) / FILE
        try:
            saved = SavedSamples.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{path}: not where an sft run stood: {str(error).splitlines()[0]}") from None
        self._stream.restore(saved.stream.model_dump())
        self._reader.dropped = saved.dropped

    def validation_batches(self) -> int:
        """How many batches the held-out samples make."""
        return -(-len(self._held_out) // self._validation_batch_size)

    def validation_batch(self, index: int) -> KVBatchMeta:
        """Held-out batch number `index`; the last one is filled up to a multiple of the replicas."""
        start = index * self._validation_batch_size
        samples = self._held_out[start : start + self._validation_batch_size]
        return self._validation.put(samples, f"validation batch {index}", multiple_of=self._replicas)

    def clear(self, meta: KVBatchMeta) -> None:
        """Forget these samples."""
        self._plane.clear(meta)

    def data_plane_metrics(self, others: dict[str, OperationUsage]) -> dict[str, float]:
        """`DataPlane.metrics` of this actor's client and of the given ones."""
        return self._plane.metrics([others])
