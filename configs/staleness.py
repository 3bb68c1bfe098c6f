"""How asynchronous rollouts are admitted, aged and served: the bounds of the replay buffer and of its waits.

Age is counted in weight versions, which are training steps: each step ends with one refit. A group's start version is the version that
sampled its first token; its age at a step is the version that the step trains minus that.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.base import StrictModel
from configs.import_path import one_of

SAMPLERS = ("windowed", "ready_first", "weight_fifo", "in_order")


class AsyncConfig(StrictModel):
    """The replay buffer, its staleness sampler, and how weights reach engines that are generating."""

    max_trajectory_age_steps: NonNegativeInt = Field(
        1,
        description="Largest age of a group when it is trained. 0: only groups begun under the weights that the step trains, so nothing "
        "is generated while it trains. 1: the next step's groups are generated during this one. Above 1: responses may span updates.",
    )
    in_flight_weight_updates: bool = Field(True, description="Freeze running requests, change the weights, go on; False waits for them.")
    recompute_kv_cache_after_weight_updates: bool = Field(
        False, description="Recompute the frozen requests' KV cache with the new weights."
    )
    sampler: Annotated[str, one_of(SAMPLERS, "sampler")] = Field(
        "windowed", description="windowed, ready_first, weight_fifo, in_order, or package.module:Class of your own."
    )
    max_inflight_prompts: PositiveInt | None = Field(None, description="Most groups being generated at once; default: the capacity.")
    buffer_capacity: PositiveInt | None = Field(
        None,
        description="Most groups in flight, stored or in training; default: rollout.prompts_per_step x (max_trajectory_age_steps + 1).",
    )
    stall_timeout_s: PositiveFloat = Field(600.0, description="Without one group committed for so long, a waiting trainer gives up.")
    stall_report_every_s: PositiveFloat = Field(30.0, description="How often a waiting trainer says what it waits for.")

    def capacity(self, groups_per_step: int) -> int:
        """Groups that the buffer holds."""
        return self.buffer_capacity or groups_per_step * (self.max_trajectory_age_steps + 1)

    @model_validator(mode="after")
    def _updates_fit(self) -> Self:
        if self.max_trajectory_age_steps > 1 and not self.in_flight_weight_updates:
            raise ValueError(
                f"max_trajectory_age_steps = {self.max_trajectory_age_steps} without in_flight_weight_updates: each refit then waits for "
                "the running groups, so no trajectory can span more than one update, and an age above 1 only comes from groups left lying "
                "in the buffer (staler data, no more overlap). Set in_flight_weight_updates to true, or max_trajectory_age_steps to 1"
            )
        if self.recompute_kv_cache_after_weight_updates and not self.in_flight_weight_updates:
            raise ValueError(
                "recompute_kv_cache_after_weight_updates without in_flight_weight_updates: no request is running when the weights change, "
                "so there is no cache to recompute. Set in_flight_weight_updates to true, or leave this one false"
            )
        return self

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.buffer_capacity and self.max_inflight_prompts and self.max_inflight_prompts > self.buffer_capacity:
            raise ValueError(
                f"max_inflight_prompts ({self.max_inflight_prompts}) is above buffer_capacity ({self.buffer_capacity}): "
                "a group in flight holds a slot of the buffer, so raise the one or lower the other"
            )
        if self.stall_report_every_s > self.stall_timeout_s:
            raise ValueError(
                f"stall_report_every_s ({self.stall_report_every_s:g}) is above stall_timeout_s ({self.stall_timeout_s:g}): "
                "a stalled trainer would give up before its first report"
            )
        return self
