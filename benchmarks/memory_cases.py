"""What benchmarks.memory measures, and what the memory plan refuses: configurations with their plans. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, Qwen2Config

from actors.models import memory_plan
from actors.models.memory_advice import advise
from actors.models.memory_parts import GIB, ModelShape
from benchmarks import gpu_run, grpo_step, train_step
from configs.batching import BatchingConfig
from configs.loader import load
from configs.run import RunConfig

GROUPS = ("workers", "runs", "two-gpus")
RESPONSES = ["rollout.prompts_per_step=16", "rollout.responses_per_prompt=8", "generation.max_num_seqs=128"]
COMPILED = "generation.enforce_eager=false"


@dataclass(frozen=True)
class Case(train_step.Case):
    """A configuration. `length`: most tokens of a sequence; `tokens`: of a micro-batch.

    Attributes:
        overrides: fields of the run, beyond `OVERRIDES`.
        sequences: sequence buckets of packed micro-batches.
    """

    shape: str
    group: str = GROUPS[0]
    overrides: tuple[str, ...] = ()
    sequences: tuple[int, ...] = (512,)

    def batching(self) -> BatchingConfig:
        """Fixed shapes, eager or not."""
        if self.mode == "padded":
            return BatchingConfig(micro_batch_size=self.tokens // self.length, token_buckets=(self.length,))
        buckets = tuple(sorted({self.length, self.tokens}))
        return BatchingConfig(mode="packed", tokens_per_micro_batch=self.tokens, token_buckets=buckets, sequence_buckets=self.sequences)

    def config(self) -> RunConfig:
        """The run."""
        batching = self.batching().model_dump_json(exclude_unset=True)
        sized = [f"policy.batching={batching}", f"generation.max_model_len={self.length}", f"rollout.max_new_tokens={self.length - 32}"]
        placed = "separate" if self.group == GROUPS[0] else "colocated"
        base = [*grpo_step.OVERRIDES, "policy.cuda_graph.impl=none", "generation.enforce_eager=true", *RESPONSES, f"placement={placed}"]
        return load("arithmetic-cpu", [*base, *sized, *self.overrides])

    @property
    def gpus(self) -> int:
        return 2 if self.group == "two-gpus" else 1


GRAPHS, NO_KL = "policy.cuda_graph.impl=full_iteration", "policy.loss.kl_coef=0"
CASES: dict[str, Case] = {
    "135m-padded": Case("padded", 256, 4096, "smollm2-135m", overrides=(NO_KL,)),
    "135m-padded-graphs": Case("padded", 512, 16384, "smollm2-135m", overrides=(GRAPHS, NO_KL)),
    "135m-packed-graphs-kl": Case("packed", 256, 8192, "smollm2-135m", overrides=(GRAPHS,)),
    "0.5b-padded": Case("padded", 256, 2048, "0.5b", overrides=(NO_KL,)),
    "0.5b-packed-kl": Case("packed", 512, 8192, "0.5b"),
    "0.5b-padded-graphs": Case("padded", 1024, 8192, "0.5b", overrides=(GRAPHS, NO_KL)),
    "0.5b-packed-graphs-kl": Case("packed", 256, 4096, "0.5b", overrides=(GRAPHS,)),
    "1.5b-padded": Case("padded", 512, 4096, "1.5b", overrides=(NO_KL,)),
    "1.5b-packed-graphs-kl": Case("packed", 512, 8192, "1.5b", overrides=(GRAPHS,)),
    "run-135m-awake": Case("packed", 256, 16384, "smollm2-135m", "runs", (COMPILED, GRAPHS)),
    "run-135m-2-engines": Case("packed", 256, 8192, "smollm2-135m", "runs", ("generation.num_engines=2",)),
    "run-0.5b-awake": Case("padded", 256, 4096, "0.5b", "runs", ("generation.kv_cache_gib=8",)),
    "run-0.5b-sleep-1": Case("packed", 256, 8192, "0.5b", "runs", ("generation.sleep_level=1", "generation.kv_cache_gib=24")),
    "run-0.5b-sleep-2": Case("padded", 256, 8192, "0.5b", "runs", ("generation.sleep_level=2", GRAPHS)),
    "run-1.5b-sleep-1": Case("packed", 256, 4096, "1.5b", "runs", ("generation.sleep_level=1", "generation.kv_cache_gib=32")),
    "2-apart-0.5b": Case("packed", 256, 8192, "0.5b", "two-gpus", ("placement=separate",)),
    "2-data-0.5b-sleep-1": Case(
        "packed", 256, 8192, "0.5b", "two-gpus", ("policy.parallel.data=2", "generation.num_engines=2", "generation.sleep_level=1")
    ),
    "2-tensor-1.5b": Case("padded", 256, 8192, "1.5b", "two-gpus", ("policy.parallel.tensor=2", "generation.num_engines=2")),
}


def shape_of(case: Case) -> ModelShape:
    """Of the case's model, as its directory would say."""
    values = dict(gpu_run.SHAPES[case.shape])
    make: Any = {"qwen2": Qwen2Config, "llama": LlamaConfig}[values.pop("kind")]
    return ModelShape.of(make(**values, max_position_embeddings=case.length))


