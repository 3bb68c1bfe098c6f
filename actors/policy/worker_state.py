"""What of a worker outlasts a step: optimizer and masters, reference weights, and both in the files of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from actors.policy.objectives.entropy_control import EntropyControl
from actors.policy.on_device import on_device
from actors.policy.passes import Passes
from actors.policy.reference import Snapshot, Teachers
from configs.policy import OptimizerConfig, PolicyConfig

NO_REFERENCE = "there is no reference policy yet: call snapshot_reference first"


class WorkerState:
    """Of `PolicyWorker`, which sets these.

    Attributes:
        _model: in Megatron's DistributedDataParallel; _bare: not wrapped.
        _saver: built at the first save, or ahead of it.
        _rounding: of policy.rounding stochastic.
    """

    _config: PolicyConfig
    _model: Any
    _bare: Any
    _hf: Any
    _dtype: torch.dtype
    _device: torch.device
    _distributed_optimizer: bool
    _optimizer: Any = None
    _scheduler: Any = None
    _passes: Passes
    _entropy_control: EntropyControl
    _reference: Snapshot | Teachers | None = None
    _saver: Any = None
    _rounding: Any = None

    @on_device
    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Fresh moments, and the schedule from its start. Masters stay as they are."""
        from actors.policy import masters
        from actors.policy.optimizer import build_optimizer

        present = None
        if self._optimizer is not None:  # the memory of its moments is free before the new one is built
            present = masters.held(self._bare, self._optimizer)
            self._optimizer = self._scheduler = None
            for parameter in self._bare.parameters():
                vars(parameter).pop("main_param", None)  # Megatron's handle to the optimizer's float32 copy
        self._optimizer, self._scheduler = build_optimizer(
            optimizer, self._model, self._dtype, self._config.loss_scale, distributed=self._distributed_optimizer
        )
        if present is not None:
            masters.carry_over(self._bare, self._optimizer, present)
        if self._rounding is not None:
            self._rounding.attach(self._bare, self._optimizer)

    @on_device
    def snapshot_reference(self) -> None:
        """Keep a copy of the present weights as the reference policy."""
        self._reference = Snapshot(self._bare, self._passes)

    @on_device
    def prepare_save(self) -> None:
        """Allocate the host memory of saves, so that the first one does not wait for it. A collective; idempotent."""
        from actors.policy.state import Saver

        if self._saver is None:
            self._saver = Saver(self._bare, self._optimizer, self._device)

    @on_device
    def begin_save(self, directory: str) -> None:
        """Copy the state to host memory, and begin to write it to the directory beside training. A collective.

        Raises:
            RuntimeError: the save before is still being written.
        """
        self.prepare_save()
        roundings = 0 if self._rounding is None else self._rounding.count
        self._saver.begin(self._bare, self._optimizer, self._scheduler, directory, self._entropy_control.state(), roundings)

    def is_saving(self) -> bool:
        """Whether a save is still being written."""
        return self._saver is not None and bool(self._saver.writing())

    def save_results(self) -> tuple[list[Any], float]:
        """What `finish_save` needs of this rank's save, which is written; and the seconds of writing.

        Raises:
            CheckpointError: it could not be written.
        """
        found: tuple[list[Any], float] = self._saver.results()
        return found

    def finish_save(self, directory: str, results: list[list[Any]], weight_version: int) -> None:
        """Write the index over what all ranks wrote; to be called on rank 0. No collective."""
        self._saver.finish(directory, results, weight_version, self._hf.vocab_size)

    @on_device
    def load_state(self, directory: str, optimizer: OptimizerConfig | None) -> dict[str, Any]:
        """Go on from a saved state: weights, masters, moments, schedule and, on the same device and layout, random states. A collective.

        Args:
            optimizer: whose schedule the run goes on with; None: the present one's.

        Returns:
            weight_version, optimizer_steps, random_states (whether they were restored).

        Raises:
            CheckpointError: the state is damaged, or another model's: seen before anything is changed. Or a file could not be read.
        """
        from actors.policy import state as states

        saved = states.check(self._bare, self._optimizer, directory, self._hf.vocab_size)
        if optimizer is not None:
            self.reset_optimizer(optimizer)
        same = states.load(self._bare, self._optimizer, self._scheduler, self._device, directory, saved)
        if self._rounding is not None:
            self._rounding.count = saved.roundings
            self._rounding.again(self._model, self._optimizer)
        self._entropy_control.restore(saved.objective)
        return {"weight_version": saved.weight_version, "optimizer_steps": saved.optimizer_steps, "random_states": same}

    @on_device
    def save_reference(self, directory: str) -> None:
        """Write the reference weights. A collective.

        Raises:
            CheckpointError: they cannot be written. RuntimeError: there is no reference.
        """
        from actors.policy.state import save_reference

        if not isinstance(self._reference, Snapshot):
            raise RuntimeError(NO_REFERENCE)
        save_reference(self._bare, self._optimizer, self._reference.weights, directory)

    @on_device
    def load_reference(self, directory: str) -> None:
        """Make saved weights the reference policy. A collective.

        Raises:
            CheckpointError: they are damaged, or another model's.
        """
        from actors.policy.state import load_reference

        self._reference = Snapshot(self._bare, self._passes, load_reference(self._bare, self._optimizer, directory))
