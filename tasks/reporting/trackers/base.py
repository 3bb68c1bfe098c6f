"""What every tracker is: JSON lines, TensorBoard, MLflow, Weights & Biases, or a class of your own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

type Status = Literal["completed", "failed", "cancelled"]
type Row = Mapping[str, Any]


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run.

    Attributes:
        root: the run's directory. config: values by dotted field; secrets are references.
        step: the last one that counts, of the checkpoint that the run goes on from; -1: it begins.
    """

    root: Path
    name: str
    flow: str = ""
    recipe: str = ""
    flow_run: str = ""
    config: Mapping[str, Any] | None = None
    step: int = -1


class Tracker(ABC):
    """One place that shows a run. Its methods are called by one thread, one after the other, `open` first and `close` last.

    Attributes:
        takes_back: `open` forgets what came after the checkpoint. Elsewhere it stays, and is not sent again.
    """

    takes_back: ClassVar[bool] = False

    @abstractmethod
    def open(self, about: About, before: str | None) -> str:
        """Begin a run there, or go on with the one that was begun before. Returns its id. May be called again when it raised.

        Args:
            before: what `open` returned then.
        """

    def reached(self) -> Mapping[str, int]:
        """What the place itself knows of the run that `open` went on with: the last step of each metric."""
        return {}

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float | None], at: float) -> None:
        """Some metrics of a step; a step may come several times, with other metrics. Called again, with the same arguments, when it raised.

        Args:
            values: None: one that is not finite (only JSON lines get these). at: seconds since the epoch.
        """

    @abstractmethod
    def samples(self, step: int, phase: str, rows: Sequence[Row]) -> None:
        """What the model said: lines of samples.jsonl, of one phase (before, train, validation, after) of a step."""

    @abstractmethod
    def close(self, status: Status | None) -> None:
        """The run has ended. Also called where a method raised. Args: status: None: it goes on, from a checkpoint, with another `open`."""

    def refuses(self, error: Exception) -> bool:
        """Whether the same call would be refused again, so that there is no use in repeating it."""
        return isinstance(error, TypeError | ValueError | LookupError | AttributeError)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """The columns and the cells of samples; what is nested (the rewards by name) is JSON."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[_cell(row.get(name)) for name in columns] for row in rows]


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else value
