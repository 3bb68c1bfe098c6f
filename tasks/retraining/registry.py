"""The registry of promoted models: files under one URL, of which no reader ever sees half.

registry/
├── lineage/000001.json      one promotion each, never changed; the highest number is the promoted model
├── models/20250102-.../     Hugging Face directories
├── made/20250102-....json   a mark for each of them, written before it: nothing else in models/ is ever removed
├── current.json             a copy of the newest lineage, for programs that want one fixed name to look at
├── rejected/<attempt>.json  what was tried and not promoted, so that it is not tried again
└── lease/000007.json        who retrains now (lease.py)

promote: mark ─► copy the model ─► see that the lease is held ─► create lineage/N+1 ─► replace current.json ─► remove old models
                                                                  ▲ the promotion: before it the old model is promoted, after it the new one

Creating N+1 fails if there is one: of two runs that trained from N only one can promote. A crash after it leaves current.json one
promotion behind, until `repair`, with which every night begins.
"""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError, field_validator

from actors.inside import inside
from actors.probe import probe
from actors.space import require, written
from actors.storage import Content, Folder, numbered
from configs.base import ConfigError
from tasks.lease import Lease
from tasks.retraining.decision import Scores

_log = logging.getLogger(__name__)
_FIELD = "registry.url"
_CURRENT = "current.json"
_MADE = "made"
_MODEL = re.compile(r"models/\d{8}-\d{6}-[0-9a-f]{8}")


class PromotionConflictError(RuntimeError):
    """Another run promoted a model since this one began: the new model was compared with one that is no longer the promoted one."""


class Attempt(BaseModel, frozen=True, extra="forbid"):
    """A night's training and its outcome.

    Attributes:
        parent: number of the promotion that it was trained from and compared with; None: the training recipe's own model.
        run_id: id of the Prefect flow run. time: end of the evaluation, in UTC and ISO 8601.
        prompts: number of prompts that it was trained on.
        data_hash, config_hash, frozen_hash: SHA-256 of these prompts, of the settings that decide the result, and of the frozen set.
        metric: name of the score that decided. old, new: scores of both models on the frozen set.
        reason: reason of the verdict, with the note of a person who was asked.
    """

    parent: int | None
    run_id: str
    time: str
    prompts: int
    data_hash: str
    config_hash: str
    frozen_hash: str
    metric: str
    old: Scores
    new: Scores
    reason: str


class _Mark(BaseModel, frozen=True, extra="forbid"):
    """Says that the registry made a folder, and so may remove it."""

    model: str

    @field_validator("model")
    @classmethod
    def _is_a_model(cls, model: str) -> str:
        return _model_folder(model)

    @property
    def name(self) -> str:
        return f"{_MADE}/{self.model.rpartition('/')[2]}.json"


class Promotion(Attempt):
    """One entry of the lineage.

    Attributes:
        number: number of the entry, from 1. model: folder of the model, relative to the registry. files: content of its files, by name.
        consumed: content that this model and those before it were trained on, by file under the data URL.
    """

    number: int
    model: str
    files: dict[str, Content]
    consumed: dict[str, Content]

    @field_validator("model")
    @classmethod
    def _model_is_inside(cls, model: str) -> str:
        return _model_folder(model)

    @field_validator("files")
    @classmethod
    def _files_are_inside(cls, files: dict[str, Content]) -> dict[str, Content]:
        for name in files:
            inside(name)
        return files


