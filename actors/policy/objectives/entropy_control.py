"""The coefficient of the entropy bonus, which may follow a target (Skywork-OR1, He et al., arXiv 2505.22312, "adaptive entropy control").

    c_(k+1) = c_k + step if e_k < target, else c_k - step, and never below 0       c_0 = entropy_coef
    the bonus of the next update is c_(k+1) while e_k <= target, else 0

e_k is the mean entropy of the batch of update k, before it: the paper's is that of the batch that is about to be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping

from configs.loss import LossConfig

_COEFFICIENT, _ABOVE = "entropy_coef", "entropy_above_target"


class EntropyControl:
    """Of `config`: without `target_entropy` the coefficient stays what it is.

    Attributes:
        active: the coefficient of the next update.
    """

    def __init__(self, config: LossConfig) -> None:
        self._target, self._step = config.target_entropy, config.entropy_coef_step
        self._coefficient, self._above = config.entropy_coef, False

    @property
    def active(self) -> float:
        return 0.0 if self._above else self._coefficient

    def see(self, metrics: Mapping[str, float]) -> None:
        """An update was made, and reported this: `entropy`, in nats, on every rank alike."""
        if self._target is None:
            return
        entropy = metrics["entropy"]
        self._coefficient = max(0.0, self._coefficient + (self._step if entropy < self._target else -self._step))
        self._above = entropy > self._target

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {} if self._target is None else {_COEFFICIENT: self._coefficient, _ABOVE: float(self._above)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state`; one that has nothing of it begins anew."""
        self._coefficient, self._above = state.get(_COEFFICIENT, self._coefficient), bool(state.get(_ABOVE, self._above))
