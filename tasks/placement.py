"""Which GPUs a run's engines and policy workers get, and how weights travel between them. Pure: the number of GPUs is an argument.

    placement    an engine            a policy worker    refit
    cpu          none                 none               host
    colocated    60 % of a GPU        40 % of a GPU      ipc     one of each on every GPU; on a single GPU engines may share the 60 %
    separate     tensor_parallel_size 1                  nccl

    sft, replay                       1                          where the policy is not on the CPU
    evaluate     tensor_parallel_size                            else several engines share a GPU, as far as its memory goes

The fractions are shares of Ray's books alone, not of the memory: no two engines of 60 % and no two workers fit on one GPU, so Ray puts one
of each on every GPU. Memory is bounded by generation.kv_cache_gib. A small model's engine is bound by its host, and several on one GPU
keep it busier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from actors.refit.transport import RefitPlan, TransportName
from configs.base import ConfigError
from configs.evaluate import EvaluateConfig
from configs.run import BaseRunConfig, RunConfig

_ENGINE_SHARE, _WORKER_SHARE = 0.6, 0.4
_TRANSPORTS: dict[str, tuple[TransportName, ...]] = {"cpu": ("host",), "colocated": ("ipc", "host"), "separate": ("nccl", "host")}


@dataclass(frozen=True)
class Placement:
    """Attributes:
    gpus: of the whole run.
    engine, worker: what one actor asks Ray for.
    """

    kind: Literal["cpu", "colocated", "separate"]
    gpus: int
    engine: float
    worker: float
    refit: RefitPlan

    def describe(self) -> str:
        """One line."""
        where = {
            "cpu": "no GPU of its own for any actor",
            "colocated": f"{self.gpus} GPU(s), each with {'an engine' if self.engine == _ENGINE_SHARE else 'engines'} and a policy worker",
            "separate": f"{self.gpus} GPUs: {self.engine:g} an engine, {self.worker:g} a policy worker",
        }[self.kind]
        return f"{where}; refit by {self.refit.transport}"


def place(config: RunConfig, gpus: int) -> Placement:
    """The placement that the configuration asks for, or that these GPUs allow.

    Args:
        gpus: of the machine or cluster.

    Raises:
        ConfigError: they do not allow it, or the refit's transport does not fit it.
    """
    engines, ranks, workers = config.generation.num_engines, config.generation.tensor_parallel_size, config.policy.parallel.world_size
    kind = config.placement_on(gpus)
    if kind == "colocated" and not config.may_share_gpus:
        raise ConfigError(
            "placement colocated puts one engine and one policy worker on each GPU, or several engines and one worker on a single GPU, but "
            f"there are {engines} engine(s) of {ranks} GPU(s) (generation.num_engines, generation.tensor_parallel_size) and {workers} "
            "worker(s) (policy.parallel): make their numbers equal"
        )
    needed = {"cpu": 0, "colocated": workers, "separate": config.gpus_apart}[kind]
    if needed > gpus:
        raise ConfigError(
            f"placement {kind}: {engines} engine(s) of {ranks} GPU(s) and {workers} policy worker(s) need {needed} GPU(s), there are {gpus}"
        )
    if kind != "cpu" and config.policy.device == "cpu":
        raise ConfigError(
            f"placement {kind} gives GPUs to policy workers, but policy.device is cpu: set placement=cpu or policy.device=auto"
        )
    if config.generation.sleep_level and (kind != "colocated" or config.mode == "async"):
        raise ConfigError(
            "generation.sleep_level frees an engine's memory while the policy trains on the same GPU: it needs placement colocated and "
            "mode sync; set it to 0"
        )
    allowed = _TRANSPORTS[kind]
    transport = allowed[0] if config.generation.refit == "auto" else config.generation.refit
    if transport not in allowed:
        raise ConfigError(f"generation.refit: {transport} does not work with placement {kind}: use {' or '.join(allowed)}")
    if kind == "colocated":
        engine, worker = _ENGINE_SHARE / (engines // workers), _WORKER_SHARE
    else:
        engine, worker = (float(ranks), 1.0) if kind == "separate" else (0.0, 0.0)
    refit = RefitPlan(
        transport, config.generation.refit_buffer_mib * 2**20, ranks, config.generation.timeout_s, config.generation.sleep_level > 0
    )
    return Placement(kind, needed, engine, worker, refit)


@dataclass(frozen=True)
class PolicyPlacement:
    """Of a policy without engines. Attributes:
    gpus: of the whole run. worker: what one asks Ray for.
    """

    gpus: int
    worker: float

    def describe(self) -> str:
        """One line."""
        return f"{self.gpus} GPU(s): {self.worker:g} a policy worker" if self.gpus else "no GPU of its own for any actor"


def place_policy(config: BaseRunConfig, gpus: int) -> PolicyPlacement:
    """A GPU for each policy worker, where the policy is not to be on the CPU.

    Args:
        gpus: of the machine or cluster.

    Raises:
        ConfigError: there are too few.
    """
    device, workers = config.policy.device, config.policy.parallel.world_size
    if device == "cpu" or (device == "auto" and gpus == 0) or (isinstance(config, RunConfig) and config.placement == "cpu"):
        return PolicyPlacement(0, 0.0)
    if workers > gpus:
        raise ConfigError(
            f"policy.parallel: {workers} policy worker(s) need a GPU each, there are {gpus}: make the layout smaller, or set "
            "policy.device=cpu"
        )
    return PolicyPlacement(workers, 1.0)


@dataclass(frozen=True)
class EnginePlacement:
    """Of engines without a policy. Attributes:
    gpus: of the whole run. engine: what one asks Ray for.
    engines: of each model; fewer than generation.num_engines where the GPUs hold no more.
    """

    gpus: int
    engine: float
    engines: int

    def describe(self) -> str:
        """One line."""
        if not self.gpus:
            return "no GPU of its own for any actor"
        return f"{self.gpus} GPU(s): {self.engine:g} an engine; {self.engines} engine(s) of each model"


def place_engines(config: EvaluateConfig, gpus: int, engine_bytes: float = 0.0, gpu_bytes: float | None = None) -> EnginePlacement:
    """GPUs of its own for each engine; where there are too few, engines of one GPU share them; where even so not all fit, fewer engines.

    Args:
        gpus: of the machine or cluster. gpu_bytes: of the smallest of them; None: as large as needed.
        engine_bytes: what an engine holds on each of its GPUs.

    Raises:
        ConfigError: there is no room for an engine of each model.
    """
    models, wanted, ranks = len(config.models), config.generation.num_engines, config.generation.tensor_parallel_size
    if gpus == 0:
        return EnginePlacement(0, 0.0, wanted)
    fit = models * wanted if gpu_bytes is None else int(gpu_bytes // max(engine_bytes, 1.0))  # on one GPU
    slots = gpus // ranks if ranks > 1 else gpus * fit
    engines = min(wanted, slots // models)
    if fit == 0 or engines == 0:
        size = f" of {gpu_bytes / 2**30:.1f} GiB" if gpu_bytes is not None else ""
        needs = f" and {engine_bytes / 2**30:.1f} GiB (weights and generation.kv_cache_gib) on each" if engine_bytes else ""
        raise ConfigError(
            f"generation: an engine needs {ranks} GPU(s){needs}, and one for each of {models} model(s) does not fit {gpus} GPU(s){size}: "
            "lower generation.kv_cache_gib, set generation.tensor_parallel_size to what fits, or evaluate one model at a time"
        )
    if models * engines * ranks <= gpus:
        return EnginePlacement(models * engines * ranks, float(ranks), engines)
    sharing = math.ceil(models * engines / gpus)  # engines of the fullest GPU
    share = math.floor(1e4 / sharing) / 1e4  # Ray counts in ten-thousandths
    return EnginePlacement(math.ceil(models * engines / sharing), share, engines)
