"""Random states of a policy worker, as tensors: of torch's generators, and of Megatron's tracker."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker


def place(device: torch.device) -> str:
    """What random states belong to: a device and a layout."""
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    return "{}, tensor {} pipeline {} context {} data {}".format(device.type, *sizes)


def present(device: torch.device) -> dict[str, torch.Tensor]:
    """Of torch's generators and of Megatron's tracker: uint8, on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
        states |= {f"tracker.{name}": convert_cuda_rng_state(state).cpu() for name, state in get_cuda_rng_tracker().get_states().items()}
    return states


def restore(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    """The inverse of `present`."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
        tracked = get_cuda_rng_tracker().get_states()
        for name, state in tracked.items():
            stored = states[f"tracker.{name}"]
            if isinstance(state, torch.Generator):
                state.set_state(stored)  # in place: a CUDA graph knows the generator
            else:
                tracked[name] = stored
        get_cuda_rng_tracker().set_states(tracked)


def entries(states: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The states as Megatron's sharded tensors, of this rank alone."""
    rank = torch.distributed.get_rank()
    return {name: ShardedTensor.from_rank_offsets(f"random.{name}.rank{rank}", state) for name, state in states.items()}
