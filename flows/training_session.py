"""A session that trains: it is saved as it goes, resumes, and survives the loss of its parts.

start ─► resume? ─► steps ─► checkpoint every few ─► end
           ▲          │ loss: an actor died or is silent, a guard rolls back
           └──────────┘ lost actors start again; the newest checkpoint
"""

from __future__ import annotations

import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from prefect import runtime

from actors.data_plane.interface import DataPlaneGoneError
from actors.generation.types import EngineDiedError, GenerationTimeoutError, NoEngineError
from actors.models.hf import check_model_dir
from actors.models.memory_parts import ModelShape
from actors.models.memory_plan import stages
from actors.policy.device import PeerLostError
from actors.preflight import check_memory, planned_memory
from actors.rollout.ledger_actor import LedgerClosedError, LedgerStalledError
from actors.space import NoSpaceError
from actors.storage import Folder
from actors.waiting import ActorGoneError, ActorTimeoutError
from configs.base import ConfigError
from configs.policy import OptimizerConfig
from configs.run import BaseRunConfig
from flows.prepared import Prepared
from flows.resume import Mark, Origin, origin_of
from flows.saving import RunState, Saving
from flows.session import Session
from flows.stopping import Stopping
from tasks import events
from tasks.call import quoted
from tasks.checkpoint import export_hf, load_weights, publish_hf
from tasks.guards import RollBackError
from tasks.handles import RunActors
from tasks.lease import Lease
from tasks.reporting.jsonl import LinesWriter, read_lines
from tasks.reporting.memory import MemoryUse, Peaks
from tasks.reporting.run_dir import RunDirectory

# What a run comes back from. Everything else is wrong with the data, the configuration or the code, and would fail again.
LOSSES = (
    ActorGoneError, ActorTimeoutError, DataPlaneGoneError, EngineDiedError, GenerationTimeoutError, LedgerClosedError,
    LedgerStalledError, NoEngineError, PeerLostError, RollBackError,
)  # fmt: skip


_LEASE_S = 30.0


class TooManyRerunsError(RuntimeError):
    """A flow run that crashes again and again."""


