"""What a run goes on from: the checkpoint, and the directory that the run before has begun.

resume: auto            a try of the same flow run before (Prefect's retry, or an automation's), else what `checkpoint.url` holds
        RUN directory   its newest checkpoint; the run goes on in that directory
        ../step-N.json  that checkpoint; the run gets a directory of its own unless it is the newest
        URL             the newest checkpoint there
        fork:WHERE      one of these, of a run with other settings; in a directory of its own
        never           a new run
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from actors.checkpoints.manifest import Manifest, step_of
from actors.checkpoints.store import CheckpointStore
from configs.base import ConfigError
from configs.continuity import differences
from configs.run import BaseRunConfig
from tasks.reporting.run_dir import RunDirectory

_MARK = "run.json"


class Mark(BaseModel):
    """run.json: which flow run a directory belongs to, and where its checkpoints are.

    Attributes:
        step: of the checkpoint that the last start went on from; None: it began.
        starts: of the flow run from that checkpoint: more than one when its process died before the next.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    flow_run: str
    checkpoints: str
    step: int | None = None
    starts: int = 1

    def write(self, directory: RunDirectory) -> None:
        """Into the run's directory."""
        (directory.root / _MARK).write_text(self.model_dump_json() + "\n")

    @classmethod
    def read(cls, root: Path) -> Mark | None:
        """None: no directory of a run."""
        try:
            return cls.model_validate_json((root / _MARK).read_bytes())
        except (OSError, ValidationError):
            return None


@dataclass(frozen=True)
class Origin:
    """Where a run goes on.

    Attributes:
        manifest: of the checkpoint; None: the try before died without one, and the run begins again in its directory.
        directory: of the run before, to go on in; None: a new one.
    """

    store: CheckpointStore
    manifest: Manifest | None
    directory: RunDirectory | None

    @property
    def step(self) -> int | None:
        """Of the checkpoint."""
        return self.manifest.step if self.manifest else None

    def starts(self, flow_run: str) -> int:
        """How often the flow run has started from here, this time included."""
        before = Mark.read(self.directory.root) if self.directory else None
        return before.starts + 1 if before and (before.flow_run, before.step) == (flow_run, self.step) else 1


def origin_of(config: BaseRunConfig, flow_run: str, scratch: Path) -> Origin | None:
    """What this run goes on from; None: it is a new one.

    Args:
        flow_run: its id. scratch: local directory for files of remote checkpoints.

    Raises:
        ConfigError: nothing is there to resume, or it was another run (other settings, another flow).
        CheckpointError: a manifest is damaged.
    """
    if config.resume == "never":
        return None
    # Also of a run that names where it began: a second try of it goes on from its own checkpoints.
    own = _own_try_before(config, flow_run, scratch)
    if own is not None and own.manifest is not None:
        return _checked(own, config)
    found = _elsewhere(config, scratch)
    if found is None:
        return own
    return _checked(replace(found, directory=own.directory) if own else found, config)


def _own_try_before(config: BaseRunConfig, flow_run: str, scratch: Path) -> Origin | None:
    """The directory of the same flow run with the newest checkpoint, or with none."""
    found: Origin | None = None
    for root in sorted(Path(config.output_dir).resolve().glob("*")):
        mark = Mark.read(root)
        if mark is None or mark.flow_run != flow_run or root.is_symlink():
            continue
        store = CheckpointStore(mark.checkpoints, scratch, config.checkpoint.timeout_s)
        one = Origin(store, store.newest(), RunDirectory(root))
        if found is None or (one.step is not None and (found.step is None or one.step >= found.step)):
            found = one
    return found


def _elsewhere(config: BaseRunConfig, scratch: Path) -> Origin | None:
    """What `resume` names, or `checkpoint.url` holds."""
    if config.resume != "auto":
        found = _named(config.resume.removeprefix("fork:"), scratch, config.checkpoint.timeout_s)
        return replace(found, directory=None) if config.resume.startswith("fork:") else found
    if config.checkpoint.url is None:
        return None
    store = CheckpointStore(config.checkpoint.url, scratch, config.checkpoint.timeout_s)
    newest = store.newest()
    return Origin(store, newest, None) if newest else None


def _checked(found: Origin, config: BaseRunConfig) -> Origin:
    """The origin, when its run was of the same flow with the same settings."""
    assert found.manifest is not None
    if found.manifest.flow != config.flow:
        raise ConfigError(f"resume: {found.store.url} holds checkpoints of the flow {found.manifest.flow!r}, this is {config.flow!r}")
    if config.resume.startswith("fork:"):
        return found
    if changed := differences(found.manifest.config, config.model_dump(mode="json")):
        raise ConfigError(
            f"resume: the run before had other settings ({'; '.join(changed[:5])}): keep them, start a new run (resume=never), "
            "or let a child run go its own way (python -m flows.fork)"
        )
    return found


def _named(where: str, scratch: Path, timeout_s: float) -> Origin:
    url, _, last = where.rstrip("/").rpartition("/")
    step = step_of(last)
    if step is None:
        url = where.rstrip("/")
    root = _run_directory(url)
    mark = Mark.read(root) if root is not None else None
    store = CheckpointStore(mark.checkpoints if mark else url, scratch, timeout_s)
    newest = store.newest()
    if newest is None:
        raise ConfigError(f"resume: {where} holds no checkpoint (nor is it the directory of a run that has one)")
    manifest = newest if step is None else store.at(step)
    goes_on = root is not None and manifest.step == newest.step
    return Origin(store, manifest, RunDirectory(root) if goes_on and root is not None else None)


def _run_directory(url: str) -> Path | None:
    """The local run directory that the URL is, or whose checkpoints it is."""
    if "://" in url and not url.startswith("file://"):
        return None
    path = Path(url.removeprefix("file://")).resolve()
    return next((one for one in (path, path.parent) if Mark.read(one) is not None), None)
