"""Which GPUs a run's engines and policy workers get, and how weights travel between them. Pure: the number of GPUs is an argument.

    placement    an engine            a policy worker    refit
    cpu          none                 none               host
    colocated    60 % of a GPU        40 % of a GPU      ipc     one of each on every GPU; on a single GPU engines may share the 60 %
    separate     tensor_parallel_size 1                  nccl

The fractions are shares of Ray's books alone, not of the memory: no two engines of 60 % and no two workers fit on one GPU, so Ray puts one
of each on every GPU. Memory is bounded by generation.kv_cache_gib. A small model's engine is bound by its host, and several on one GPU
keep it busier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.refit.transport import RefitPlan, TransportName
from configs.base import ConfigError
from configs.run import RunConfig

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
    together = ranks == 1 and (engines == workers or workers == 1)
    kind = config.placement
    if kind == "auto":
        on_cpu = gpus == 0 or config.policy.device == "cpu"
        kind = "cpu" if on_cpu else "separate" if gpus >= config.gpus_apart or not together else "colocated"
    if kind == "colocated" and not together:
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
    return Placement(
        kind, needed, engine, worker, RefitPlan(transport, config.generation.refit_buffer_mib * 2**20, ranks, config.generation.timeout_s)
    )
