"""What of a saved policy is not a tensor. Imports no Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from actors.checkpoints.errors import CheckpointError

STATE = "state.json"


class LossScale(BaseModel):
    """Where the loss scale of float16 stands: Megatron's DynamicGradScaler.

    Attributes:
        scale: the factor. growth_tracker: steps in a row without an overflow. hysteresis_tracker: overflows that do not halve it yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: PositiveFloat
    growth_tracker: NonNegativeInt
    hysteresis_tracker: int


class PolicyState(BaseModel):
    """What is not a tensor: `STATE`.

    Attributes:
        optimizer_steps: since the optimizer was fresh: Adam's step, and the schedule's.
        vocab_size: of the model, without padding.
        random_states: where the stored ones belong: a device and a layout.
        objective: what the objective of rollouts has adapted (`EntropyControl.state`).
        loss_scale: of float16. roundings: how often the working copy was rounded by chance (policy.rounding).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    weight_version: NonNegativeInt
    optimizer_steps: NonNegativeInt
    vocab_size: PositiveInt
    random_states: str
    objective: dict[str, float] = {}
    loss_scale: LossScale | None = None
    roundings: NonNegativeInt = 0

    @classmethod
    def read(cls, directory: str) -> PolicyState:
        """Of a saved policy.

        Raises:
            CheckpointError: the file is missing, or not what `PolicyState` writes.
        """
        path = Path(directory) / STATE
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def write(self, directory: str) -> None:
        """As a file in the directory.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            (Path(directory) / STATE).write_text(self.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise CheckpointError(f"{directory}/{STATE} cannot be written: {error}") from error
