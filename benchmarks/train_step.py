"""A policy worker's train and log-probability passes by themselves: one worker, its batch in its own memory, no Ray.

For each number of tokens in a micro-batch and each length: four micro-batches, padded (all rows of that length) and packed (lengths
drawn from a long-tailed distribution, the longest of them this length), eager and by CUDA graphs. A train step is all of it: reading
the columns, forward, backward, optimizer. Tokens/s count real tokens; TFLOP/s are the model's (forward and backward, from the lengths
alone), set against a bf16 (or, on a CPU, fp32) matrix product measured in the same run. Memory is what the allocator reserved, and
`replayed` the part of a step's micro-batches that a graph replayed.
`value` is the best model TFLOP/s of a train step over the matrix product's.

    .venv/bin/python -m benchmarks.train_step [--shape tiny|0.5b|smollm2-135m] [--impl none full_iteration]
        [--tokens 2048 8192] [--lengths 256 1024 4096]
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

import torch

from actors.data_plane.memory import MemoryPlane
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import BatchPlan, plan_batch
from actors.policy.flops import training_flops
from actors.policy.worker import PolicyWorker
from configs.batching import BatchingConfig
from configs.policy import PolicyConfig

MICRO_BATCHES = 4
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
}  # fmt: skip
FIELDS = ("input_ids", "token_mask", "sample_mask", "generation_logprobs", "advantages", "policy_logprobs", "warm_up_logprobs")


def main() -> None:
    """Measure every implementation, size and layout, and print the result."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b" if cuda else "tiny")
    parser.add_argument("--impl", nargs="+", choices=IMPLS, default=IMPLS if cuda else IMPLS[:1], help="policy.cuda_graph.impl")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192] if cuda else [512], help="tokens of a micro-batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096] if cuda else [32, 64, 128])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    options = parser.parse_args()
    peak = matrix_rate(cuda)
    print(f"matrix product: {peak:.1f} TFLOP/s")
    sizes = [
        (tokens, mode, length) for tokens in options.tokens for mode in options.modes for length in options.lengths if length <= tokens
    ]
    cases = [Case(mode, length, tokens) for tokens, mode, length in sizes]
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", options.shape, max(options.lengths))
        rows = [row for impl in options.impl for row in measure(model, Path(directory), impl, cases, options.seconds, cuda)]
    best = max(row["train_tflops"] for row in rows)
    detail = {"shape": options.shape, "matrix_tflops": round(peak, 1), "rows": rows}
    print(json.dumps({"name": "train_step", "value": round(best / peak, 4), "unit": "model TFLOP/s / matrix TFLOP/s", "detail": detail}))


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


def measure(model: Path, directory: Path, impl: str, cases: list[Case], seconds: float, cuda: bool) -> list[dict[str, Any]]:
    """All cases with one worker."""
    config = PolicyConfig(
        batching=cases[0].batching(), cuda_graph={"impl": impl}, dtype="bfloat16" if cuda else "float32", recompute_logprobs="always"
    )
    plane = MemoryPlane()
    worker = PolicyWorker(config, str(model), 0, f"file://{directory}/rendezvous-{impl}", plane, seed=0, temperature=1.0)
    worker.setup()
    rows = []
    for number, case in enumerate(cases):
        plan = batch(plane, case, f"case-{number}")
        shard = plan.shards[0]
        if cuda:
            worker.drop_graphs()  # the case before
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        train = median_seconds(functools.partial(worker.train, shard, "grpo"), seconds)
        replays = worker.train(shard, "grpo").get("cuda_graph/replays", 0.0) / len(shard.micro_batches)
        logprob = median_seconds(functools.partial(worker.logprob, shard, "warm_up_logprobs"), seconds)
        gib = torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0
        flops, real = training_flops(str(model), case.lengths()), sum(case.lengths())
        rows.append({
            "impl": impl, "mode": case.mode, "tokens": case.tokens, "length": case.length, "train_ms": round(train * 1e3, 1),
            "train_tokens_per_s": round(real / train), "train_tflops": round(flops / train / 1e12, 3),
            "logprob_ms": round(logprob * 1e3, 1), "padding": round(1 - plan.token_efficiency, 3), "peak_gib": round(gib, 1),
            "replayed": replays,
        })  # fmt: skip
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    worker.close()
    return rows


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
    columns |= {name: [torch.full((length,), -6.0) for length in lengths] for name in ("generation_logprobs", "policy_logprobs")}
    return plan_batch(plane.put(meta, columns), case.batching(), data_parallel=1)


def long_tailed(longest: int, tokens: int) -> list[int]:
    """Lognormal lengths of about `tokens` in all, clipped to 8..longest."""
    draw, lengths = random.Random(0), [longest]
    while sum(lengths) < 0.97 * tokens - longest / 2:
        lengths.append(int(min(max(draw.lognormvariate(0, 0.8) * longest / 5, 8), longest)))
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


def write_model(directory: Path, shape: str, longest: int) -> Path:
    """Random weights of a shape in Hugging Face format."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    values = dict(SHAPES[shape])
    kind = values.pop("kind")
    make, cls = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
    torch.manual_seed(0)
    cls(make(**values, max_position_embeddings=max(longest, 64))).to(torch.bfloat16).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
