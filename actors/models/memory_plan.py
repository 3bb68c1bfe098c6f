"""What each GPU of a run holds over the phases of a step, from shapes and settings alone: printed by --dry-run, checked before the start.

              start     warm-up   rollout   logprob   train     save      refit
    worker    loads     passes    rests     passes    passes    rests     sends
    engines   load      *         awake     *         *         *         wake, and take the weights        on a GPU that they share

* asleep with generation.sleep_level, else awake. A sleeping engine keeps its context and its CUDA graphs. Before engines wake, the worker
gives back what its passes left in torch's cache. Checkpoints are copied to host memory: the GPU holds one gathered weight for them.

memory_parts.py has what one process holds; memory_advice.py looks for the setting with which a plan would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.models import memory_parts as parts
from actors.models.memory_parts import GIB, ModelShape, Parts
from actors.node import query_gpus
from configs.base import ConfigError
from configs.policy import PolicyConfig
from configs.rollout import GenerationConfig
from configs.run import BaseRunConfig, RunConfig

PhaseName = Literal["start", "warm-up", "rollout", "logprob", "train", "save", "refit"]
WARN_FROM = 0.9  # of a GPU's memory
# Stages whose worker measures what it holds.
_STAGES: dict[str, PhaseName] = {"logprob": "logprob", "ref_logprob": "logprob", "train": "train"}
_LISTED = 5  # parts of a phase that are printed


@dataclass(frozen=True)
class Phase:
    """What one GPU holds at most during a phase: bytes by part, each with the process that holds it."""

    name: PhaseName
    parts: Parts

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def torch_of_worker(self) -> float:
        """Bytes that torch's allocator holds in the policy worker."""
        names = {f"{whose}{part}" for whose in ("", "worker's ") for part in parts.OUTSIDE_TORCH}
        own = {name: size for name, size in self.parts.items() if not name.startswith("engine")}
        return sum(size for name, size in own.items() if name not in names)

    def line(self, listed: int | None = _LISTED) -> str:
        """The total, then the largest parts, in GiB."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        shown = [f"{name} {value / GIB:.2f}" for name, value in largest[:listed]]
        rest = sum(value for _, value in largest[len(shown) :])
        return f"{self.total / GIB:.1f} GiB: " + ", ".join([*shown, f"others {rest / GIB:.2f}"] if rest else shown)


@dataclass(frozen=True)
class GpuPlan:
    """One kind of GPU of the run; all of a kind hold the same.

    Attributes:
        holds: the processes: "policy worker", "engine", or both.
    """

    holds: str
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    def phase(self, name: PhaseName) -> Phase:
        """The phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)


