"""From a recipe's `environment` block to an object."""

from __future__ import annotations

import inspect

from actors.environments.base import Environment
from configs.base import ConfigError
from configs.environment import EnvironmentConfig, SourceConfig
from configs.import_path import imported
from configs.secrets import resolve


def build(config: EnvironmentConfig, seed: int) -> Environment:
    """The environment that the recipe names.

    Raises:
        ConfigError: no such task, file or class, or an empty data set; names the field.
    """
    environment = _construct(config, seed)
    for split in ("train", "validation"):
        if environment.size(split) < 1:
            raise ConfigError(f"environment: the {split} split is empty: nothing to {'train on' if split == 'train' else 'validate with'}")
    return environment


def _construct(config: EnvironmentConfig, seed: int) -> Environment:
    if config.sources:
        from actors.environments.dataset.mixture import Mixture

        return Mixture({source.name: _source(source, seed) for source in config.sources}, [source.weight for source in config.sources])
    if config.kind == "reasoning_gym":
        from actors.environments.reasoning_gym import ReasoningGymEnvironment  # imports every generator: 2 s

        return ReasoningGymEnvironment(
            task=config.task,
            options=config.task_options,
            seed=seed,
            train_size=config.train_size,
            validation_size=config.validation_size,
            curriculum=config.curriculum,
        )
    if config.kind == "python":
        return _imported(config)
    assert config.path is not None  # EnvironmentConfig checks it
    if config.streaming:
        from actors.environments.dataset.streamed import StreamedDataset

        assert config.validation_path is not None  # likewise
        return StreamedDataset(
            path=config.path,
            validation_path=config.validation_path,
            validation_size=config.validation_size,
            fields=config.fields,
            seed=seed,
            shuffle_buffer=config.shuffle_buffer,
        )
    from actors.environments.dataset.environment import DatasetEnvironment

    return DatasetEnvironment(
        path=config.path, validation_path=config.validation_path, validation_size=config.validation_size, fields=config.fields
    )


def _source(source: SourceConfig, seed: int) -> Environment:
    if source.path is not None:
        from actors.environments.dataset.environment import DatasetEnvironment

        return DatasetEnvironment(
            path=source.path,
            validation_path=source.validation_path,
            validation_size=source.validation_size,
            fields=source.fields,
            field=f"environment.sources.{source.name}",
        )
    from actors.environments.reasoning_gym import ReasoningGymEnvironment

    assert source.task is not None  # SourceConfig checks it
    return ReasoningGymEnvironment(
        task=source.task, options=source.task_options, seed=seed, train_size=source.train_size, validation_size=source.validation_size
    )


def _imported(config: EnvironmentConfig) -> Environment:
    assert config.import_path is not None  # EnvironmentConfig checks it
    cls = imported(config.import_path, "environment.import_path")
    if not (inspect.isclass(cls) and issubclass(cls, Environment)):  # before it is called: a name may be anything's
        raise ConfigError(f"environment.import_path: {config.import_path!r} does not derive from actors.environments.Environment")
    options = resolve(config.options, "environment.options")
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise ConfigError(f"environment.options: {config.import_path!r} does not take them: {error}") from None
    environment: Environment = cls(**options)
    return environment
