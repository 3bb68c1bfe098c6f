"""The checkpoints of one run, as its session sees them: when one is due, how it is made, and what the run goes on from.

save: draft ─► task checkpoint-N (training stands still) ─► the run's own files ─► task publish-checkpoint-N (beside the next steps)
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from pydantic import BaseModel, ConfigDict, ValidationError

from actors.checkpoints.errors import CheckpointError
from actors.checkpoints.manifest import Manifest, packages, shape_digest
from actors.checkpoints.store import CheckpointStore, Draft
from actors.data_plane.meta import KVBatchMeta
from actors.models.hf import parameter_count, tensor_shapes
from actors.rollout.inputs import StepInputs, remove
from actors.rollout.journal import Opening
from actors.space import NoSpaceError, Room, Sizes
from actors.storage import Content
from configs.loader import dump
from configs.run import BaseRunConfig
from flows.resume import Origin
from tasks.call import quoted
from tasks.checkpoint import JOURNAL, POLICY, Cut, checkpoint, keep_reference, publish, reference_of, restore
from tasks.reporting.run_dir import RunDirectory

_STATE = "run/state.json"
_TRACKERS = "trackers"
_LINES = ("metrics.jsonl", "samples.jsonl", "slowest.jsonl")  # files of the run that go on


class RunState(BaseModel):
    """What the flow's process knows of a run at a checkpoint.

    Attributes:
        step: steps done. tokens: trained on. seconds: per stage.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")  # a loss may be NaN

    step: int
    tokens: float
    seconds: dict[str, float]


