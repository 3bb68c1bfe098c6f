"""The Ray compiled graph that drives the policy workers."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from configs.base import StrictModel


class CompiledGraphConfig(StrictModel):
    """A static graph per data-parallel replica in place of an actor call per worker and step.

    Warm-up runs one synthetic batch of the worst-case shape through every stage before step 1, without changing weights.
    """

    enabled: bool = True  # Ray: dag.experimental_compile
    warmup_seq_len: PositiveInt | None = Field(None, description="Tokens of each synthetic sample; default: the rollout's longest.")
    warmup_global_batch_size: PositiveInt | None = Field(
        None, description="Synthetic samples over all replicas; default: one micro-batch per replica."
    )
    timeout_s: PositiveFloat | None = Field(
        None, description="Longest wait for one call through the graph; default: policy.timeout_s."
    )  # Ray: RAY_CGRAPH_get_timeout, _submit_timeout
