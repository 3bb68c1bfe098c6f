"""A whole GRPO step on one GPU: seconds by stage, tokens/s and peak memory. SmolLM2-135M's shape with random weights, KL term, one update.

Real parts (collector, vLLM, data plane, Megatron, IPC refit), colocated, driven without Prefect, which adds about 9 ms a stage (docs/).
No token ends a response, so each has its full length. Prompts are the arithmetic recipe's. Advantages are random: rewards of random
weights are all alike, and a gradient of zeros would be a special case.

  rollout    prompts out, responses in, scored and stored; `generate` is the part until the last token.
  tokens/s   of responses, over the step.
  peak       memory of the GPU in use, all processes together, from nvidia-smi.

`value` is the response tokens/s of the first size. `python -m benchmarks.peers step` runs this beside TRL.

    .venv/bin/python -m benchmarks.grpo_step [--sizes 32x16x256 16x16x1024] [--engines 3] [--steps 5] [field=value ...]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from actors import names
from actors.data_plane.connect import connect
from actors.data_plane.interface import DataPlane
from actors.generation.types import UpdateOptions
from benchmarks import gpu_run
from configs.loader import load
from configs.run import RunConfig

SIZES = ("32x16x256", "16x16x1024")
WARM_UP = 3
MICRO_BATCH, PROMPT = 16384, 16  # tokens: about, and at most
ENGINES = 3  # so small a model is bound by vLLM's host: several engines on the GPU have several hosts
OVERRIDES = [
    "name=grpo-step", "rollout.temperature=1.0", "policy.updates_per_step=1", "policy.optimizer={lr: 1.0e-6}", "policy.loss.kl_coef=0.04",
    "warm_start.steps=0", "warm_start.stop_at_accuracy=null",
    "policy.dtype=bfloat16", "policy.timeout_s=300", "generation.dtype=bfloat16", "generation.executor=async",
    "generation.enforce_eager=false", "generation.kv_cache_gib=4", "generation.timeout_s=400", "environment.validation_size=8",
    "policy.cuda_graph.impl=full_iteration", "placement=colocated",
]  # fmt: skip
STAGES = ("rollout", "generate", "ref_logprob", "advantage", "train", "refit", "clear")


def configure(size: str, overrides: list[str], engines: int = ENGINES) -> RunConfig:
    """The run of one size: "prompts x responses x tokens"."""
    prompts, responses, length = map(int, size.split("x"))
    longest = length + 64
    tokens = (length + PROMPT) * 2 ** round(math.log2(MICRO_BATCH / (length + PROMPT)))  # else a micro-batch's last places stay empty
    batching = f"{{mode: packed, tokens_per_micro_batch: {tokens}, token_buckets: [{longest}, {tokens}], sequence_buckets: [16, 32, 64]}}"
    running = 64 * math.ceil(prompts * responses / engines / 64)
    sized = [
        f"generation.num_engines={engines}", f"generation.max_num_seqs={running}",
        f"rollout.prompts_per_step={prompts}", f"rollout.responses_per_prompt={responses}", f"rollout.max_new_tokens={length}",
        f"generation.max_model_len={longest}", f"policy.batching={batching}",
    ]  # fmt: skip
    return load("arithmetic-cpu", [*OVERRIDES, *sized, *overrides])


def step(config: RunConfig, plane: DataPlane, engines: list[str], number: int) -> dict[str, float]:
    """One step. Seconds by stage, and response tokens."""
    times: dict[str, float] = {}

    def timed(stage: str, actor: str, method: str, *arguments: Any) -> Any:
        started = time.monotonic()
        result = gpu_run.ask(actor, method, *arguments)
        times[stage] = time.monotonic() - started
        return result

    began = time.monotonic()
    claim, report = gpu_run.rollout(number, config.rollout.prompts_per_step)
    times["rollout"], times["generate"] = time.monotonic() - began, report["time/generate"]
    meta = claim.meta
    timed("ref_logprob", names.POLICY, "logprob", meta, "reference_logprobs", True)
    meta = meta.with_fields("reference_logprobs")
    started = time.monotonic()
    meta = plane.put(meta, {"advantages": [torch.randn(()) for _ in range(len(meta))]})
    times["advantage"] = time.monotonic() - started
    trained = timed("train", names.POLICY, "train", meta, "grpo")
    timed("refit", names.POLICY, "refit", engines, UpdateOptions())
    timed("clear", names.LEDGER, "trained", claim.uids)
    return {
        **times,
        "step": time.monotonic() - began,
        "response_tokens": report["generated_tokens"],
        "sequence_tokens": float(sum(meta.sequence_lengths)),
        "logprob_error": trained["logprob_error/mean"],
        "padding": trained["padding_waste"],
    }


def measure(config: RunConfig, shape: str, steps: int, memory: gpu_run.Memory) -> dict[str, Any]:
    """Medians over the steps after `WARM_UP` others, and the seconds of each."""
    with tempfile.TemporaryDirectory() as directory:
        model = gpu_run.write_model(Path(directory), shape, 2048)
        with gpu_run.running(config, model) as actors:
            gpu_run.never_end(actors.engines)
            gpu_run.ask(names.POLICY, "snapshot_reference")
            gpu_run.ask(names.COLLECTOR, "begin_generating")
            plane = connect(actors.address, timeout_s=120)
            rows = []
            for number in range(WARM_UP + steps):
                if number == WARM_UP:
                    memory.peak_gib()
                rows.append(step(config, plane, actors.engines, number))
                print("  ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()), flush=True)
            peak = memory.peak_gib()
    row = gpu_run.medians(rows[WARM_UP:])
    return row | {
        "steps_s": [round(one["step"], 3) for one in rows[WARM_UP:]],
        "peak_gib": peak,
        "tokens_per_s": round(row["response_tokens"] / row["step"]),
    }


def main() -> None:
    """Measure every size and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="prompts x responses x tokens")
    parser.add_argument("--shape", choices=gpu_run.SHAPES, default="smollm2-135m")
    parser.add_argument("--engines", type=int, default=ENGINES)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_args()
    configs = {
        size: configure(size, options.overrides, options.engines) for size in options.sizes
    }  # all of them, before minutes go into the first
    memory = gpu_run.Memory()
    found = {}
    for size, config in configs.items():
        found[size] = measure(config, options.shape, options.steps, memory)
        print(size, json.dumps(found[size]), flush=True)
    memory.close()
    value = found[options.sizes[0]]["tokens_per_s"]
    print(json.dumps({"name": "grpo_step", "value": value, "unit": f"response tokens/s, {options.sizes[0]}", "detail": found}))


if __name__ == "__main__":
    main()
