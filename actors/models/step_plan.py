"""About how long a step will take, from shapes and settings alone: for `--check`, before anything has run.

    generating    decode steps x the longest of: the engine's host, reading weights and KV cache, computing
    passes        forward (log-probabilities) and backward (training), at the share of the peak that such passes reach
    synchronous: one after the other       asynchronous: the longer of both

Every response counts as long as it may be. Constants were fitted to docs/gpu.md ("Benchmarks of whole runs"); within a factor of two.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from actors.models.flops import training_flops
from actors.models.memory_parts import ModelShape
from actors.node import query_gpus
from configs.run import RunConfig
from configs.sft import SftConfig

# Peak of dense bfloat16 matrix products, and of memory: FLOP/s, bytes/s (the makers' data sheets).
_GPUS = {
    "B200": (2250e12, 8.0e12),
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.0e12),
    "L40S": (362e12, 0.86e12),
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MEASURED_SIZE, _MEASURED_S = 512, 0.3  # of the product that says what a CPU can do, and for how long it is tried


@dataclass(frozen=True)
class Device:
    """What computes.

    Attributes:
        flops: FLOP/s that a pass reaches. bandwidth: bytes/s of memory.
        decode_s, request_s: what the engine's host takes for a decode step at least, and for each request in it.
        step_s: of the control plane, for each step. refit: bytes/s of weights on their way.
    """

    name: str
    flops: float
    bandwidth: float
    decode_s: float
    request_s: float
    step_s: float
    refit: float


@dataclass(frozen=True)
class StepPlan:
    """Seconds of a step, by what takes them."""

    generating: float
    passes: float
    refit: float
    other: float
    together: bool  # generation beside training

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        training = self.passes + self.refit
        return self.other + (max(self.generating, training) if self.together else self.generating + training)

    def line(self) -> str:
        """The parts, for a person."""
        parts = {"generating": self.generating, "passes": self.passes, "refit": self.refit, "other": self.other}
        shown = ", ".join(f"{name} {rough(seconds)}" for name, seconds in parts.items() if seconds)
        return f"{shown}{' (generating beside the rest)' if self.together else ''}"


def rough(number: float) -> str:
    """Two digits, or a whole number."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def gpu_device(name: str) -> Device | None:
    """A GPU by the name that nvidia-smi gives it; None: one that nobody has looked up."""
    found = next((peak for part, peak in _GPUS.items() if part in name), None)
    return Device(name, 0.25 * found[0], found[1], 5e-3, 31e-6, 0.1, 10e9) if found else None


def gpu_name() -> str | None:
    """Of the first GPU of this machine; None where there is none. Without a CUDA context of this process."""
    return next((name for (name,) in query_gpus("name")), None)


def cpu_device() -> Device:
    """This machine's CPU: the best that it does now, which is less while other programs run."""
    matrix = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE)
    matrix @ matrix  # threads start
    best, until = math.inf, time.perf_counter() + _MEASURED_S
    while (began := time.perf_counter()) < until:
        matrix @ matrix
        best = min(best, time.perf_counter() - began)
    return Device(f"{torch.get_num_threads()} CPU threads", 0.4 * 2 * _MEASURED_SIZE**3 / best, 10e9, 5e-3, 100e-6, 0.3, 1e9)


def plan_grpo(config: RunConfig, model_path: str, shape: ModelShape, prompt_tokens: float, device: Device) -> StepPlan:
    """Args: prompt_tokens: of a prompt, on average."""
    generation, rollout, policy = config.generation, config.rollout, config.policy
    length = min(shape.context, math.ceil(prompt_tokens) + rollout.max_new_tokens)
    forward = training_flops(model_path, [length] * config.samples_per_step) / 3
    passes = 3 + (policy.why_no_logprob() is None) + (policy.why_no_ref_logprob() is None)
    requests = math.ceil(config.samples_per_step / generation.num_engines)
    at_once = min(requests, generation.max_num_seqs)
    per_token = training_flops(model_path, [1]) / 3
    width = _BYTES[generation.dtype]
    cached = 2 * shape.layers * shape.key_value * width * length
    decode = max(
        device.decode_s,
        device.request_s * at_once,
        (per_token / 2 * width + cached * at_once) / (device.bandwidth * generation.tensor_parallel_size),
        per_token * at_once / (device.flops * generation.tensor_parallel_size),
    )
    return StepPlan(
        generating=math.ceil(requests / at_once) * rollout.max_new_tokens * decode,
        passes=passes * forward / (device.flops * policy.parallel.world_size),
        refit=per_token / 2 * width / device.refit,
        other=device.step_s,
        together=config.mode == "async",
    )


def plan_sft(config: SftConfig, model_path: str, longest: int, device: Device) -> StepPlan:
    """Args: longest: tokens of the longest sample."""
    work = training_flops(model_path, [longest] * config.batch_size)
    passes = work / (device.flops * config.policy.parallel.world_size)
    return StepPlan(generating=0.0, passes=passes, refit=0.0, other=device.step_s, together=False)
