"""A policy worker's train and log-probability passes: one worker, its batch in its own memory; eager, and by CUDA graphs.

For each number of tokens in a micro-batch and each length: four micro-batches, padded (all rows of that length) and packed (lengths
drawn from a long-tailed distribution, the longest of them this length). A train step is all of it: reading the columns, forward,
backward, optimizer. Tokens/s count real tokens; TFLOP/s are the model's (forward and backward, or forward alone, from the lengths),
set against a bf16 (or, on a CPU, fp32) matrix product measured in the same run. Memory is what the allocator reserved, and `replayed`
the part of a step's micro-batches that a graph replayed. With --ray the worker is an actor, and the same step is called by plain actor
calls and through the compiled Ray graph as well.
`value` is the smallest eager / graphs time of a train step at 2,048 tokens per micro-batch or fewer (null unless both ran); `detail` has
the smallest at any size, and the best model TFLOP/s over the matrix product's.

    .venv/bin/python -m benchmarks.train_step [--shape tiny|0.5b|smollm2-135m|1.5b] [--impl none full_iteration] [--dtype D] [--ray]
        [--tokens 256 512 1024 2048 4096] [--lengths 256 1024 4096]
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import settings

settings.apply_defaults()

import ray  # noqa: E402  (after the settings: they are read at import)
import torch  # noqa: E402

from actors.data_plane.in_memory import MemoryPlane  # noqa: E402
from actors.data_plane.meta import KVBatchMeta  # noqa: E402
from actors.data_plane.sharding import BatchPlan, plan_batch  # noqa: E402
from actors.models.flops import training_flops  # noqa: E402
from actors.policy.executors import CompiledExecutor, PlainExecutor, Request  # noqa: E402
from actors.policy.worker import PolicyWorker  # noqa: E402
from configs.batching import BatchingConfig  # noqa: E402
from configs.policy import PolicyConfig  # noqa: E402

MICRO_BATCHES = 4
SMALL = 2048  # tokens of a micro-batch up to which launches, and not the GPU, limit an eager step
IMPLS, MODES = ["none", "full_iteration"], ["padded", "packed"]
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "kind": "qwen2", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True,
    },
    "0.5b": {
        "kind": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "kind": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "1.5b": {
        "kind": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
}  # fmt: skip
LOGPROBS = ("generation_logprobs", "policy_logprobs", "reference_logprobs")
FIELDS = ("input_ids", "token_mask", "sample_mask", "advantages", *LOGPROBS, "warm_up_logprobs")


def main() -> None:
    """Measure every implementation, size and layout, and print the result."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b" if cuda else "tiny")
    parser.add_argument("--impl", nargs="+", choices=IMPLS, default=IMPLS if cuda else IMPLS[:1], help="policy.cuda_graph.impl")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16" if cuda else "float32", help="policy.dtype"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048, 4096] if cuda else [512], help="tokens of a micro-batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256] if cuda else [32, 64, 128])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seconds", type=float, default=0.4, help="time for each measurement")
    parser.add_argument("--ray", action="store_true", help="also call the step through Ray: plain actor calls, and the compiled graph")
    options = parser.parse_args()
    peak = matrix_rate(cuda)
    print(f"matrix product: {peak:.1f} TFLOP/s")
    sizes = [
        (tokens, mode, length) for tokens in options.tokens for mode in options.modes for length in options.lengths if length <= tokens
    ]
    cases = [Case(mode, length, tokens) for tokens, mode, length in sizes]
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", options.shape, max(options.lengths), cuda)
        measure = over_ray if options.ray else in_process
        rows = [row for impl in options.impl for row in measure(model, Path(directory), impl, cases, options.seconds, options.dtype)]
    speedups = ratios(rows)
    best = max(row["train_tflops"] for row in rows)
    detail = {
        "shape": options.shape,
        "matrix_tflops": round(peak, 1),
        "best_share_of_matrix": round(best / peak, 4),
        "smallest_ratio_at_any_size": min(speedups.values(), default=None),
        "ratios": {f"{mode} {tokens}/{length}": ratio for (mode, tokens, length), ratio in speedups.items()},
        "rows": rows,
    }
    value = min((ratio for (_, tokens, _), ratio in speedups.items() if tokens <= SMALL), default=None)
    print(json.dumps({"name": "train_step", "value": value, "unit": "eager / graphs", "detail": detail}))


