"""The journal of a run: every transition of its ledger, one line each, in a chain of hashes. Only ever appended to.

    {"n":7,"time":1764021600.125,"kind":"claimed","uid":"0.12","version":3,"prev":"<hash of line 6>","hash":"<SHA-256>"}

A line's hash is that of its own text before `,"hash":`; so a line fixes every line before it. A line has exactly the text that this module
writes: whatever else stands there is an error. `audit.py` says what the lines prove.

    Began ── transitions ── Cut ── transitions ── Resumed(after that Cut), Began ── transitions ── Finished
                                   └ void: what they did was undone

Lines reach the operating system with each call of the ledger, and the disk with each Cut.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from actors.rollout.transitions import Admitted, Announced, Cancelled, Claimed, Committed, Ended, Reissued, Released, Transition


class JournalError(RuntimeError):
    """A journal cannot be read or written, or is not as it was written. The message names the file, and the line if it is one."""


@dataclass(frozen=True)
class Began:
    """The first line, and the one after a Resumed when the run goes on with other settings.

    Attributes:
        run: id of the flow run. config: digest of its configuration. sampler: name of the staleness sampler. max_age: its bound, in weight
            versions. groups_per_step: prompt groups of one step. version: weight version of the ledger.
    """

    run: str
    config: str
    sampler: str
    max_age: int
    groups_per_step: int
    version: int


@dataclass(frozen=True)
class Stored:
    """`Committed`, of whose rows the journal keeps the keys."""

    uid: str
    keys: tuple[str, ...]
    start_version: int
    end_version: int


@dataclass(frozen=True)
class Cut:
    """A checkpoint holds the ledger as it is here. `version`: the ledger's; that of the checkpoint's weights is announced after it."""

    step: int
    checkpoint: str
    version: int


@dataclass(frozen=True)
class Resumed:
    """The run goes on from a checkpoint: it is as if this line followed its Cut. Others are void, unless a later Resumed goes back to them.

    Attributes:
        after: number of the Cut's line; 0, with no `checkpoint`, for the run's beginning. why: for a person.
    """

    after: int
    checkpoint: str
    why: str


@dataclass(frozen=True)
class Finished:
    """The ledger was closed; nothing follows but a Resumed."""


Record = Began | Admitted | Reissued | Stored | Cancelled | Claimed | Released | Ended | Announced | Cut | Resumed | Finished
_KINDS: dict[str, type[Record]] = {
    "began": Began, "admitted": Admitted, "reissued": Reissued, "committed": Stored, "cancelled": Cancelled, "claimed": Claimed,
    "released": Released, "ended": Ended, "announced": Announced, "cut": Cut, "resumed": Resumed, "finished": Finished,
}  # fmt: skip
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # once: json.dumps makes one for each line
_NAMES = {kind: name for name, kind in _KINDS.items()}
_ADAPTERS: dict[str, TypeAdapter[Record]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class Line:
    """One line. `n`: its number, from 0. `time`: Unix time in seconds. `prev`: hash of the line before; empty for the first."""

    n: int
    time: float
    record: Record
    prev: str

    @property
    def kind(self) -> str:
        """Name of the record's type in the file."""
        return _NAMES[type(self.record)]

    def encoded(self) -> tuple[bytes, str]:
        """The line as it stands in the file, with its line end; and its hash."""
        # vars, not asdict: that copies deeply, at ten times the cost.
        fields = {"n": self.n, "time": self.time, "kind": self.kind, **vars(self.record), "prev": self.prev}
        body = _JSON.encode(fields)[:-1]
        digest = hashlib.sha256(body.encode()).hexdigest()
        return f'{body},"hash":"{digest}"}}\n'.encode(), digest


@dataclass(frozen=True)
class Contents:
    """What a journal's bytes hold.

    Attributes:
        lines: as far as they verify. hashes: of each.
        damage: number of the first line that does not verify, and why; None: all do.
        torn: bytes of an unfinished last line, which whoever wrote it never relied on.
    """

    lines: tuple[Line, ...]
    hashes: tuple[str, ...]
    damage: tuple[int, str] | None
    torn: int


