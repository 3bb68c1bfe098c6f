"""The device of the policy, chosen once per process; and a shim that lets Megatron-Core, which asks for CUDA by name, run on a CPU.

worker method ── with runtime(device) ──► Megatron ── zeros(device="cuda"), tensor.type(), current_stream() ──► shim ──► CPU
                                      (on CUDA the shim is not there)
"""

from __future__ import annotations

import datetime
import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from actors import node, rendezvous
from actors.policy.cuda_graphs import SEED_OPTIONS
from actors.rendezvous import Place
from configs.policy import ParallelConfig


class PeerLostError(RuntimeError):
    """A collective failed: another worker died or did not take part in time. The message names the call and the worker it failed on."""


def choose(device: Literal["auto", "cpu", "cuda"], rank: int = 0) -> torch.device:
    """The device of worker `rank`; for "auto", CUDA when there is one. Workers that see the same GPUs take them in turn.

    Raises:
        RuntimeError: "cuda" where there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("policy.device is 'cuda', but torch sees no CUDA device here: use 'auto' or 'cpu'")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def hardware(device: torch.device) -> str:
    """What computes, as far as it decides the last bits of a result."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s)"


def runtime(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which Megatron runs. Entered per call: a torch function mode belongs to one thread, and calls come on several."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return nullcontext()
    return _cpu_shim()


def release_memory() -> None:
    """Give cached memory back to the current GPU; what tensors and CUDA graphs hold stays. Nothing without one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """To be called at the start of a stage, before `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device, stage: str) -> dict[str, float]:
    """The use of the GPU in GiB, of this worker at most since `reset_peak_memory`; nothing on a CPU.

    Returns:
        gpu_memory/<stage>_tensors_gib: tensors outside CUDA graphs; gpu_memory/<stage>_reserved_gib: all that torch holds, with graphs'
        pools and cached memory; gpu_memory/<stage>_device_gib: what all processes hold of the GPU at the end of the stage.
    """
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    sizes = {"tensors": torch.cuda.max_memory_allocated(device), "reserved": reserved, "device": total - free}
    return {f"gpu_memory/{stage}_{name}_gib": size / 2**30 for name, size in sizes.items()}


def is_collective_failure(error: RuntimeError) -> bool:
    """Whether NCCL or gloo raised it. Gloo's errors have no type of their own, only their source file in the message."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


class _CudaMeansCpu(TorchFunctionMode):
    """Creates on the CPU what Megatron asks to be created on "cuda" or on device number n."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        is_number = isinstance(device, int) and not isinstance(device, bool)
        if is_number or (device is not None and str(device).startswith("cuda")):
            kwargs["device"] = torch.device("cpu")
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)  # Megatron's optimizer asserts on these names
        return result


class _NoStream:
    """A CUDA stream where there is none: everything is in order already."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _as_it_is


@functools.cache
def _cpu_shim() -> TorchFunctionMode:
    """Map CUDA calls of Megatron-Core to the CPU, for this process. Never call it where CUDA is used.

    Megatron is imported here without torch.compile, with which it decorates its fusions for GPUs: that would import torch's compiler,
    a quarter of the CPU time of starting a worker.
    """
    torch.cuda.is_available = lambda: False  # where there are GPUs, too: torch's checkpoints would copy on a stream of CUDA's
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: _NoStream()  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    # Transformer Engine is kernels for GPUs: where it is not to be found, Megatron takes others.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    with patch.object(torch, "compile", _as_it_is):
        import megatron.core.optimizer  # noqa: F401
    return _CudaMeansCpu()


def init_distributed(
    device: torch.device, parallel: ParallelConfig, rank: int, place: Place, seed: int, timeout_s: float, *, graphs: bool = False
) -> None:
    """Join the workers' process group (NCCL or gloo) and lay Megatron's parallel groups over it. Call inside `runtime(device)`.

    Args:
        place: where all ranks meet, as of `rendezvous.store`.
        graphs: the model's passes will be captured as CUDA graphs.

    Raises:
        PeerLostError: the other workers did not come within `timeout_s`.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    node.bind_collectives()
    try:
        torch.distributed.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=rendezvous.store(place, parallel.world_size, timeout_s),
            rank=rank,
            world_size=parallel.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise PeerLostError(
            f"policy worker {rank} of {parallel.world_size} did not meet the others at {place} within {timeout_s:g} s "
            f"({str(error).splitlines()[0]})"
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,  # a float is fine: it goes into a timedelta
    )
    torch.manual_seed(seed)
    # Dropout is 0 in RL: the "inference" tracker's fork() does nothing, so no CUDA generator is needed on a CPU.
    options = SEED_OPTIONS if graphs else {"inference_rng_tracker": device.type == "cpu"}
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True, **options)


def leave_distributed() -> None:
    """Undo `init_distributed`. Idempotent."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
