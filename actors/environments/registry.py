"""From a recipe's `environment` block to an object."""

from __future__ import annotations

import importlib

from actors.environments.base import Environment
from configs.base import ConfigError
from configs.environment import EnvironmentConfig


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
    if config.kind == "reasoning_gym":
        from actors.environments.reasoning_gym import ReasoningGymEnvironment  # imports every generator: 2 s

        return ReasoningGymEnvironment(
            task=config.task,
            options=config.task_options,
            seed=seed,
            train_size=config.train_size,
            validation_size=config.validation_size,
            answer_pattern=config.answer_pattern,
        )
    if config.kind == "jsonl":
        from actors.environments.jsonl import JsonlEnvironment

        assert config.path is not None  # EnvironmentConfig checks it
        return JsonlEnvironment(path=config.path, validation_path=config.validation_path, validation_size=config.validation_size)
    return _imported(config)


def _imported(config: EnvironmentConfig) -> Environment:
    assert config.import_path is not None  # EnvironmentConfig checks it
    module_name, _, class_name = config.import_path.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment.import_path: cannot import {config.import_path!r}: {error}") from None
    environment = cls(**config.options)
    if not isinstance(environment, Environment):
        raise ConfigError(f"environment.import_path: {config.import_path!r} does not derive from actors.environments.Environment")
    return environment
