"""How a batch becomes micro-batches: padded rows, dynamic batching, or sequence packing."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from configs.base import StrictModel


class BatchingConfig(StrictModel):
    """The layout of the tensors that go through the model. No layout changes a result; they differ in time and memory.

    padded: a fixed number of rows, all padded to one length. dynamic: rows of similar length, as many as the token budget holds.
    packed: sequences one after the other in a single row of at most the token budget.
    """

    mode: Literal["padded", "dynamic", "packed"] = "padded"
    micro_batch_size: PositiveInt = Field(32, description="padded: rows in one forward pass.")
    tokens_per_micro_batch: PositiveInt | None = Field(None, description="dynamic, packed: most tokens, padding included, in one pass.")
    packing: Literal["balanced", "first_fit_decreasing"] = Field("balanced", description="packed: who shares a row.")
    token_buckets: tuple[PositiveInt, ...] = Field(
        (), description="Allowed tokens per row, rising: a few fixed shapes that CUDA graphs can replay. Empty: any."
    )
    sequence_buckets: tuple[PositiveInt, ...] = Field(
        (), description="Allowed sequences per micro-batch, rising; no micro-batch takes more than the largest. Empty: any."
    )
    micro_batch_buckets: tuple[PositiveInt, ...] = Field(
        (), description="Allowed micro-batches per rank, rising; those beyond the rows are padding. Empty: any."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.mode != "padded" and self.tokens_per_micro_batch is None:
            raise ValueError(f"mode {self.mode!r} needs tokens_per_micro_batch")
        if self.mode == "padded" and self.tokens_per_micro_batch is not None:
            raise ValueError("tokens_per_micro_batch is for the modes 'dynamic' and 'packed'; 'padded' goes by micro_batch_size")
        for name in ("token_buckets", "sequence_buckets", "micro_batch_buckets"):
            buckets = getattr(self, name)
            if list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name}: {list(buckets)} is not rising")
        budget = self.tokens_per_micro_batch
        if budget is not None and self.token_buckets and self.token_buckets[-1] > budget:
            raise ValueError(f"token_buckets: {self.token_buckets[-1]} exceeds tokens_per_micro_batch ({budget})")
        if self.mode == "padded" and self.sequence_buckets and self.sequence_buckets[-1] < self.micro_batch_size:
            raise ValueError(f"sequence_buckets: none of {list(self.sequence_buckets)} holds micro_batch_size ({self.micro_batch_size})")
        return self
