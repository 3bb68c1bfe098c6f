"""`trackers`: where the numbers and samples of a run go besides its own directory."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from configs.base import ConfigError, StrictModel
from configs.import_path import imported, one_of
from configs.redaction import Options, Url


class TensorboardConfig(StrictModel):
    """Event files in the run's directory, `tensorboard/`."""


class MlflowConfig(StrictModel):
    """A run on an MLflow server, or in its local store. User and password are MLflow's own variables (MLFLOW_TRACKING_USERNAME, ...)."""

    url: Url | None = Field(None, description="http(s)://host:port, sqlite:///file; default: MLFLOW_TRACKING_URI, else MLflow's own.")
    experiment: str = Field("grpo-flows", min_length=1, description="Made where there is none of that name.")


class WandbConfig(StrictModel):
    """A run of Weights & Biases. The key is WANDB_API_KEY, or what `wandb login` has written."""

    project: str = Field("grpo-flows", min_length=1)
    entity: str | None = Field(None, description="Team or user; default: the key's.")  # wandb.init: entity
    group: str | None = Field(None, description="Runs of a group are shown together.")  # wandb.init: group
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: files in the run's directory, which `wandb sync` sends later."
    )


class OwnTrackerConfig(StrictModel):
    """A class of your own, derived from tasks.reporting.trackers.base.Tracker."""

    import_path: Annotated[str, one_of((), "class")] = Field(description="package.module:Class")
    options: Options = Field({}, description="Arguments of the class.")


class TrackerConfig(StrictModel):
    """One tracker: its name, or its name and a block of settings. Exactly one field is set."""

    tensorboard: TensorboardConfig | None = None
    mlflow: MlflowConfig | None = None
    wandb: WandbConfig | None = None
    python: OwnTrackerConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {value: {}}
        if not isinstance(value, dict):
            return value
        if len(value) == 1:  # `- mlflow:`, without a block
            return {name: {} if block is None else block for name, block in value.items()}
        return {name: block for name, block in value.items() if block is not None}

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len([name for name in type(self).model_fields if getattr(self, name) is not None]) != 1:
            raise ValueError(f"name one of {', '.join(type(self).model_fields)} for each entry of the list")
        return self

    @property
    def kind(self) -> str:
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def settings(self) -> TensorboardConfig | MlflowConfig | WandbConfig | OwnTrackerConfig:
        """The block of its name."""
        settings: TensorboardConfig | MlflowConfig | WandbConfig | OwnTrackerConfig = getattr(self, self.kind)
        return settings


def labels(trackers: Sequence[TrackerConfig]) -> list[str]:
    """What each is called in messages and files: its kind; mlflow-2 is the second of that kind."""
    kinds = [one.kind for one in trackers]
    return [kind if (nth := kinds[: index + 1].count(kind)) == 1 else f"{kind}-{nth}" for index, kind in enumerate(kinds)]


def _not_twice(trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
    for index, one in enumerate(trackers):
        if one in trackers[:index]:
            raise ValueError(f"{one.kind} is there twice, with the same settings")
    return trackers


Trackers = Annotated[tuple[TrackerConfig, ...], AfterValidator(_not_twice)]
TENSORBOARD = (TrackerConfig(tensorboard=TensorboardConfig()),)


def check_installed(trackers: Sequence[TrackerConfig]) -> None:
    """
    Raises:
        ConfigError: a tracker's package is not there, or a class of one's own cannot be imported.
    """
    for one in trackers:
        if isinstance(one.settings, OwnTrackerConfig):
            imported(one.settings.import_path, "trackers.python.import_path")
        elif isinstance(one.settings, MlflowConfig | WandbConfig) and importlib.util.find_spec(one.kind) is None:
            package = "mlflow-skinny" if one.kind == "mlflow" else one.kind
            raise ConfigError(f"trackers: {one.kind} is not installed: uv pip install {package}, or leave the tracker out")