def plan(config: BaseRunConfig, shape: ModelShape, gpus: int) -> tuple[GpuPlan, ...]:
    """Every kind of GPU of the run.

    Args:
        gpus: of the machine or cluster: with `placement: auto` they decide whether engines and workers share GPUs.
    """
    policy = config.policy
    if not isinstance(config, RunConfig):
        return (_gpu("policy worker", _worker(shape, policy, shape.context)),)
    generation = config.generation
    longest = min(shape.context, generation.max_model_len or shape.context)
    if config.placement_on(max(gpus, 1)) != "colocated":
        sent = parts.nccl_buffer(shape, policy, generation) if generation.refit != "host" else 0.0
        # vLLM's receiver fills one buffer while it loads from the one before.
        return (
            _gpu("policy worker", _worker(shape, policy, longest, sent=sent)),
            _gpu("engine", _engine(shape, generation, received=2 * sent, keeps=False)),
        )
    buffer = parts.ipc_buffer(shape, policy, generation) if generation.refit != "host" else 0.0
    worker = _worker(shape, policy, longest, buffer=buffer, gives_back=generation.sleep_level > 0)
    engine = _engine(shape, generation, received=buffer, keeps=True)
    engines = max(1, generation.num_engines // policy.parallel.world_size)
    return (_gpu("engine and policy worker" if engines == 1 else f"{engines} engines and policy worker", worker, engine, engines),)


def stages(plans: Sequence[GpuPlan]) -> dict[str, tuple[float, float]]:
    """By stage of the policy: GiB of a GPU with a worker, and of them what torch holds in the worker."""
    phases = {stage: plans[0].phase(name) for stage, name in _STAGES.items()} if plans else {}
    return {stage: (phase.total / GIB, phase.torch_of_worker / GIB) for stage, phase in phases.items()}


def _worker(
    shape: ModelShape, policy: PolicyConfig, longest: int, *, sent: float = 0.0, buffer: float = 0.0, gives_back: bool = False
) -> dict[PhaseName, Parts]:
    """A policy worker's parts by phase.

    Args:
        sent: bytes of a buffer that a refit takes and frees. buffer: bytes of one that stays from the first refit on.
        gives_back: the worker empties torch's cache before engines wake.
    """
    tokens, row = parts.micro_batch_tokens(policy, longest)
    stays = parts.worker_stays(shape, policy)
    warm_up = training = parts.training_pass(shape, policy, tokens, row)
    logprob: Parts = parts.logprob_pass(shape, policy, tokens)
    left = {"cached by passes": sum(training.values())}
    if policy.cuda_graph.impl != "none":
        stays |= {"CUDA graphs": sum(training.values())}  # one pool for all: the largest shape's
        beside = parts.tokens_beside_graphs(policy, longest)
        warm_up = logprob = {}
        training = parts.training_pass(shape, policy, beside, min(row, beside)) if beside else {}
        left = {"cached by passes": sum(training.values())}
    later = ("moments", "reference", "CUDA graphs", "context")
    loading = {name: size for name, size in stays.items() if name not in later} | {"context": parts.WORKER_CONTEXT_AT_START}
    loading["gradients on their way"] = shape.embedding / policy.parallel.tensor * 4  # one weight at a time becomes a master
    split = policy.parallel.data * policy.parallel.context > 1
    saved: Parts = {"gathered weight": shape.embedding / policy.parallel.tensor * 4 if split else 0.0}
    refit: Parts = {"sent": sent, "gathered weight": parts.gathered_weight(shape, policy)}
    kept = stays | {"refit buffer": buffer}
    left = {} if gives_back else left
    return {
        "start": loading,
        "warm-up": stays | warm_up,
        "rollout": kept | left,
        "logprob": kept | _larger(logprob, left),  # what torch has cached serves the next pass
        "train": kept | training,
        "save": kept | _larger(saved, left),
        "refit": kept | _larger(refit, left),
    }


def _engine(shape: ModelShape, generation: GenerationConfig, *, received: float, keeps: bool) -> dict[PhaseName, Parts]:
    """An engine's parts by phase, beside a worker on the same GPU.

    Args:
        received: bytes of the buffers into which weights come.
        keeps: torch's cache keeps them while the engine is awake.
    """
    always = parts.engine_always(shape, generation)
    new = parts.engine_awake(shape, generation) | always
    awake = new | {"received": received if keeps else 0.0}
    sleeps = generation.sleep_level > 0
    waking = {"weights": new["weights"]} | always  # its cache comes back when the weights are in
    idle = always if sleeps else awake
    return {
        "start": new,
        "warm-up": always if sleeps else new,
        "rollout": awake,
        "logprob": idle,
        "train": idle,
        "save": idle,
        "refit": (waking if sleeps else new) | {"received": received},
    }


def _gpu(holds: str, first: dict[PhaseName, Parts], engine: dict[PhaseName, Parts] | None = None, engines: int = 0) -> GpuPlan:
    """A GPU with one process, or with a worker and some engines."""
    phases = []
    for name, own in first.items():
        held = dict(own)
        if engine is not None:
            held = {f"worker's {part}": size for part, size in own.items()}
            whose = "engine's" if engines == 1 else "engines'"
            held |= {f"{whose} {part}": size * engines for part, size in engine[name].items()}
        phases.append(Phase(name, {part: size for part, size in held.items() if size}))
    return GpuPlan(holds, tuple(phases))


def _larger(one: Parts, other: Parts) -> Parts:
    return one if sum(one.values()) > sum(other.values()) else other


def render(plans: Sequence[GpuPlan], capacity: float | None = None) -> str:
    """A line for every phase of every kind of GPU, the largest marked. `capacity`: bytes of a GPU, where there is one."""
    lines = []
    for one in plans:
        share = f", {one.peak.total / capacity:.0%} of {capacity / GIB:.1f} GiB" if capacity else ""
        lines.append(f"  {one.holds}: at most {one.peak.total / GIB:.1f} GiB{share}")
        lines += [f"  {'*' if phase is one.peak else ' '} {phase.name:<9} {phase.line()}" for phase in one.phases]
    return "\n".join(lines)


def check(plans: Sequence[GpuPlan], capacity: float, advise: Callable[[], str]) -> list[str]:
    """Every plan fits a GPU of `capacity` bytes. Returns a line for each that needs more than `WARN_FROM` of it.

    Args:
        advise: which setting would make the plans fit; asked only where they do not.

    Raises:
        ConfigError: one does not; with its parts, and the advice.
    """
    warnings = []
    for one in plans:
        peak = one.peak
        if peak.total > capacity:
            raise ConfigError(
                f"a GPU with {one.holds} would need {peak.line(None)} ({peak.name}); it has {capacity / GIB:.1f} GiB: {advise()}"
            )
        if peak.total > WARN_FROM * capacity:
            warnings.append(
                f"a GPU with {one.holds} is planned to hold {peak.total / GIB:.1f} of its {capacity / GIB:.1f} GiB ({peak.name}), which is "
                f"{peak.total / capacity:.0%}: it may run out of memory"
            )
    return warnings


def gpu_capacity() -> float | None:
    """Bytes of the smallest GPU of this machine; None where there is none. Without a CUDA context of this process."""
    try:
        return min((float(total) * 2**20 for (total,) in query_gpus("memory.total")), default=None)
    except ValueError:  # a GPU that does not say
        return None
