"""How full micro-batches are, how equal ranks are, and how long planning takes. CPU only; a few seconds.

Lengths are drawn from a lognormal distribution, rounded, and clipped to [1, longest]; two workloads (median, sigma, longest), five seeds
each. `plan_batch` plans every (sequences, ranks, budget) setting in every layout, with rows aligned to 8 tokens, as on a GPU.

  efficiency  tokens of sequences / (micro-batches of all ranks x common shape T); dynamic and padded: / sum of rows x T.
              Alignment, empty rows and the unfilled end of every row all count as waste.
  imbalance   most tokens on a rank / mean tokens of a rank - 1.
  plan        one call of plan_batch: lengths and tags in, validated plan out. Median and largest of `REPEATS` calls by the wall clock,
              and the median of the process's own CPU time, which other processes on the machine disturb less.

`value` is the worst efficiency of the default packing ("balanced") over all settings and seeds; so are the other figures of a table row.
The limits below the settings show what no packing can mend; they are not part of `value`. Their `bound` is the best efficiency that
the number of micro-batches, the longest sequence and the alignment leave open.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from typing import NamedTuple

from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import BatchPlan, plan_batch
from configs.batching import BatchingConfig

SEEDS = range(5)
REPEATS = 15
WORKLOADS = {  # median, sigma, longest, all in tokens but sigma
    "answers": (700, 0.8, 4096),
    "reasoning": (3000, 0.9, 16384),
}


class Setting(NamedTuple):
    workload: str
    sequences: int
    ranks: int
    budget: int
    align: int = 8
    sequence_align: int = 1


SETTINGS = (
    Setting("answers", 64, 4, 16384),
    Setting("answers", 256, 8, 8192),
    Setting("answers", 512, 8, 16384),
    Setting("answers", 2048, 32, 16384),
    Setting("answers", 4096, 64, 8192),
    Setting("answers", 4096, 64, 16384),
    Setting("answers", 4096, 64, 32768),
    Setting("reasoning", 512, 16, 32768),
    Setting("reasoning", 1024, 16, 32768),
    Setting("reasoning", 4096, 64, 32768),
)
LIMITS = {
    "two sequences per rank: the longest sets T": Setting("answers", 128, 64, 16384),
    "budget = longest sequence: no room to choose T": Setting("answers", 4096, 64, 4096),
    "rows align 128, sequences 4 (tensor 4, context 2)": Setting("answers", 4096, 64, 8192, align=128, sequence_align=4),
}
LAYOUTS = {
    "balanced": {"mode": "packed"},
    "first_fit_decreasing": {"mode": "packed", "packing": "first_fit_decreasing"},
    "dynamic": {"mode": "dynamic"},
    "padded": {"mode": "padded"},
}


def draw(workload: str, sequences: int, seed: int) -> KVBatchMeta:
    """A batch as a rollout hands it over: groups of eight, with a rollout's tags."""
    median, sigma, longest = WORKLOADS[workload]
    source = random.Random(seed)
    lengths = tuple(min(max(round(source.lognormvariate(math.log(median), sigma)), 1), longest) for _ in range(sequences))
    tags = tuple(
        {"response_length": length // 2, "reward": 1.0, "prompt_uid": str(row // 8), "weight_version": 0, "truncated": False}
        for row, length in enumerate(lengths)
    )
    keys = tuple(f"v0_p{row // 8}_g{row % 8}" for row in range(sequences))
    return KVBatchMeta(partition_id="packing", task_name="rollout", keys=keys, sequence_lengths=lengths, tags=tags)


def layout(name: str, setting: Setting) -> BatchingConfig:
    budget = {"micro_batch_size": 8} if name == "padded" else {"tokens_per_micro_batch": setting.budget}
    return BatchingConfig.model_validate(LAYOUTS[name] | budget)


def plans(name: str, setting: Setting) -> list[BatchPlan]:
    batching = layout(name, setting)
    metas = [draw(setting.workload, setting.sequences, seed) for seed in SEEDS]
    return [one_plan(meta, batching, setting) for meta in metas]


def one_plan(meta: KVBatchMeta, batching: BatchingConfig, setting: Setting) -> BatchPlan:
    return plan_batch(meta, batching, data_parallel=setting.ranks, align=setting.align, sequence_align=setting.sequence_align)


def quality(planned: list[BatchPlan]) -> dict[str, float]:
    """The worst over the seeds, recomputed from the plan's shapes and rows."""
    efficiencies, imbalances = [], []
    for plan in planned:
        loads = [sum(shard.meta.sequence_lengths) for shard in plan.shards]
        efficiencies.append(sum(loads) / sum(b.shape[0] * b.shape[1] for shard in plan.shards for b in shard.micro_batches))
        imbalances.append(max(loads) / statistics.fmean(loads) - 1)
    return {
        "efficiency": round(min(efficiencies), 4),
        "imbalance": round(max(imbalances), 4),
        "micro_batches": max(len(plan.shards[0].micro_batches) for plan in planned),
    }


def bound(plan: BatchPlan, setting: Setting) -> float:
    lengths = [length for shard in plan.shards for length in shard.meta.sequence_lengths]
    bins = sum(len(shard.micro_batches) for shard in plan.shards)
    sizes = [up(length, setting.sequence_align) for length in lengths]
    return sum(lengths) / (bins * up(max(-(-sum(sizes) // bins), *sizes), setting.align))


def up(length: int, align: int) -> int:
    return -(-length // align) * align


def seconds(name: str, setting: Setting) -> dict[str, float]:
    """Milliseconds of one plan_batch."""
    meta, batching = draw(setting.workload, setting.sequences, 0), layout(name, setting)
    wall, cpu = [], []
    for _ in range(REPEATS):
        started, used = time.perf_counter(), time.process_time()
        one_plan(meta, batching, setting)
        wall.append(1e3 * (time.perf_counter() - started))
        cpu.append(1e3 * (time.process_time() - used))
    return {
        "plan_ms": round(statistics.median(wall), 1),
        "plan_ms_max": round(max(wall), 1),
        "plan_cpu_ms": round(statistics.median(cpu), 1),
    }


def main() -> None:
    print("worst of 5 seeds          efficiency (imbalance, micro-batches per rank)                                            plan, ms")
    print(f"{'workload  seq ranks budget':28}" + "".join(f"{name:>24}" for name in LAYOUTS) + f"{'balanced':>12}")
    rows = []
    for setting in SETTINGS:
        results = {name: quality(plans(name, setting)) | seconds(name, setting) for name in LAYOUTS}
        rows.append(setting._asdict() | {"layouts": results})
        cells = [f"{r['efficiency']:.4f} ({r['imbalance']:6.2%}, {r['micro_batches']:2.0f})" for r in results.values()]
        where = f"{setting.workload:9} {setting.sequences:5} {setting.ranks:3} {setting.budget:6}"
        print(f"{where:28}" + "".join(f"{cell:>24}" for cell in cells) + f"{results['balanced']['plan_ms']:12.1f}")
    limits = []
    for name, setting in LIMITS.items():
        found = plans("balanced", setting)
        result = quality(found) | {"bound": round(min(bound(plan, setting) for plan in found), 4)}
        limits.append({"limit": name, **setting._asdict(), **result})
        print(f"limit: {name}: efficiency {result['efficiency']:.4f}, bound {result['bound']:.4f}, imbalance {result['imbalance']:.2%}")

    packed = [row["layouts"]["balanced"] for row in rows]
    large = [row["layouts"]["balanced"] for row in rows if (row["sequences"], row["ranks"]) == (4096, 64)]
    value = min(result["efficiency"] for result in packed)
    imbalance, plan_ms = max(result["imbalance"] for result in packed), max(result["plan_ms"] for result in large)
    detail = {
        "imbalance": imbalance,
        "plan_4096_over_64_ms": plan_ms,
        "plan_4096_over_64_cpu_ms": max(result["plan_cpu_ms"] for result in large),
        "targets": {"efficiency": 0.97, "imbalance": 0.03, "plan_ms": 50},
        "met": value >= 0.97 and imbalance <= 0.03 and plan_ms <= 50,
        "lengths": {name: dict(zip(("median", "sigma", "longest"), numbers, strict=True)) for name, numbers in WORKLOADS.items()},
        "seeds": len(SEEDS),
        "settings": rows,
        "limits": limits,
    }
    print(json.dumps({"name": "packing", "value": value, "unit": "tokens of sequences / tokens computed", "detail": detail}))


if __name__ == "__main__":
    main()