class Registry:
    """Reads need no lease; `promote` and `reject` take one.

    Raises:
        ConfigError: the URL is of no known kind. So does every method when the URL cannot be reached; it names the field.
    """

    def __init__(self, url: str) -> None:
        self.folder = Folder(url, _FIELD)

    @property
    def lease_folder(self) -> Folder:
        """Where `Lease` keeps its files."""
        return Folder(f"{self.folder.url}/lease", _FIELD)

    def probe(self) -> None:
        """As `actors.probe.probe`, before anything is written."""
        probe(self.folder)

    def current(self) -> Promotion | None:
        """The promoted model, or None before the first."""
        last = self.folder.last("lineage")
        return self.promotion(last) if last else None

    def promotion(self, number: int) -> Promotion:
        """One entry of the lineage.

        Raises:
            ConfigError: there is none of that number, or it is damaged.
        """
        name = _lineage(number)
        content = self.folder.read(name)
        if content is None:
            raise ConfigError(f"{_FIELD}: there is no {self.folder.url}/{name}")
        return self._parse(Promotion, content, name)

    def check_model(self, promotion: Promotion) -> None:
        """See that all files of a promoted model are there, by name and size.

        Raises:
            ConfigError: the model vanished; says which file and what to do.
        """
        for name, file in promotion.files.items():
            path = f"{promotion.model}/{name}"
            found = self.folder.info(path)
            if found is None or found["size"] != file.size:
                what = "is missing" if found is None else f"has {found['size']} bytes instead of {file.size}"
                raise ConfigError(
                    f"{_FIELD}: the promoted model {promotion.number} has vanished: {self.folder.url}/{path} {what}: restore it, "
                    f"or remove {self.folder.url}/{_lineage(promotion.number)} to go back to the model before"
                )

    def fetch(self, promotion: Promotion, scratch: Path) -> Path:
        """A local directory with the model: the registry's own, or a checked copy in `scratch`.

        Raises:
            ConfigError: the model vanished or is damaged.
        """
        self.check_model(promotion)
        if self.folder.local:
            return Path(self.folder.path(promotion.model))
        for name, file in promotion.files.items():
            path = f"{promotion.model}/{name}"
            self.folder.get(path, scratch / name)
            if Content.of_file(scratch / name) != file:
                raise ConfigError(f"{_FIELD}: {self.folder.url}/{path} is damaged: its SHA-256 is not the lineage's")
        return scratch

    def promote(self, candidate: Path, attempt: Attempt, consumed: Mapping[str, Content], lease: Lease, keep: int) -> Promotion:
        """Make the model in the local directory the promoted one.

        Args:
            keep: number of promoted models whose files stay.

        Raises:
            PromotionConflictError: the promoted model is not `attempt.parent` any more. LeaseLostError. ConfigError. NoSpaceError.
        """
        before = attempt.parent or 0
        mark = _Mark(model=f"models/{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}")
        if self.folder.local:
            require(Path(self.folder.root), written(candidate), "the new model")
        self.folder.create(mark.name, _json(mark))
        try:
            files = self._copy(candidate, mark.model)
            promotion = Promotion(**dict(attempt), number=before + 1, model=mark.model, files=files, consumed=dict(consumed))
            lease.check()
        except Exception:
            with suppress(ConfigError):  # the next night removes it
                self._remove(mark)
            raise
        if self.folder.last("lineage") != before or not self.folder.create(_lineage(before + 1), _json(promotion)):
            self._remove(mark)
            raise PromotionConflictError(
                f"another run promoted model {self.folder.last('lineage')} into {self.folder.url} since this one began with model "
                f"{attempt.parent}: this night's model was not promoted"
            )
        self.repair()
        self._prune(keep)
        return promotion

    def reject(self, attempt: Attempt) -> None:
        """Remember that this was tried."""
        self.folder.replace(_rejected(attempt.parent, attempt.data_hash, attempt.config_hash), _json(attempt))

    def rejected(self, parent: int | None, data_hash: str, config_hash: str) -> Attempt | None:
        """The attempt with the same parent, data and configuration that was not promoted, if there was one.

        Raises:
            ConfigError: its file is damaged.
        """
        name = _rejected(parent, data_hash, config_hash)
        content = self.folder.read(name)
        return None if content is None else self._parse(Attempt, content, name)

    def _parse[R: BaseModel](self, kind: type[R], content: bytes, name: str) -> R:
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise ConfigError(f"{_FIELD}: {self.folder.url}/{name} is damaged: {error.errors()[0]['msg']}") from None

    def repair(self) -> None:
        """Bring current.json up to the lineage.

        Raises:
            ConfigError: there is a current.json that no registry has written.
        """
        last, mirror = self.folder.last("lineage"), self.folder.read(_CURRENT)
        if mirror is not None and _parsed(Promotion, mirror) is None:
            raise ConfigError(f"{_FIELD}: {self.folder.url}/{_CURRENT} is no registry's: give the registry a folder of its own")
        content = self.folder.read(_lineage(last)) if last else None
        if content is None:
            self.folder.remove(_CURRENT)
        elif content != mirror:
            self.folder.replace(_CURRENT, content)

    def _copy(self, candidate: Path, model: str) -> dict[str, Content]:
        files = {}
        for path in sorted(path for path in candidate.rglob("*") if path.is_file()):
            name = path.relative_to(candidate).as_posix()
            files[name] = self.folder.put(path, f"{model}/{name}")
        return files

    def _remove(self, mark: _Mark) -> None:
        self.folder.remove(mark.model)
        self.folder.remove(mark.name)

    def _prune(self, keep: int) -> None:
        try:
            last = self.folder.last("lineage")
            kept = {self.promotion(number).model for number in range(max(1, last - keep + 1), last + 1)}
            for name in self.folder.names(_MADE):
                mark = _parsed(_Mark, self.folder.read(f"{_MADE}/{name}") or b"")
                if mark is not None and mark.name == f"{_MADE}/{name}" and mark.model not in kept:
                    self._remove(mark)
        except Exception:  # noqa: BLE001  (a store that lets nobody remove old models ends no night)
            _log.warning("old models of %s could not be removed", self.folder.url, exc_info=True)


def why_skip(new: int, at_least: int, url: str, parent: int | None, tried: Attempt | None) -> str | None:
    """Why a night need not train, or None.

    Args:
        new: number of prompts under the URL that no promoted model was trained on.
        tried: the same attempt of an earlier night, not promoted.
    """
    since = "" if parent is None else f" since model {parent}"
    if new == 0:
        return f"nothing new under {url}{since}"
    if new < at_least:
        return f"{new} new prompts under {url}{since}; data.min_prompts is {at_least}"
    if tried is not None:
        return f"nothing new under {url} since {tried.time}, when the same was tried and not promoted ({tried.reason})"
    return None


def _model_folder(name: str) -> str:
    if not _MODEL.fullmatch(name):
        raise ValueError(f"{name!r} is no folder of a promoted model")
    return name


def _parsed[M: BaseModel](record: type[M], content: bytes) -> M | None:
    try:
        return record.model_validate_json(content)
    except ValidationError:
        return None


def _lineage(number: int) -> str:
    return f"lineage/{numbered(number)}"


def _rejected(parent: int | None, data_hash: str, config_hash: str) -> str:
    return f"rejected/{hashlib.sha256(f'{parent}/{data_hash}/{config_hash}'.encode()).hexdigest()[:32]}.json"


def _json(record: BaseModel) -> bytes:
    return record.model_dump_json(indent=2).encode()
