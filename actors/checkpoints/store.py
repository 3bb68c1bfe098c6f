"""Where a run's checkpoints are kept: a folder behind an fsspec URL.

    draft(step) ──► a local directory, filled by the parts of the run ──► publish: digests ─► upload ─► manifest, last
    newest, at ──► manifest ──► fetched: a local directory whose files are those that were written

A crash at any byte leaves what was published before as it was: each attempt has a folder of its own, and the manifest names it.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoints.errors import CheckpointError
from actors.checkpoints.manifest import Manifest, kept, manifest_name, step_of
from actors.probe import probe
from actors.storage import Content, DamagedError, Folder
from configs.base import ConfigError
from configs.checkpoint import CheckpointConfig

_DATA, _SHARED = "data", "reference"
_DRAFT = re.compile(_DATA + r"/step-\d{6,}-[0-9a-f]{8}")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        directory: local, for the parts to write into. folder: its name below the URL.
    """

    step: int
    directory: Path
    folder: str


class CheckpointStore:
    """One folder of checkpoints. One process writes it; it need not exist before the first draft.

    Args:
        scratch: local directory for drafts of a store that is not local.

    Raises:
        ConfigError: the URL cannot be used. Every method raises it when the store cannot be reached.
    """

    def __init__(self, url: str, scratch: Path, timeout_s: float | None = None) -> None:
        self._folder = Folder(url, "checkpoint.url", timeout_s)
        self._scratch = Path(self._folder.root) if self._folder.local else scratch

    @property
    def url(self) -> str:
        """Of the folder."""
        return self._folder.url

    @property
    def directory(self) -> Path | None:
        """Of a store on this machine; None: it is elsewhere."""
        return Path(self._folder.root) if self._folder.local else None

    def probe(self) -> None:
        """As `actors.probe.probe`."""
        probe(self._folder)

    # ---- writing ----

    def draft(self, step: int) -> Draft:
        """A new, empty directory for the checkpoint after `step` steps."""
        folder = f"{_DATA}/{Path(manifest_name(step)).stem}-{uuid.uuid4().hex[:8]}"
        directory = self._scratch / folder
        directory.mkdir(parents=True)
        return Draft(step, directory, folder)

    def keep(self, directory: Path, name: str) -> dict[str, Content]:
        """Keep a local directory's files for several checkpoints, as `reference/name`. Returns them by their names below the URL."""
        files = _files(directory)
        for file in files:
            self._folder.put(directory / file, f"{_SHARED}/{name}/{file}")
        return {f"{_SHARED}/{name}/{file}": content for file, content in files.items()}

    def keep_file(self, name: str, content: bytes) -> dict[str, Content]:
        """Keep a file for several checkpoints, under this name below the URL."""
        self._folder.replace(name, content)
        return {name: Content.of(content)}

    def keep_copy(self, source: Path, name: str) -> dict[str, Content]:
        """As `keep_file`, of a local file, which may be large."""
        return {name: self._folder.put(source, name)}

    def mirror(self, directory: Path, name: str) -> None:
        """Copy a Hugging Face directory to `name` below the URL, in place of what is there; config.json last: nothing loads one without.

        Raises:
            ConfigError: the store cannot be reached.
        """
        self._folder.remove(name)
        for file in sorted(_files(directory), key=lambda file: (file == "config.json", file)):
            self._folder.put(directory / file, f"{name}/{file}")

    def publish(self, draft: Draft, manifest: Manifest, rules: CheckpointConfig) -> Manifest:
        """Make the draft a checkpoint, and remove those that need not stay.

        Args:
            manifest: without files; they are those of the draft's directory.

        Raises:
            CheckpointError: the draft lacks files, or the step has a checkpoint of another writer.
        """
        files = _files(draft.directory)
        if not files:
            raise CheckpointError(f"{draft.directory}: the checkpoint of step {draft.step} has no files")
        if self._folder.local:
            self._folder.sync(draft.directory)
        else:
            for name in files:
                self._folder.put(draft.directory / name, f"{draft.folder}/{name}")
            shutil.rmtree(draft.directory)
        whole = manifest.model_copy(update={"folder": draft.folder, "files": files})
        if not self._folder.create(whole.name, whole.model_dump_json(indent=1).encode()):
            raise CheckpointError(
                f"{self.url}/{whole.name} was written by another run meanwhile: give each run a checkpoint.url of its own"
            )
        self._tidy(rules)
        return whole

    def discard(self, draft: Draft) -> None:
        """Remove what there is of a draft, unless it has become a checkpoint. Never raises: what stays is no checkpoint."""
        try:
            if draft.step not in self.steps() or self.at(draft.step).folder != draft.folder:
                shutil.rmtree(draft.directory, ignore_errors=True)
                self._folder.remove(draft.folder)
        except (CheckpointError, ConfigError):
            return

    def remove_drafts(self) -> None:
        """Remove what killed writers have left of drafts. For the one writer, before its first draft."""
        try:
            named = {self.at(step).folder for step in self.steps()}
        except CheckpointError:
            return  # a manifest that cannot be read may name any of them
        for folder in {f"{_DATA}/{name.partition('/')[0]}" for name in self._folder.names(_DATA)}:
            if _DRAFT.fullmatch(folder) and folder not in named:
                self._folder.remove(folder)

    def withdraw_after(self, step: int) -> None:
        """Remove checkpoints of later steps: the run goes on from `step`, and will come to them again."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    # ---- reading ----

    def steps(self) -> list[int]:
        """The steps that have a manifest, ascending."""
        return sorted(step for name in self._folder.names() if (step := step_of(name)) is not None)

    def at(self, step: int) -> Manifest:
        """The checkpoint after `step` steps.

        Raises:
            CheckpointError: there is none, or its manifest is damaged; names those that there are.
        """
        content = self._folder.read(manifest_name(step))
        if content is None:
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.url}: no checkpoint after step {step} (there are: {there})")
        manifest = Manifest.parse(content, f"{self.url}/{manifest_name(step)}")
        if manifest.step != step:
            raise CheckpointError(f"{self.url}/{manifest_name(step)} is the manifest of step {manifest.step}: it was renamed")
        return manifest

    def newest(self) -> Manifest | None:
        """The checkpoint of the highest step; None: there is none yet."""
        steps = self.steps()
        return self.at(steps[-1]) if steps else None

    @contextmanager
    def fetched(self, manifest: Manifest, *parts: str) -> Iterator[Path]:
        """A local directory with these parts of a checkpoint (all, if none is named), checked against the manifest.

        Shared files lie under their names below the URL, in the same directory as `manifest.folder`: the yielded path is that of the URL.

        Raises:
            CheckpointError: a file is missing, cut off, or another than the one that was written; names it.
        """
        wanted = dict(manifest.shared)
        for part in parts or {name.partition("/")[0] for name in manifest.files}:
            wanted |= manifest.of(part)
        try:
            with self._folder.fetched(wanted) as root:
                yield root
        except DamagedError as error:
            raise CheckpointError(f"the checkpoint of step {manifest.step} cannot be used: {error}") from error

    # ---- inside ----

    def _tidy(self, rules: CheckpointConfig) -> None:
        scores = {step: self.at(step).score for step in self.steps()}
        stay = kept(scores, last=rules.keep_last, every=rules.keep_every, best=rules.keep_best)
        for step in scores.keys() - stay:
            self._remove(step)

    def _remove(self, step: int) -> None:
        folder = self.at(step).folder
        self._folder.remove(manifest_name(step))  # first: what has a manifest is whole
        self._folder.remove(folder)


def _files(directory: Path) -> dict[str, Content]:
    return {str(path.relative_to(directory)): Content.of_file(path) for path in sorted(directory.rglob("*")) if path.is_file()}