class Saving:
    """Checkpoints of the run in `directory`.

    Args:
        flow_run: its id. origin: what it goes on from.

    Attributes:
        goes_on_from: the checkpoint that the next `restore` takes; None: the run begins.
    """

    def __init__(self, config: BaseRunConfig, directory: RunDirectory, flow_run: str, origin: Origin | None) -> None:
        self._config, self._directory, self._flow_run = config, directory, flow_run
        scratch, timeout_s = directory.root / ".checkpoints", config.checkpoint.timeout_s
        self.store = CheckpointStore(config.checkpoint.url or str(directory.checkpoints), scratch, timeout_s)
        self.goes_on_from: Manifest | None = origin.manifest if origin else None
        self._source = origin.store if origin else self.store
        self._shared: dict[str, Content] = {}  # reference weights, and the journal up to the last checkpoint
        self._journal_since = 0 if config.flow == "grpo" else None  # nothing else has a ledger
        self._publishing: PrefectFuture[Manifest] | None = None
        self._room: Room | None = None
        self.is_full = False  # the checkpoint that was begun last is the last one that the disk has room for

    def opening(self, why: str) -> Opening:
        """How the run's journal begins, or goes on. Args: why: it goes back, for a person."""
        digest = hashlib.sha256(self._config.model_dump_json().encode()).hexdigest()
        back = self.goes_on_from.journal if self.goes_on_from else None
        return Opening(self._directory.journal, self._flow_run, digest, back, why)

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether a checkpoint belongs after this step: every few, and after the last, so that the run can be made longer."""
        every = self._config.checkpoint.every_steps
        return every is not None and (last or step % every == 0)

    # ---- room ----

    def check_room(self, model_path: str, bytes_per_weight: int, steps: int, exports: int, *, reference: bool) -> list[str]:
        """Before anything starts. Returns warnings.

        Args:
            bytes_per_weight: of an `hf` directory. steps: of the run. exports: `hf` directories at its end, at most.
            reference: whether the policy will have reference weights.

        Raises:
            NoSpaceError: a disk has no room for what the run writes at least.
        """
        sizes = Sizes.of(parameter_count(model_path), bytes_per_weight, reference=reference)
        self._room = Room(sizes, exports, self.store.directory, self._directory.root)
        return self._room.check(self._config.checkpoint, steps)

    def require_export(self) -> None:
        """There is room for an `hf` directory.

        Raises:
            NoSpaceError: there is not.
        """
        with self._standing():
            self._known_room.require_export()

    @property
    def _known_room(self) -> Room:
        assert self._room is not None
        return self._room

    @contextmanager
    def _standing(self) -> Iterator[None]:
        try:
            yield
        except NoSpaceError as error:
            newest = self.goes_on_from
            stands = "there is no checkpoint" if newest is None else f"the checkpoint of step {newest.step} stands in {self.store.url}"
            raise NoSpaceError(f"{error}; {stands}. Free some, and start again with resume={self._directory.root}") from None

    # ---- writing ----

    def save(
        self, namespace: str, state: RunState, weight_version: int, model_path: str, score: float | None, with_reference: bool
    ) -> dict[str, float]:
        """One cut between two steps. Returns what it took.

        Args:
            state: what the flow itself knows. score: of these weights, higher is better.
            with_reference: whether the policy has reference weights.

        Raises:
            NoSpaceError: there is no room for it; nothing was written.
        """
        self.wait()
        config, step = self._config, state.step
        keeps_reference = with_reference and all(name.startswith(JOURNAL) for name in self._shared)
        with self._standing():
            self.is_full = self._known_room.require_checkpoint(config.checkpoint, step, len(self.store.steps()), keeps_reference)
        if keeps_reference:
            self._keep_reference(namespace)
        draft = self.store.draft(step)
        try:
            cut, manifest = self._fill(draft, namespace, state, weight_version, model_path, score)
        except BaseException:
            self.store.discard(draft)
            raise
        self._publishing = publish.submit(
            namespace, step, quoted(self.store), quoted(draft), quoted(manifest), config.checkpoint, self._directory.inputs
        )
        return cut.metrics

    def _fill(
        self, draft: Draft, namespace: str, state: RunState, weight_version: int, model_path: str, score: float | None
    ) -> tuple[Cut, Manifest]:
        config, step = self._config, state.step
        waits = config.checkpoint.timeout_s, config.deadlines.cut
        cut = checkpoint(namespace, step, draft.directory, quoted(self.store), self._journal_since, *waits)
        self._shared |= cut.journal
        if cut.line is not None:
            self._journal_since = cut.line[0] + 1
        run = draft.directory / "run"
        run.mkdir()
        (draft.directory / _STATE).write_text(state.model_dump_json())
        for name in _LINES:
            if (lines := self._directory.root / name).is_file():
                shutil.copyfile(lines, run / name)
        _copy_trackers(self._directory.trackers, run / _TRACKERS)
        manifest = Manifest(
            flow=config.flow, run=self._flow_run, step=step, weight_version=weight_version, score=score,
            shape=shape_digest(tensor_shapes(model_path)), config=config.model_dump(mode="json"), packages=packages(),
            folder=draft.folder, files={}, shared=dict(self._shared), journal=cut.line,
        )  # fmt: skip
        return cut, manifest

    def wait(self) -> None:
        """The checkpoint that is being written is published when this returns.

        Raises:
            CheckpointError, ConfigError: it could not be; those before it stand.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            self.goes_on_from, self._source = publishing.result(), self.store
            self._known_room.learn(sum(content.size for content in self.goes_on_from.files.values()))

    def give_up_writing(self) -> None:
        """A part of the run is lost: what was being written may become a checkpoint, or not."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001  (the run goes on from the one before)
            get_run_logger().warning("a checkpoint could not be finished: %s", error)

    def _keep_reference(self, namespace: str) -> None:
        """The reference weights are files of every checkpoint from now on; they are written once."""
        directory = self._directory.root / ".reference"
        shutil.rmtree(directory, ignore_errors=True)  # of a process that was killed
        keep_reference(namespace, directory, self._config.checkpoint.timeout_s)
        self._shared |= self.store.keep(directory, _digest(directory))
        shutil.rmtree(directory)

    @property
    def keeps_inputs(self) -> bool:
        """Whether the inputs of steps are kept: without checkpoints nothing could come to the step again."""
        return self._config.checkpoint.inputs and self._config.checkpoint.every_steps is not None

    def inputs(self, step: int, taken: KVBatchMeta, batch: KVBatchMeta, **facts: Any) -> StepInputs | None:
        """What is kept of a step that begins to train; None: nothing is.

        Args:
            taken: all its rows. batch: those to train on. facts: other fields of `StepInputs`.
        """
        if not self.keeps_inputs:
            return None
        rows = {key: row for row, key in enumerate(taken.keys)}
        trained = tuple(rows[key] for key in batch.keys)
        return StepInputs(step=step, meta=taken, trained=trained, metrics={}, config=dump(self._config), **facts)

    # ---- going on ----

    def check(self, model_path: str) -> None:
        """Before anything starts: the checkpoint is of this model.

        Raises:
            CheckpointError: it is of another shape.
        """
        if self.goes_on_from and self.goes_on_from.shape != shape_digest(tensor_shapes(model_path)):
            raise CheckpointError(
                f"the checkpoint of step {self.goes_on_from.step} in {self._source.url} is of another model: its tensors have other names "
                "or shapes than those of model.path"
            )

    @contextmanager
    def source(self) -> Iterator[Path | None]:
        """The files of the checkpoint to go on from, checked; None: there is none."""
        if self.goes_on_from is None:
            yield None
            return
        with self._source.fetched(self.goes_on_from) as root:
            yield root

    def best(self) -> Manifest | None:
        """The checkpoint with the highest score; None: none has one."""
        return best_of(self.store)

    def fetched(self, manifest: Manifest) -> AbstractContextManager[Path]:
        """The policy of one of the run's checkpoints."""
        return self.store.fetched(manifest, POLICY)

    def restore_lines(self, root: Path | None) -> None:
        """The run's own files are what they were at the checkpoint; without one, they are gone."""
        if root is not None and self.goes_on_from is not None and not self._directory.journal.exists():
            segments = sorted(name for name in self.goes_on_from.shared if name.startswith(JOURNAL))
            fresh = self._directory.journal.with_name(".journal")
            fresh.write_bytes(b"".join((root / name).read_bytes() for name in segments))
            fresh.replace(self._directory.journal)
        for name in _LINES:
            target = self._directory.root / name
            source = None if root is None or self.goes_on_from is None else root / self.goes_on_from.folder / "run" / name
            if source is not None and source.is_file():
                fresh = target.with_name(f".{name}")
                shutil.copyfile(source, fresh)
                fresh.replace(target)
            else:
                target.unlink(missing_ok=True)
        if root is not None and self.goes_on_from is not None:
            self._take_trackers(root / self.goes_on_from.folder / "run" / _TRACKERS)
        remove(self._directory.inputs, after=self.goes_on_from.step if self.goes_on_from else 0)

    def _take_trackers(self, kept: Path) -> None:
        """The same run goes on in another directory. In its own, what was sent since the checkpoint counts; a fork has none."""
        same = self._source.url == self.store.url and not self._config.resume.startswith("fork:")
        if same and not self._directory.trackers.exists():
            _copy_trackers(kept, self._directory.trackers)

    def restore[S: RunState](self, namespace: str, root: Path, optimizer: Any, state: type[S]) -> S:
        """The actors go on where the checkpoint was taken. Returns the flow's own state.

        Raises:
            CheckpointError: a part is damaged.
        """
        manifest = self.goes_on_from
        assert manifest is not None
        found = self._read_state(root / manifest.folder / _STATE, state)
        reference = reference_of(manifest)
        where = root / reference if reference else None
        restore(namespace, root / manifest.folder, where, optimizer, self._config.checkpoint.timeout_s, self._config.deadlines.cut)
        if manifest.journal:
            self._journal_since = manifest.journal[0] + 1
        if self._source.url == self.store.url:
            self._shared = dict(manifest.shared)
            self.store.withdraw_after(manifest.step)
        else:
            self._shared = {}
            for name in manifest.shared:
                self._shared |= self.store.keep_copy(root / name, name)
        return found

    def _read_state[S: RunState](self, path: Path, state: type[S]) -> S:
        try:
            return state.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{path}: not the state of such a run: {str(error).splitlines()[0]}") from None


def best_of(store: CheckpointStore) -> Manifest | None:
    """The checkpoint with the highest score, of equal ones the earliest; None: none has one."""
    scored = [manifest for step in store.steps() if (manifest := store.at(step)).score is not None]
    return max(scored, key=lambda one: (one.score, -one.step), default=None)


def _copy_trackers(source: Path, target: Path) -> None:
    """Which run of each tracker this is. A file may be replaced meanwhile, and is whole at any time."""
    for path in sorted(source.glob("*.json")):
        target.mkdir(parents=True, exist_ok=True)
        (target / path.name).write_bytes(path.read_bytes())


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
