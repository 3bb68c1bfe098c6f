"""Checkpoints of a run, and what happens when a part of it is lost."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from configs.base import StrictModel
from configs.redaction import Url


class CheckpointConfig(StrictModel):
    """When a run is saved, where, and which checkpoints stay."""

    url: Url | None = Field(None, description="A path, or any fsspec URL (s3://bucket/run); default: checkpoints/ in the run's directory.")
    every_steps: PositiveInt | None = Field(
        25, description="Steps between checkpoints; null: none but the last one of a run that is ended."
    )
    keep_last: PositiveInt = Field(2, description="The newest that stay.")
    keep_every: PositiveInt | None = Field(None, description="Those of every so many steps stay as well.")
    keep_best: bool = Field(True, description="The one with the best validation stays as well.")
    inputs: bool = Field(
        True, description="grpo: keep what each step was made from, about 25 B a token, back to the oldest checkpoint, for flows.replay."
    )
    timeout_s: PositiveFloat = Field(1800.0, description="Longest wait until a checkpoint's files are written, or read.")
    grace_s: PositiveFloat = Field(
        25.0, description="SIGTERM: so long the present step may go on, to be saved; then the run ends at once. Prefect kills after 30 s."
    )


class RecoveryConfig(StrictModel):
    """What dies comes back: the run goes on from its newest checkpoint."""

    reruns: NonNegativeInt = Field(
        5, description="Deaths of the flow's process in a row, without a new checkpoint between them, that a run survives."
    )
    restarts: NonNegativeInt = Field(3, description="Losses in a row, without a new checkpoint between them, that a run survives.")


class EngineRecoveryConfig(RecoveryConfig):
    """And engines, which come back while the run goes on."""

    engine_restarts: NonNegativeInt = Field(10, description="async: how often an engine may come back.")  # ray: max_restarts
