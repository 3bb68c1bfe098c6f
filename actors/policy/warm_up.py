"""One synthetic batch of the worst-case shape through every stage before step 1: first-time work (allocators, kernels, gloo and NCCL
connections, graph captures) is done then. Weights, optimizer, schedule and random state stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from actors.data_plane.interface import DataPlane
from actors.data_plane.meta import KVBatchMeta
from actors.policy.batch import BASE, CANDIDATES
from actors.policy.executors import Request
from actors.policy.objectives import registry as objectives
from configs.base import ConfigError
from configs.policy import PolicyConfig

PARTITION = "warm-up"
_LOGPROBS = "warm_up_logprobs"


def warm_up(config: PolicyConfig, plane: DataPlane, longest: int, run: Callable[[Request, KVBatchMeta], object]) -> dict[str, float]:
    """Run the stages over synthetic samples. Returns wall-clock seconds per stage.

    Args:
        longest: tokens of a sample when `compiled_graph.warmup_seq_len` does not say.
        run: gives every replica its part of the batch: `run(request without plan, meta)`.

    Raises:
        ConfigError: a batch size that does not divide, or samples longer than `longest`.
    """
    meta = _put(config, plane, *_shape(config, longest))
    requests = {"train": Request("warm_up", (config.loss.objective,))}
    if config.why_no_logprob() is None or config.why_no_ref_logprob() is None:
        requests = {"logprob": Request("logprob", (_LOGPROBS, False)), **requests}
    passes = 1 if config.cuda_graph.impl == "none" else config.cuda_graph.warmup_steps + 1  # the last one captures
    seconds = {}
    try:
        for source in config.teacher.models if config.teacher else ():
            started = time.monotonic()
            run(Request("logprob", (_LOGPROBS, True)), _of_source(meta, source))
            seconds[f"ref_logprob {source}".rstrip()] = time.monotonic() - started
        for stage, request in requests.items():
            started = time.monotonic()
            for _ in range(passes):
                run(request, meta)
            seconds[stage] = time.monotonic() - started
    finally:
        plane.clear(meta)
    return seconds


def _of_source(meta: KVBatchMeta, source: str) -> KVBatchMeta:
    """The same rows, as if their prompts were that source's."""
    return meta.model_copy(update={"tags": tuple({**tag, "source": source} for tag in meta.tags)})


def _shape(config: PolicyConfig, longest: int) -> tuple[int, int]:
    graph, batching, replicas = config.compiled_graph, config.batching, config.parallel.data
    length = graph.warmup_seq_len or longest
    if length > longest:
        raise ConfigError(f"policy.compiled_graph.warmup_seq_len: {length} tokens are more than a sample can have ({longest})")
    if batching.mode == "padded":
        per_replica = batching.micro_batch_size
    else:
        assert batching.tokens_per_micro_batch is not None
        per_replica = max(1, batching.tokens_per_micro_batch // length)
    samples = graph.warmup_global_batch_size or per_replica * replicas
    if samples % replicas:
        raise ConfigError(
            f"policy.compiled_graph.warmup_global_batch_size: {samples} samples do not divide by policy.parallel.data = {replicas}"
        )
    return samples, length


def _put(config: PolicyConfig, plane: DataPlane, samples: int, length: int) -> KVBatchMeta:
    read = (*BASE, *objectives.build(config.loss.objective, config).columns)
    names = [name for name in read if name not in CANDIDATES]  # the teacher's pass, which is the first, writes those
    plane.register_partition(PARTITION, fields=[*names, *CANDIDATES, _LOGPROBS])
    meta = KVBatchMeta(
        partition_id=PARTITION,
        task_name="warm-up",
        keys=tuple(f"warm_up_{row}" for row in range(samples)),
        sequence_lengths=(length,) * samples,
        tags=tuple({"response_length": length - 1} for _ in range(samples)),
    )
    values = {
        "input_ids": torch.ones(length, dtype=torch.int64),
        "token_mask": torch.arange(length) > 0,
        "sample_mask": torch.tensor(1.0),
        "advantages": torch.tensor(0.0),
    }
    logprobs = torch.zeros(length)
    return plane.put(meta, {name: [values.get(name, logprobs)] * samples for name in names}).with_fields(*read)
