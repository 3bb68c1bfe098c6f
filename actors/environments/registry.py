"""From a recipe's `environment` block to an object."""

from __future__ import annotations

import inspect

from actors.environments.base import Environment
from actors.environments.hosted import hosted
from configs.base import ConfigError
from configs.environment import EnvironmentConfig, SourceConfig
from configs.import_path import imported, said


def build(config: EnvironmentConfig, seed: int) -> Environment:
    """The environment that the recipe names; a class of the user's own in a process of its own.

    Raises:
        ConfigError: no such task, file or class, or an empty data set; names the field.
    """
    environment = hosted(config) if config.kind == "python" and not config.sources else _construct(config, seed)
    for split in ("train", "validation"):
        if environment.size(split) < 1:
            raise ConfigError(f"environment: the {split} split is empty: nothing to {'train on' if split == 'train' else 'validate with'}")
    return environment


def _construct(config: EnvironmentConfig, seed: int) -> Environment:
    if config.sources:
        from actors.environments.dataset.mixture import Mixture

        sources = {source.name: _source(source, seed, f"environment.sources.{source.name}") for source in config.sources}
        return Mixture(sources, [source.weight for source in config.sources])
    if config.streaming:
        from actors.environments.dataset.streamed import StreamedDataset

        return StreamedDataset(config, seed)
    return _source(config, seed, "environment")


def _source(config: EnvironmentConfig | SourceConfig, seed: int, field: str) -> Environment:
    if config.kind == "reasoning_gym":
        from actors.environments.reasoning_gym import ReasoningGymEnvironment  # imports every generator: 2 s

        return ReasoningGymEnvironment(config, seed)
    from actors.environments.dataset.environment import DatasetEnvironment

    return DatasetEnvironment(config, field)


def imported_here(config: EnvironmentConfig) -> Environment:
    """The user's own class, made in this process: one that has nothing else to protect.

    Args:
        config: of the kind `python`, its secrets resolved.

    Raises:
        ConfigError: no such class, options that it does not take, or what its constructor raises.
    """
    assert config.import_path is not None  # EnvironmentConfig checks it
    cls = imported(config.import_path, "environment.import_path")
    if not (inspect.isclass(cls) and issubclass(cls, Environment)):  # before it is called: a name may be anything's
        raise ConfigError(f"environment.import_path: {config.import_path!r} does not derive from actors.environments.Environment")
    try:
        inspect.signature(cls).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"environment.options: {config.import_path!r} does not take them: {error}") from None
    try:
        environment: Environment = cls(**config.options)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (a user's class may raise anything)
        raise ConfigError(f"environment.import_path: {said(error)}") from None
    return environment