def ratios(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int], float]:
    """Eager over graphs, seconds of a train step, of each (mode, tokens, length) that ran both ways."""
    ran = [row for row in rows if row["impl"] == IMPLS[0] or row["replayed"]]  # a CPU replays nothing
    eager, graphs = ({(row["mode"], row["tokens"], row["length"]): row["train_ms"] for row in ran if row["impl"] == impl} for impl in IMPLS)
    return {size: round(eager[size] / graphs[size], 3) for size in eager if size in graphs}


@dataclass(frozen=True)
class Case:
    """One size in one layout: the longest sequence, and the tokens of each of the four micro-batches."""

    mode: str
    length: int
    tokens: int

    def lengths(self) -> list[int]:
        """Of every sequence."""
        total = MICRO_BATCHES * self.tokens
        return [self.length] * (total // self.length) if self.mode == "padded" else long_tailed(self.length, total)

    def batching(self) -> BatchingConfig:
        """With buckets, as graphs need them; eager passes get the same shapes."""
        if self.mode == "padded":
            return BatchingConfig(micro_batch_size=self.tokens // self.length, token_buckets=(self.length,))
        return BatchingConfig(
            mode="packed",
            tokens_per_micro_batch=self.tokens,
            token_buckets=tuple(sorted({self.length, self.tokens})),
            sequence_buckets=tuple(2**power for power in range(2, 12)),
        )


class Bench:
    """One worker with batches in its own memory; `execute` and `ping` are what an executor wants of an actor."""

    def __init__(self, model: str, rendezvous: str, impl: str, batching: BatchingConfig, dtype: str) -> None:
        config = PolicyConfig(batching=batching, cuda_graph={"impl": impl}, dtype=dtype, recompute_logprobs="always")
        self._model, self._impl, self._cuda, self._plane = model, impl, torch.cuda.is_available(), MemoryPlane()
        self._worker = PolicyWorker(config, model, 0, self._plane, seed=0, temperature=1.0)
        self._worker.setup(rendezvous)
        self._cases = 0

    def measure(self, case: Case, seconds: float) -> dict[str, Any]:
        """The row of a case, without Ray; calls through `execute` are of this case from now on."""
        self._cases += 1
        plan = batch(self._plane, case, f"case-{self._cases}")
        self._shard = shard = plan.shards[0]
        if self._cuda:
            self._worker.drop_graphs()  # the case before
            gc.collect()
            torch.cuda.empty_cache()
        train = median_seconds(self._train, seconds)
        metrics = self._train()
        logprob = median_seconds(functools.partial(self._worker.logprob, shard, "warm_up_logprobs"), seconds)
        flops, real = training_flops(self._model, case.lengths()), sum(case.lengths())
        return {
            "impl": self._impl, "mode": case.mode, "tokens": case.tokens, "length": case.length, "train_ms": round(train * 1e3, 1),
            "train_tokens_per_s": round(real / train), "train_tflops": round(flops / train / 1e12, 3),
            "logprob_ms": round(logprob * 1e3, 1), "logprob_tflops": round(flops / 3 / logprob / 1e12, 3),
            "padding": round(1 - plan.token_efficiency, 3), "peak_gib": round(metrics.get("gpu_memory/train_reserved_gib", 0.0), 1),
            "replayed": metrics.get("cuda_graph/replays", 0.0) / len(shard.micro_batches),
        }  # fmt: skip

    def execute(self, packed: bytes) -> bytes:
        """One train step."""
        return Request.answer(packed, lambda _: self._train())

    def ping(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Leave the process group."""
        self._worker.close()

    def _train(self) -> dict[str, float]:
        return self._worker.train(self._shard, "grpo")


def in_process(model: Path, directory: Path, impl: str, cases: list[Case], seconds: float, dtype: str) -> list[dict[str, Any]]:
    """All cases with one worker of this process."""
    bench = Bench(str(model), f"file://{directory}/rendezvous-{impl}", impl, cases[0].batching(), dtype)
    rows = [shown(bench.measure(case, seconds)) for case in cases]
    bench.close()
    return rows


def over_ray(model: Path, directory: Path, impl: str, cases: list[Case], seconds: float, dtype: str) -> list[dict[str, Any]]:
    """All cases with one worker that is an actor: by itself, and called from here in both ways."""
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    remote: Any = ray.remote
    actor = remote(num_cpus=1, num_gpus=int(torch.cuda.is_available()))(Bench).remote(
        str(model), f"file://{directory}/rendezvous-{impl}", impl, cases[0].batching(), dtype
    )
    replicas, request = [{"worker": actor}], [Request("train_step")]
    rows = []
    for case in cases:
        row = ray.get(actor.measure.remote(case, seconds), timeout=300)
        for name, executor in (
            ("plain_ms", PlainExecutor(replicas, 300.0)),
            ("compiled_ms", CompiledExecutor(replicas, 300.0)),
        ):
            row[name] = round(median_seconds(functools.partial(executor.run, request), seconds) * 1e3, 1)
            executor.close()
        rows.append(shown(row))
    ray.get(actor.close.remote(), timeout=60)
    ray.kill(actor)
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed."""
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def batch(plane: MemoryPlane, case: Case, partition: str) -> BatchPlan:
    """Random tokens of the case's lengths in a partition of the plane, the first eighth of each sequence a prompt."""
    lengths = case.lengths()
    plane.register_partition(partition, fields=FIELDS)
    meta = KVBatchMeta(
        partition_id=partition,
        keys=tuple(f"k{row}" for row in range(len(lengths))),
        sequence_lengths=tuple(lengths),
        tags=tuple({"response_length": length - length // 8} for length in lengths),
    )
    columns: dict[str, list[torch.Tensor]] = {
        "input_ids": [torch.randint(0, 512, (length,)) for length in lengths],
        "token_mask": [torch.arange(length) >= length // 8 for length in lengths],
        "sample_mask": [torch.tensor(1.0)] * len(lengths),
        "advantages": [torch.randn(()) for _ in lengths],
    }
    columns |= {name: [torch.full((length,), -6.0) for length in lengths] for name in LOGPROBS}
    return plan_batch(plane.put(meta, columns), case.batching(), data_parallel=1)


def long_tailed(longest: int, tokens: int) -> list[int]:
    """Lognormal lengths, clipped to 8..longest, of 0.93 to 0.97 `tokens` in all: what four rows of a quarter of `tokens` each can hold."""
    draw, lengths = random.Random(0), [longest]
    while sum(lengths) < 0.93 * tokens:
        length = int(min(max(draw.lognormvariate(0, 0.8) * longest / 5, 8), longest))
        lengths.append(min(length, max(int(0.97 * tokens) - sum(lengths), 8)))
    return lengths


def median_seconds(call: Callable[[], object], seconds: float) -> float:
    """Median time of a call, after two to warm up (the first warms up and captures CUDA graphs: four micro-batches of one shape).

    Every call ends with host values of its results, so it has finished on the device.
    """
    for _ in range(2):
        call()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def matrix_rate(cuda: bool) -> float:
    """TFLOP/s of a large matrix product."""
    size, device, dtype = (8192, "cuda", torch.bfloat16) if cuda else (1024, "cpu", torch.float32)
    a, b = torch.randn(size, size, device=device, dtype=dtype), torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / median_seconds(lambda: (a @ b)[0, 0].item(), 0.5) / 1e12


def write_model(directory: Path, shape: str, longest: int, cuda: bool) -> Path:
    """Random weights of a shape in Hugging Face format."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    values = dict(SHAPES[shape])
    kind = values.pop("kind")
    make, cls = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = cls(make(**values, max_position_embeddings=max(longest, 64)))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
