"""The curriculum: how hard the next prompts are, by the accuracy of the last groups. Pure: a state machine over (level, accuracies).

accuracy over the last `window` groups of the present level   >= raise_at ──► level + 1, window emptied
                                                              <= lower_at ──► level - 1, window emptied
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from configs.base import ConfigError
from configs.curriculum import CurriculumConfig


class Curriculum:
    """The present level of difficulty.

    The result depends on the order of the groups: a run that promises equal metrics observes them in the order of drawing.

    Args:
        levels: how many the task has.

    Attributes:
        level: of the next prompts, 0 for the easiest.

    Raises:
        ConfigError: the configuration names a level that the task does not have.
    """

    def __init__(self, config: CurriculumConfig, levels: int) -> None:
        for field, wanted in (("start_level", config.start_level), ("max_level", config.max_level)):
            if wanted is not None and wanted >= levels:
                raise ConfigError(f"environment.curriculum.{field}: {wanted} is above {levels - 1}, the task's hardest level")
        self._config = config
        self._top = levels - 1 if config.max_level is None else config.max_level
        self.level = config.start_level
        self._accuracies: deque[float] = deque(maxlen=config.window)

    def observe(self, level: int, accuracy: float) -> None:
        """Take in a group: the level it was drawn at, and the part of its responses, in [0, 1], that are right.

        A group of another level than the present one changes nothing: in async, groups still come in that were drawn before a change.

        Raises:
            ValueError: an accuracy outside [0, 1].
        """
        if not 0 <= accuracy <= 1:  # also NaN
            raise ValueError(f"an accuracy is between 0 and 1, not {accuracy}")
        if level != self.level:
            return
        self._accuracies.append(accuracy)
        if len(self._accuracies) < self._config.window:
            return
        lower_at = self._config.lower_at
        if self.accuracy >= self._config.raise_at and self.level < self._top:
            self.level += 1
        elif lower_at is not None and self.accuracy <= lower_at and self.level > 0:
            self.level -= 1
        else:
            return
        self._accuracies.clear()

    @property
    def accuracy(self) -> float:
        """Mean over the groups of the window so far; NaN when there are none."""
        # fsum: the same accuracies in another order within a window give the same mean.
        return math.fsum(self._accuracies) / len(self._accuracies) if self._accuracies else math.nan

    def metrics(self) -> dict[str, float]:
        """curriculum/level and, once a group of this level was observed, curriculum/accuracy of the window."""
        found = {"curriculum/level": float(self.level)}
        return found | {"curriculum/accuracy": self.accuracy} if self._accuracies else found

    def state(self) -> dict[str, Any]:
        """What `restore` takes; JSON."""
        return {"level": self.level, "accuracies": list(self._accuracies)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. A window that has become shorter keeps the last groups.

        Raises:
            ConfigError: its level is above this configuration's hardest.
        """
        if state["level"] > self._top:
            raise ConfigError(
                f"environment.curriculum.max_level: the run to resume is at level {state['level']}, above {self._top}: raise max_level"
            )
        self.level = state["level"]
        self._accuracies = deque(state["accuracies"], maxlen=self._config.window)
