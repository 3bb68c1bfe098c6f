"""CUDA graphs of the policy's training and log-probability passes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt, model_validator

from configs.base import StrictModel

# Names that Megatron-Core 0.19 has given up, or that are called otherwise here, and what to write instead.
_REFUSED = {
    "enable_cuda_graph": "Megatron-Core has given this name up: write policy.cuda_graph.impl=full_iteration",
    "external_cuda_graph": "Megatron-Core has given this name up: write policy.cuda_graph.impl=full_iteration",
    "cuda_graph_scope": "Megatron-Core has given this name up: write policy.cuda_graph.impl=full_iteration",
    "cuda_graph_impl": "write policy.cuda_graph.impl",
    "cuda_graph_warmup_steps": "write policy.cuda_graph.warmup_steps",
    "cuda_graph_modules": "it selects parts of a layer, and policy.cuda_graph.impl=full_iteration captures whole passes: leave it out",
    "modules": "they select parts of a layer, and impl=full_iteration captures whole passes: leave them out",
    "buckets": "shapes belong to the layout of a batch: write policy.batching.token_buckets and policy.batching.sequence_buckets",
}
_PER_LAYER = ("local", "transformer_engine")


class CudaGraphConfig(StrictModel):
    """Whether a pass is recorded once per shape and then replayed, which takes its thousands of launches off the host.

    full_iteration: a graph holds a micro-batch's forward and backward pass, and is replayed for every micro-batch of its shape.
    Shapes come from the buckets of `policy.batching`. On a CPU everything is eager, and counted so.
    """

    impl: Literal["none", "full_iteration"] = "none"  # MCore: cuda_graph_impl
    warmup_steps: PositiveInt = 3  # MCore: cuda_graph_warmup_steps; here eager passes of a shape before it is captured

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, values: Any) -> Any:
        refuse_old_names(values)
        if isinstance(values, dict) and values.get("impl") in _PER_LAYER:
            raise ValueError(
                f"impl {values['impl']!r}: Megatron-Core's graphs of single layers take only the shapes of the step in which they were "
                "made, and batches here differ from step to step: write impl=full_iteration"
            )
        return values


def refuse_old_names(values: Any) -> None:
    """Raises ValueError, with what to write instead, when a mapping has a name that is not taken."""
    for name in values if isinstance(values, dict) else ():
        if name in _REFUSED:
            raise ValueError(f"{name}: {_REFUSED[name]}")
