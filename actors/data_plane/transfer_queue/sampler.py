"""Which samples a claim gets. Runs inside TransferQueue's controller, whose one request thread makes every claim atomic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.sampler import BaseSampler


class FirstWrittenSampler(BaseSampler):  # type: ignore[misc]
    """Samples in the order in which their keys were first written, each once per consumer.

    TransferQueue's own SequentialSampler goes by index, and indexes of cleared samples are used again.
    """

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *, partition: Any, consumer: str = "", give_back: Sequence[str] = (), **_: Any
    ) -> tuple[list[int], list[int]]:
        """The indexes to hand out, and the same to mark as taken; none when fewer than `batch_size` are ready.

        Args:
            partition: the controller's own record; its keys stand in order of creation.
            give_back: keys that `consumer` has taken and not received; they become ready again.
        """
        for key in give_back:
            if key in partition.keys_mapping:
                partition.consumption_status[consumer][partition.keys_mapping[key]] = 0
        ready = set(ready_indexes)
        chosen = [index for index in partition.keys_mapping.values() if index in ready][:batch_size]
        return (chosen, chosen) if len(chosen) == batch_size else ([], [])