class TrainingSession[C: BaseRunConfig](Session[C, RunActors]):
    """Use as a context manager.

    Attributes:
        first_step: the step that comes next. finished: all steps are done, and the loop ended well.
        weight_version: of the present weights.
    """

    state_type: ClassVar[type[RunState]]

    def __init__(self, config: C, recipe: str) -> None:
        super().__init__(config, recipe)
        self.first_step, self.finished, self.weight_version = 1, False, 0
        self._losses = 0  # since the last checkpoint
        self.why_again = "resumed"  # for the journal
        self._stopping = Stopping(config.checkpoint.grace_s)
        self._peaks = Peaks()
        self._root: Path | None = None  # with the files of the checkpoint to go on from

    # ---- what each flow has of its own ----

    @abstractmethod
    def _state(self, step: int) -> RunState:
        """What the flow knows after `step` steps."""

    @abstractmethod
    def _take_over(self, state: Any) -> None:
        """Go on with what `_state` returned."""

    @property
    @abstractmethod
    def _optimizer(self) -> OptimizerConfig:
        """Of the steps, as of a run that was not interrupted."""

    @property
    def _has_reference(self) -> bool:
        """Whether the policy has reference weights."""
        return False

    @property
    def _exports(self) -> int:
        """`hf` directories that the end writes, at most."""
        return 1 + self.config.checkpoint.keep_best

    @abstractmethod
    def _score(self, step: int) -> float | None:
        """Of the weights after `step` steps, higher is better; None: they were not validated."""

    def _conclude(self) -> None:
        """All steps are done."""

    # ---- start ----

    def _choose_directory(self) -> RunDirectory:
        copies = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        origin = origin_of(self.config, self.flow_run, copies)
        starts = self._count_starts(origin)
        directory = origin.directory if origin and origin.directory else super()._choose_directory()
        self.saving = Saving(self.config, directory, self.flow_run, origin)
        self.saving.store.probe()
        url = self.saving.store.url
        place = Folder(f"{url}/lease", "checkpoint.url", _LEASE_S)  # a renewal that takes longer comes too late
        lease = Lease(place, f"flow run {self.flow_run} trains into", _LEASE_S, again=True)
        self._stack.enter_context(lease.held(wait_s=_LEASE_S + 5))  # a run that was killed holds it for a little longer
        self.saving.store.remove_drafts()
        Mark(flow_run=self.flow_run, checkpoints=url, step=origin.step if origin else None, starts=starts).write(directory)
        return directory

    def _count_starts(self, origin: Origin | None) -> int:
        """Starts of this flow run from where it goes on.

        Raises:
            TooManyRerunsError: its process ended each time before the next checkpoint.
        """
        # Without an origin (`resume: never`, or the first start) there is no mark to count in: Prefect counts.
        starts = origin.starts(self.flow_run) if origin else runtime.flow_run.run_count or 1
        if starts > 1 + (reruns := self.config.recovery.reruns):
            where = "the beginning" if origin is None or origin.step is None else f"step {origin.step}"
            raise TooManyRerunsError(
                f"this flow run has gone on from {where} {starts - 1} times, and its process ended before the next checkpoint each time "
                f"(recovery.reruns = {reruns})"
            )
        return starts

    def _open(self) -> None:
        try:
            super()._open()
        except LOSSES as error:
            if self.saving.goes_on_from is None:  # nothing was paid for yet, and what cannot start at all should say so
                raise
            self._survive(error)

    def _open_files(self) -> None:
        self._root = self._files.enter_context(self.saving.source())
        self.saving.restore_lines(self._root)
        super()._open_files()
        for row in read_lines(self.directory.metrics):
            self._peaks.see(row)
            self.publisher.update(row.pop("step"), row)

    def _prepare(self) -> Prepared:
        self._prepared = prepared = super()._prepare()
        self.saving.check(prepared.model_path)
        width = 4 if self.config.policy.dtype == "float32" else 2
        room = self.saving.check_room(prepared.model_path, width, prepared.steps, self._exports, reference=self._has_reference)
        for warning in [*room, *check_memory(self.config, ModelShape.of(check_model_dir(prepared.model_path)))]:
            self.say(warning)
        return self._prepared

    def resume(self) -> bool:
        """Go on where the newest checkpoint was taken. False: there is none, and the run begins."""
        manifest = self.saving.goes_on_from
        if manifest is None or self._root is None:
            self.first_step, self.weight_version, self._tokens, self._steps_done = 1, 0, 0.0, 0
            return False
        with self.progress.phase(f"going on after step {manifest.step}"), self.time("restore"):
            state = self.saving.restore(self.namespace, self._root, self._optimizer, self.state_type)
            self.seconds.update(state.seconds)
            self._tokens, self._steps_done, self.weight_version = state.tokens, state.step, manifest.weight_version
            self._take_over(state)
        self.first_step = state.step + 1
        self.progress.note(f"went on after step {manifest.step}, from {self.saving.store.url}")
        return True

    # ---- steps ----

    def steps_left(self) -> Iterator[int]:
        """The steps to do."""
        for step in range(self.first_step, self.steps + 1):
            if self.is_last(step - 1):
                return
            yield step

    def is_last(self, step: int) -> bool:
        """Whether the training ends with this step, which is done."""
        return step == self.steps

    @contextmanager
    def ending_between_steps(self) -> Iterator[None]:
        """A first SIGTERM or Ctrl-C inside the block lets the present step end."""
        with self._stopping.at_step_ends():
            yield

    def save_now_and_then(self, step: int) -> None:
        """A checkpoint when one is due, after the last step, and when somebody asked the run to end; then it ends."""
        if not (self.saving.is_due(step, last=self.is_last(step)) or self._stopping.asked):
            return
        self.save(step)
        if self._stopping.asked:
            self.saving.wait()
            self.progress.note(f"asked to end: saved after step {step}; resume={self.directory.root} goes on from there")
            self.export()
            self._stopping.end_if_asked()
        if self.saving.is_full and not self.is_last(step):
            self.saving.wait()
            raise NoSpaceError(
                f"{self.saving.store.url}: the disk has no room for another checkpoint and the trained model: saved after step {step}, "
                f"and ended. Free some, and start again with resume={self.directory.root}"
            )

    def record(self, step: int, metrics: dict[str, float]) -> None:
        self._peaks.see(metrics)
        super().record(step, metrics)

    def _memory(self) -> dict[str, MemoryUse]:
        return self._peaks.compared(stages(planned_memory(self.config))) if self._peaks else {}

    def save(self, step: int) -> None:
        """One cut after this step; its files are written while the run goes on."""
        self.close_step_before()
        with self.time("checkpoint") as timer:
            arguments = self._state(step), self.weight_version, self._prepared.model_path, self._score(step), self._has_reference
            taken = self.saving.save(self.namespace, *arguments)
        self._losses = 0
        self.record(step, {"time/checkpoint": timer.seconds} | taken)

    # ---- end ----

    def export(self) -> None:
        """The trained policy as a Hugging Face directory: the last weights, and beside them the best, where those are others."""
        self.saving.wait()
        with self.time("export"), self.progress.phase("writing the trained model"):
            self._export(self.directory.hf)
            if self._load_best():
                self._export(self.directory.hf_best)

    def _export(self, target: Path) -> None:
        self.saving.require_export()
        export_hf(self.namespace, str(target), self.config.deadlines.policy_stage)
        if self.saving.store.directory is None:
            try:
                publish_hf(quoted(self.saving.store), target)
            except ConfigError as error:  # the run is done, and its model stands here
                self.say(f"{target} could not be copied to where the checkpoints are: {error}")

    def _load_best(self) -> bool:
        """The weights become those of the best checkpoint. False: they are, or none was validated."""
        best = self.saving.best() if self.config.checkpoint.keep_best else None
        if best is None or best.score == self._score(self._steps_done):
            return False
        with self.saving.fetched(best) as root:
            load_weights(self.namespace, root / best.folder, None, self._optimizer, self.config.checkpoint.timeout_s)
        self.progress.note(f"exported: also the weights after step {best.step}, the best validation")
        return True

    # ---- losses ----

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """The block is the run from `resume` to its export. When a part is lost inside it, it may be begun again."""
        try:
            yield
            self._conclude()
            self.finished = True
        except LOSSES as error:
            self._survive(error)

    def _survive(self, error: Exception) -> None:
        """The lost parts are there again when this returns; the error is raised where there are too many in a row."""
        while True:
            self._losses += 1
            if self._losses > self.config.recovery.restarts:
                raise error
            try:
                self._come_back(error)
            except LOSSES as again:
                error = again
            else:
                return

    @property
    def _step_before(self) -> int | None:
        """Of the checkpoint to go on from."""
        return self.saving.goes_on_from.step if self.saving.goes_on_from else None

    def _come_back(self, error: Exception) -> None:
        self._unfinished, self.why_again = None, str(error)[:300]
        self.saving.give_up_writing()
        where = f"step {self._step_before}" if self._step_before is not None else "the beginning"
        what = f"rolled back: {error}" if isinstance(error, RollBackError) else f"lost: {error}"
        line = f"{what}. Going on from {where} ({self._losses} of {self.config.recovery.restarts} losses in a row)"
        self.say(line)
        events.lost(line)
        noticed = time.time()
        self._files.close()
        self._open_files()  # as they were at the checkpoint
        self._start_actors(self._prepared)
        with LinesWriter(self.directory.losses) as file:
            file.append({"time": noticed, "lost": str(error), "from_step": self._step_before, "seconds": time.time() - noticed})
