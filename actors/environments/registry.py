"""From a recipe's `environment` block to an object."""

from __future__ import annotations

import inspect

from actors.environments.base import Environment
from configs.base import ConfigError
from configs.curriculum import CurriculumConfig
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

        sources = {
            source.name: _generated(source, seed) if source.kind == "reasoning_gym" else _read(source, f"environment.sources.{source.name}")
            for source in config.sources
        }
        return Mixture(sources, [source.weight for source in config.sources])
    if config.kind == "reasoning_gym":
        return _generated(config, seed, config.curriculum)
    if config.kind == "python":
        return _imported(config)
    return _streamed(config, seed) if config.streaming else _read(config, "environment")


def _generated(config: EnvironmentConfig | SourceConfig, seed: int, curriculum: CurriculumConfig | None = None) -> Environment:
    from actors.environments.reasoning_gym import ReasoningGymEnvironment  # imports every generator: 2 s

    assert config.task is not None  # SourceConfig checks it
    return ReasoningGymEnvironment(
        task=config.task,
        options=config.task_options,
        seed=seed,
        train_size=config.train_size,
        validation_size=config.validation_size,
        curriculum=curriculum,
    )


def _read(config: EnvironmentConfig | SourceConfig, field: str) -> Environment:
    from actors.environments.dataset.environment import DatasetEnvironment

    assert config.path is not None  # both configurations check it
    return DatasetEnvironment(
        path=config.path,
        validation_path=config.validation_path,
        validation_size=config.validation_size,
        fields=config.fields,
        field=field,
    )


def _streamed(config: EnvironmentConfig, seed: int) -> Environment:
    from actors.environments.dataset.streamed import StreamedDataset

    assert config.path is not None  # EnvironmentConfig checks both
    assert config.validation_path is not None
    return StreamedDataset(
        path=config.path,
        validation_path=config.validation_path,
        validation_size=config.validation_size,
        fields=config.fields,
        seed=seed,
        shuffle_buffer=config.shuffle_buffer,
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
