"""Where the actors of a run are."""

from __future__ import annotations

from dataclasses import dataclass

from actors.data_plane.address import DataPlaneAddress


@dataclass(frozen=True)
class RunActors:
    """Where a run's actors are. Small and picklable: names and an address, no handles."""

    namespace: str
    address: DataPlaneAddress
    engines: list[str]
    ready: dict[str, str]


@dataclass(frozen=True)
class EvaluationActors:
    """Where the engines of an `evaluate` run are, by model; its rewards are with the environment actor. There is no data plane."""

    engines: dict[str, list[str]]
    ready: dict[str, str]
    address: None = None
