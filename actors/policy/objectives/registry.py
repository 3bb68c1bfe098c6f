"""From a name to an objective."""

from __future__ import annotations

import inspect

from actors.policy.objectives.base import Objective
from actors.policy.objectives.dpo import Dpo
from actors.policy.objectives.grpo import Grpo
from actors.policy.objectives.sft import Sft
from configs.base import ConfigError
from configs.import_path import imported
from configs.loss import PREFERENCE as PREFERENCE  # beside SUPERVISED
from configs.policy import PolicyConfig

SUPERVISED = "sft"
_BUILT_IN: dict[str, type[Objective]] = {"grpo": Grpo, SUPERVISED: Sft, PREFERENCE: Dpo}


def build(name: str, policy: PolicyConfig) -> Objective:
    """The objective of that name or import path.

    Raises:
        ConfigError: the class cannot be imported, or does not derive from `Objective`.
    """
    cls = _BUILT_IN.get(name) or imported(name, "policy.loss.objective")
    if not (inspect.isclass(cls) and issubclass(cls, Objective)):  # before it is called: a name may be anything's
        raise ConfigError(f"policy.loss.objective: {name!r} does not derive from {Objective.__module__}:{Objective.__name__}")
    return cls(policy)