def parse(content: bytes) -> Contents:
    """The lines of a journal, verified up to the first that is not as it was written. Raises nothing."""
    *whole, tail = content.split(b"\n")
    lines: list[Line] = []
    hashes: list[str] = []
    for n, text in enumerate(whole):
        try:
            line, digest = _line(text, n, hashes[-1] if hashes else "")
        except (ValueError, RecursionError) as error:
            return Contents(tuple(lines), tuple(hashes), (n, str(error)), len(tail))
        lines.append(line)
        hashes.append(digest)
    return Contents(tuple(lines), tuple(hashes), None, len(tail))


def _line(text: bytes, n: int, prev: str) -> tuple[Line, str]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise ValueError("it is no line of a journal")
    given, kind = found.pop("hash", None), found.pop("kind")
    number, moment, before = found.pop("n", None), found.pop("time", None), found.pop("prev", None)
    if number != n:
        raise ValueError(f"its number is {number!r:.40}: lines are missing, doubled or in another order")
    if kind not in _ADAPTERS:
        raise ValueError(f"unknown kind {kind!r:.40}")
    if before != prev:
        raise ValueError("it does not follow from the line before: one of the two was changed")
    try:
        line = Line(n, moment, _ADAPTERS[kind].validate_python(found), prev)
        encoded, digest = line.encoded()
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{kind}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError):
        raise ValueError(f"{kind}: it has a value that no journal holds") from None
    if hashlib.sha256(text.rpartition(b',"hash":')[0]).hexdigest() != given:
        raise ValueError("its hash is not that of its text: it was changed")
    # Also what means the same (spaces, more fields, "3" for 3) was not written here.
    if encoded != text + b"\n" or type(moment) is not float:
        raise ValueError(f"{kind}: it is not written as a journal writes it")
    return line, digest


@dataclass(frozen=True)
class Opening:
    """How a ledger begins its journal, or goes on with it.

    Attributes:
        path: of the file. run, config: as in Began.
        back: number and hash of the Cut's line that the run goes on from, as the checkpoint's manifest has them; None: it begins (again).
        why: it goes back, for a person.
    """

    path: Path
    run: str
    config: str
    back: tuple[int, str] | None = None
    why: str = ""


