"""When to stop because the validation loss no longer falls. Pure."""

from __future__ import annotations

import math


class EarlyStopping:
    """Counts validations that brought no loss below the lowest so far.

    Args:
        patience: how many of them in a row are enough; None: no number is.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._lowest, self._since = math.inf, 0

    def see(self, loss: float) -> None:
        """The next validation. A loss that is not a number is no improvement."""
        if loss < self._lowest:
            self._lowest, self._since = loss, 0
        else:
            self._since += 1

    @property
    def exhausted(self) -> bool:
        """Whether to stop."""
        return self._patience is not None and self._since >= self._patience
