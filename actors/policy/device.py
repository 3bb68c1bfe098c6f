"""Where the policy computes, chosen once per process; and a shim that lets Megatron-Core, which asks for CUDA by name, run on a CPU."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from configs.policy import ParallelConfig

_shim: TorchFunctionMode | None = None


def choose(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The process's device; for "auto", CUDA when there is one.

    Raises:
        RuntimeError: "cuda" where there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("policy.device is 'cuda', but torch sees no CUDA device here: use 'auto' or 'cpu'")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class _CudaMeansCpu(TorchFunctionMode):
    """Creates on the CPU what Megatron asks to be created on "cuda" or on device number n."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        is_number = isinstance(device, int) and not isinstance(device, bool)
        if is_number or (device is not None and str(device).startswith("cuda")):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class _NoStream:
    """Stands in for the current CUDA stream where there is none: everything is already in order."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def _clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Megatron's gradient clipping, less its assertion that gradients are CUDA tensors."""
    scale = max_norm / (float(total_norm) + 1e-6)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if scale < 1.0 and gradients:
        torch._foreach_mul_(gradients, scale)


def install_cpu_shim() -> None:
    """Map CUDA calls of Megatron-Core to the CPU, for this process. Idempotent; never call it where CUDA is used."""
    global _shim
    if _shim is not None:
        return
    _shim = _CudaMeansCpu()
    _shim.__enter__()  # for the life of the process: Megatron allocates in constructors and in backward hooks alike
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: _NoStream()  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    from megatron.core.optimizer import optimizer as megatron_optimizer
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_optimizer.clip_grad_by_total_norm_fp32 = _clip_gradients

    # Dropout is 0 in RL, so nothing random runs inside the fork.
    megatron_random.CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()  # type: ignore[method-assign]


def init_distributed(
    device: torch.device, parallel: ParallelConfig, rank: int, init_method: str, seed: int, timeout_s: float
) -> None:
    """Join the workers' process group (NCCL or gloo) and lay Megatron's parallel groups over it.

    Raises:
        torch.distributed.DistStoreError: the other workers did not come within `timeout_s`.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if device.type == "cpu":
        install_cpu_shim()
    torch.distributed.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=parallel.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(seed)