class Journal:
    """A journal that is being written, by this process alone. `open` makes one. Not safe for several threads at once.

    Attributes:
        torn: bytes of an unfinished last line that were cut off when it was opened.
    """

    def __init__(self, path: Path, descriptor: int, contents: Contents, clock: Callable[[], float]) -> None:
        self.torn = contents.torn
        self._path, self._descriptor, self._clock = path, descriptor, clock
        self._n, self._hash = 0, ""
        self._starts: dict[int, tuple[str, str, int]] = {}  # by number, hash, checkpoint and version of the first line and of all cuts
        self._segments: dict[int, int] = {0: 0}  # offsets of the first line and of those that follow a cut, by number
        self._closed_at = 0  # offset behind the newest cut
        self._broken = ""
        self._size = 0
        for line in contents.lines:
            self._note(line, *line.encoded())

    @classmethod
    def open(cls, path: Path, clock: Callable[[], float] = time.time) -> Journal:
        """Begin a journal, or go on with one. An unfinished last line (the writer died) is cut off: see `torn`.

        Args:
            clock: Unix time, in seconds.

        Raises:
            JournalError: another process writes it, it cannot be read or written, or a line is not as it was written.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(f"{path}: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
            content = path.read_bytes()
            contents = parse(content)
            if contents.damage is not None:
                raise JournalError(f"{path}, line {contents.damage[0]}: {contents.damage[1]}")
            os.ftruncate(descriptor, len(content) - contents.torn)
            return cls(path, descriptor, contents, clock)
        except BaseException as error:
            os.close(descriptor)
            if not isinstance(error, OSError):
                raise
            raise JournalError(f"{path}: {'another process writes it' if isinstance(error, BlockingIOError) else error}") from error

    def __len__(self) -> int:
        """Lines so far."""
        return self._n

    @property
    def head(self) -> tuple[int, str]:
        """Number and hash of the last line; the hash fixes the whole journal up to it. (-1, "") if there is none."""
        return self._n - 1, self._hash

    def append(self, *records: Record | Transition) -> None:
        """Write these lines. They are with the operating system when it returns.

        Raises:
            JournalError: they could not be written whole. From then on nothing can be: the ledger has made changes that are not here.
        """
        if self._broken:
            raise JournalError(self._broken)
        now, prev = round(float(self._clock()), 3), self._hash
        made = []
        for n, record in enumerate(records, self._n):
            line = Line(n, now, as_record(record), prev)
            text, prev = line.encoded()
            made.append((line, text, prev))
        try:
            _write(self._descriptor, b"".join(text for _, text, _ in made))
        except OSError as error:
            self._broken = f"{self._path}, line {self._n}: it could not be written ({error})"
            raise JournalError(self._broken) from error
        for line, text, digest in made:
            self._note(line, text, digest)

    def record(self, changes: Sequence[Transition]) -> None:
        """The ledger's callback."""
        self.append(*changes)

    def cut(self, step: int, checkpoint: str, version: int) -> tuple[int, str]:
        """Append a Cut, and wait until all lines are on the disk. Returns `head`, for the checkpoint's manifest.

        Raises:
            JournalError: see `append`.
        """
        self.append(Cut(step, checkpoint, version))
        self._sync()
        return self.head

    def begin(self, opening: Opening, began: Began) -> None:
        """Append the Began of a new journal; or a Resumed after the line that `opening` names, and a Began.

        Args:
            began: its version is that of a new journal; after a resume, the Cut's counts.

        Raises:
            JournalError: the journal has no such Cut; or see `append`.
        """
        if opening.back is None and not self._n:
            self.append(began)
            return
        after, digest = opening.back or (0, self._starts[0][0])
        known = self._starts.get(after)
        if known is None or known[0] != digest:
            where = f"{self._path}: the checkpoint to go on from was made after line {after}"
            raise JournalError(f"{where}, which is {'not here' if known is None else 'another one here'}: this is not its journal")
        _, checkpoint, version = known
        self.append(Resumed(after, checkpoint, opening.why), replace(began, version=version))

    def segment(self, since: int) -> bytes:
        """The lines from number `since` up to the newest Cut. Empty: there is no Cut since then.

        All segments, joined, are the journal up to that Cut.

        Args:
            since: 0, or the number of the line that follows a Cut.

        Raises:
            JournalError: no segment begins there, or the file cannot be read.
        """
        if since not in self._segments:
            raise JournalError(f"{self._path}: no segment begins at line {since}: one begins at the first line, and after each cut")
        try:
            return os.pread(self._descriptor, max(0, self._closed_at - self._segments[since]), self._segments[since])
        except OSError as error:
            raise JournalError(f"{self._path}: {error}") from error

    def close(self) -> None:
        """All lines are on the disk, and another process may go on with the journal. Idempotent."""
        if self._descriptor >= 0:
            try:
                self._sync()
            finally:
                os.close(self._descriptor)
                self._descriptor, self._broken = -1, f"{self._path}: it was closed"

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._broken = f"{self._path}: it could not be brought to the disk ({error})"
            raise JournalError(self._broken) from error

    def _note(self, line: Line, text: bytes, digest: str) -> None:
        self._n, self._hash = line.n + 1, digest
        self._size += len(text)
        match line.record:
            case Began(version=version) if line.n == 0:
                self._starts[0] = digest, "", version
            case Cut(_, checkpoint, version):
                self._starts[line.n] = digest, checkpoint, version
                self._segments[self._n] = self._closed_at = self._size


def as_record(record: Record | Transition) -> Record:
    """What the journal keeps of it."""
    if isinstance(record, Committed):
        return Stored(record.uid, record.meta.keys, record.start_version, record.end_version)
    return record


def _write(descriptor: int, text: bytes) -> None:
    while text:
        text = text[os.write(descriptor, text) :]
