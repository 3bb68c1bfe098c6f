"""Which one setting would make a run fit its GPUs: candidates are planned, the mildest first, until one fits.

    sleep ─► fewer tokens at once ─► smaller KV cache ─► fewer engines on the GPU ─► GPUs apart ─► weights over several GPUs

The last two may want more GPUs than there are, and then say how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from actors.models.memory_parts import GIB, ModelShape, micro_batch_tokens
from actors.models.memory_plan import plan
from configs.base import ConfigError
from configs.run import BaseRunConfig, RunConfig

_WAYS = (2, 4, 8)  # of tensor parallelism
_NONE = "no single setting makes it fit: take several of policy.batching, policy.parallel and generation.kv_cache_gib, or a smaller model"


def advise(config: BaseRunConfig, shape: ModelShape, gpus: int, capacity: float) -> str:
    """An override, as the command line takes it, with which all plans are within `capacity` bytes; or that there is none.

    Args:
        gpus: of the machine or cluster.
    """
    later = ""
    for changes in _candidates(config, shape):
        if (changed := _changed(config, changes)) is None:
            continue
        needed = _gpus(changed)
        if max(one.peak.total for one in plan(changed, shape, max(gpus, needed))) > capacity:
            continue
        words = " ".join(f"{field}={_written(value)}" for field, value in changes.items())
        if needed <= max(gpus, 1):
            return f"it would fit with {words}"
        later = later or f"it would fit with {words} on {needed} GPUs"
    return later or _NONE


def _candidates(config: BaseRunConfig, shape: ModelShape) -> Iterator[dict[str, Any]]:
    """Fields to change together, and their values."""
    colocated = isinstance(config, RunConfig) and config.placement_on(1) == "colocated"
    if isinstance(config, RunConfig) and colocated and config.mode == "sync" and config.generation.sleep_level == 0:
        yield {"generation.sleep_level": 1}
    yield from _fewer_tokens(config, shape)
    if isinstance(config, RunConfig):
        generation = config.generation
        longest = min(shape.context, generation.max_model_len or shape.context)
        size, least = generation.kv_cache_gib / 2, longest * shape.cache_bytes(generation.dtype) / GIB
        while size >= max(least, 0.25):
            yield {"generation.kv_cache_gib": round(size, 3)}
            size /= 2
        if colocated and config.policy.parallel.world_size == 1:
            yield from ({"generation.num_engines": count} for count in range(generation.num_engines - 1, 0, -1))
        if colocated and generation.sleep_level == 0:
            yield {"placement": "separate"}
        elif colocated:
            yield {"placement": "separate", "generation.sleep_level": 0}
        yield from ({"generation.tensor_parallel_size": ways} for ways in _WAYS if _splits(shape, ways))
    yield from ({"policy.parallel.tensor": ways} for ways in _WAYS if _splits(shape, ways) and ways > config.policy.parallel.tensor)
    if isinstance(config, RunConfig) and colocated:
        yield from (
            {"policy.parallel.tensor": ways, "generation.num_engines": ways * config.generation.num_engines}
            for ways in _WAYS if _splits(shape, ways)
        )  # fmt: skip


def _fewer_tokens(config: BaseRunConfig, shape: ModelShape) -> Iterator[dict[str, Any]]:
    """Smaller micro-batches: half, a quarter, and so on."""
    batching = config.policy.batching
    longest = min(shape.context, config.generation.max_model_len or shape.context) if isinstance(config, RunConfig) else shape.context
    if batching.tokens_per_micro_batch is None:
        rows = batching.micro_batch_size // 2
        while rows >= 1:
            yield {"policy.batching.micro_batch_size": rows}
            rows //= 2
        return
    tokens, row = batching.tokens_per_micro_batch // 2, longest
    if batching.mode == "dynamic":
        row = micro_batch_tokens(config.policy, longest)[1]
    while tokens >= row:
        changes: dict[str, Any] = {"policy.batching.tokens_per_micro_batch": tokens}
        if batching.token_buckets and batching.token_buckets[-1] > tokens:
            kept = [bucket for bucket in batching.token_buckets if bucket < tokens]
            changes["policy.batching.token_buckets"] = [*kept, tokens]
        yield changes
        tokens //= 2


def _changed(config: BaseRunConfig, changes: dict[str, Any]) -> BaseRunConfig | None:
    """The configuration with these fields; None: that is not valid."""
    values = config.model_dump(exclude_unset=True)
    for field, value in changes.items():
        place, *names = values, *field.split(".")
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = value
    try:
        changed = type(config).model_validate(values)
    except (ValidationError, ConfigError):
        return None
    fits = not isinstance(changed, RunConfig) or changed.placement != "colocated" or changed.may_share_gpus
    return changed if fits else None


def _gpus(config: BaseRunConfig) -> int:
    """GPUs that the run needs."""
    workers = config.policy.parallel.world_size
    if not isinstance(config, RunConfig):
        return workers
    shares = config.placement != "separate" and config.may_share_gpus
    return workers if shares else config.gpus_apart


def _splits(shape: ModelShape, ways: int) -> bool:
    heads = shape.heads, shape.key_value * shape.heads // shape.query
    return all(number % ways == 0 for number in (*heads, shape.intermediate))


def _written(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)