def planned(case: Case) -> dict[str, dict[str, float]]:
    """GiB by phase, of each kind of GPU that the case uses."""
    return {one.holds: {phase.name: round(phase.total / GIB, 2) for phase in one.phases} for one in plans(case)}


def plans(case: Case) -> tuple[memory_plan.GpuPlan, ...]:
    """Of the kinds of GPU that the case uses."""
    found = memory_plan.plan(case.config(), shape_of(case), case.gpus)
    return found[:1] if case.group == GROUPS[0] else found


@dataclass(frozen=True)
class Refused:
    """A run that no GPU of `gib` holds. `shape`: of `LARGE`; `overrides`: fields of the run, beyond `WANTED`."""

    shape: str
    gpus: int
    gib: float
    overrides: tuple[str, ...]

    def config(self, *more: str) -> RunConfig:
        """The run, with further fields."""
        return load("arithmetic-cpu", [*WANTED, *self.overrides, *more])

    def plans(self, *more: str) -> tuple[memory_plan.GpuPlan, ...]:
        """Of the run with further fields."""
        return memory_plan.plan(self.config(*more), LARGE[self.shape], self.gpus)

    def advice(self) -> str:
        """What the refusal says."""
        return advise(self.config(), LARGE[self.shape], self.gpus, self.gib * GIB)


def _qwen(layers: int, hidden: int, intermediate: int, heads: int, groups: int, size: int, tied: bool, generation: int) -> ModelShape:
    qk_norm = generation == 3
    return ModelShape(layers, hidden, intermediate, heads, heads * size, groups * size, 151936, 32768, tied, qk_norm)


LARGE = {
    "Qwen2.5-0.5B": _qwen(24, 896, 4864, 14, 2, 64, True, 2),
    "Qwen2.5-1.5B": _qwen(28, 1536, 8960, 12, 2, 128, True, 2),
    "Qwen3-4B": _qwen(36, 2560, 9728, 32, 8, 128, True, 3),
    "Qwen3-8B": _qwen(36, 4096, 12288, 32, 8, 128, False, 3),
}
H100, H200 = 79.6, 139.8  # GiB that the driver shows
WANTED = [
    "policy.dtype=bfloat16", "policy.loss.kl_coef=0", "generation.dtype=bfloat16", "generation.executor=async",
    "generation.enforce_eager=false", "generation.max_model_len=4096",
]  # fmt: skip
SHARED, APART = "placement=colocated", ("policy.parallel.tensor=4", "generation.num_engines=4", "placement=separate")


def _packed(tokens: int) -> str:
    return f"policy.batching={{mode: packed, tokens_per_micro_batch: {tokens}}}"


REFUSED = (
    Refused("Qwen2.5-0.5B", 1, H100, (SHARED, "generation.kv_cache_gib=48", _packed(16384))),
    Refused("Qwen2.5-1.5B", 1, H200, (SHARED, "generation.kv_cache_gib=64", _packed(32768))),
    Refused("Qwen2.5-1.5B", 1, H100, (SHARED, "generation.kv_cache_gib=32", "generation.sleep_level=1", _packed(32768))),
    Refused("Qwen2.5-0.5B", 1, H200, (SHARED, "generation.sleep_level=1", "policy.batching.micro_batch_size=64")),
    Refused("Qwen3-4B", 1, H200, (SHARED, "generation.kv_cache_gib=48", _packed(8192))),
    Refused("Qwen3-4B", 1, H200, (SHARED, "generation.kv_cache_gib=80", "generation.sleep_level=2", _packed(16384))),
    Refused("Qwen3-8B", 4, H200, ("generation.kv_cache_gib=64", "placement=separate", _packed(8192))),
    Refused("Qwen3-8B", 8, H100, (*APART, "generation.kv_cache_gib=80", _packed(8192))),
    Refused("Qwen3-8B", 8, H100, (*APART, "generation.kv_cache_gib=48", _packed(32768))),
    Refused(
        "Qwen2.5-1.5B", 1, H200,
        (SHARED, "generation.kv_cache_gib=16", "generation.num_engines=5", "mode=async", "policy.loss.importance_sampling=token",
         _packed(8192)),
    ),
)  # fmt: skip


def refusals() -> Iterator[str]:
    """Markdown: what is refused, and what the refusal says."""
    yield "| model | GPUs | settings | planned GiB, largest GPU | advice |"
    yield "|---|---|---|---|---|"
    for one in REFUSED:
        peak = max(found.peak.total for found in one.plans()) / GIB
        yield f"| {one.shape} | {one.gpus} x {one.gib:g} GiB | `{' '.join(one.overrides)}` | {peak:.0f} | {one.advice()} |"
