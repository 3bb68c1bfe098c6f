"""What a journal proves: each prompt group ever drawn was trained once, or dropped with a reason, and never beyond the bound. Pure.

    lines ──► those that no Resumed made void ──► the ledger's rules, replayed ──► Audit: verdict, counts, first line that fails

Checked on the surviving line: the hashes; that a group is admitted once, stored only when in flight, claimed only when stored, trained only
when claimed, and ends once; that keys are new for each attempt; that versions and steps grow; that a claimed group is as young as the
sampler promises; that a finished run left nothing open. Void lines are only counted: what they did was undone.

The replay knows the rules from the transitions' descriptions, not from ledger.py: two programs must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.rollout.journal import Began, Contents, Cut, Finished, Line, Resumed, Stored
from actors.rollout.transitions import Admitted, Announced, Cancelled, Claimed, Ended, Reissued, Released

# From which states a group may end so; `dropped/end`, when the run ends, from any.
_ENDS = {
    "trained": ("claimed",),
    "failed": ("in flight",),
    "evicted": ("in flight", "cancelled", "stored", "claimed"),
    "dropped": ("stored", "claimed"),
}


@dataclass(frozen=True)
class Problem:
    """The first line where something fails. `line`: its number, from 0."""

    line: int
    why: str


@dataclass(frozen=True)
class Voided:
    """What one Resumed undid.

    Attributes:
        line: number of the Resumed. checkpoint, why: its own. lines: how many it made void. groups: how many groups they tell of.
        trained: groups trained there. versions: weight versions of those steps.
    """

    line: int
    checkpoint: str
    why: str
    lines: int
    groups: int
    trained: int
    versions: tuple[int, ...]


@dataclass(frozen=True)
class Audit:
    """The verdict, and what stands behind it.

    Attributes:
        began: the settings that held last; None: there is no line. lines, surviving: number of lines, and of those that are not void.
        problem: None: nothing failed. The counts are then those up to the line before it.
        admitted: groups drawn. ends: how many ended how. open: how many have not ended, by state. reissued: issued again after a resume.
        ages: how many trained groups had which age when they were claimed, in weight versions. version: announced last.
        cuts: checkpoints. voided: what each resume undid. finished: the run closed its ledger. torn: bytes of an unfinished last line.
    """

    began: Began | None
    lines: int
    surviving: int
    problem: Problem | None
    admitted: int
    ends: Mapping[str, int]
    open: Mapping[str, int]
    reissued: int
    ages: Mapping[int, int]
    version: int
    cuts: int
    voided: tuple[Voided, ...]
    finished: bool
    torn: int

    @property
    def clean(self) -> bool:
        """Nothing failed."""
        return self.problem is None

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.problem is not None:
            return f"FAILED at line {self.problem.line}: {self.problem.why}"
        trained, held = self.ends.get("trained", 0), sum(self.open.values())
        rest = f", {held} open: the run has not finished" if held else ""
        return f"clean: of {self.admitted} groups, {trained} trained once, {sum(self.ends.values()) - trained} ended with a reason{rest}"

    def counts(self) -> list[tuple[str, int]]:
        """What became of the groups drawn, as the rows of a table: trained, the other ends, then what is open."""
        trained = [("trained", self.ends.get("trained", 0))]
        others = sorted((how, number) for how, number in self.ends.items() if how != "trained")
        return [
            ("admitted", self.admitted),
            *trained,
            *others,
            *((f"open: {state}", number) for state, number in sorted(self.open.items())),
        ]


def audit(contents: Contents, anchors: Iterable[tuple[int, str]] = ()) -> Audit:
    """Judge a journal.

    Args:
        anchors: (number, hash) of lines as kept elsewhere: the manifests of checkpoints have those of their cuts.
    """
    lines, breaks = _anchored(contents, anchors)
    surviving, voided, problem = _surviving(lines)
    problem = problem or breaks  # it is of an earlier line
    replay, began = _Replay(), True
    for line in surviving:
        if problem is not None and line.n >= problem.line:
            break
        if why := replay.step(line, first=began):
            problem = Problem(line.n, why)
            break
        began = isinstance(line.record, Resumed)
    if problem is None and not lines:
        problem = Problem(0, "there is no line")
    return Audit(
        began=replay.began, lines=len(lines), surviving=len(surviving), problem=problem, admitted=len(replay.seen), ends=dict(replay.ends),
        open=dict(Counter(group.state for group in replay.groups.values())), reissued=replay.reissued,
        ages=dict(sorted(replay.ages.items())), version=replay.version, cuts=replay.cuts, voided=voided, finished=replay.finished,
        torn=contents.torn,
    )  # fmt: skip


def _anchored(contents: Contents, anchors: Iterable[tuple[int, str]]) -> tuple[tuple[Line, ...], Problem | None]:
    found = [Problem(*contents.damage)] if contents.damage else []
    for n, digest in anchors:
        if n >= len(contents.lines):
            if not contents.damage:
                found.append(Problem(len(contents.lines), f"the journal ends here, and a checkpoint knows its line {n}"))
        elif contents.hashes[n] != digest:
            found.append(Problem(n, "a checkpoint knows this line with another hash: it, or one before it, was changed"))
    first = min(found, key=lambda problem: problem.line, default=None)
    return contents.lines if first is None else contents.lines[: first.line], first


def _surviving(lines: Sequence[Line]) -> tuple[list[Line], tuple[Voided, ...], Problem | None]:
    """The lines that lead to the last one, up to one that resumes from where it cannot."""
    kept: list[Line] = []
    voided: list[Voided] = []
    for line in lines:
        if isinstance(line.record, Resumed):
            after, checkpoint = line.record.after, line.record.checkpoint
            if not 0 <= after < line.n or not _returns(lines[after], checkpoint):
                what = f"the cut of checkpoint {checkpoint!r}" if checkpoint else "the run's beginning"
                return kept, tuple(voided), Problem(line.n, f"it resumes after line {after}, which is not {what}")
            before, kept = kept, _path(lines, after)
            still = {one.n for one in kept}
            voided.append(_voided(line.n, line.record, [one for one in before if one.n not in still]))
        kept.append(line)
    return kept, tuple(voided), None


def _path(lines: Sequence[Line], n: int) -> list[Line]:
    """The lines that lead to line `n`, and it."""
    found = []
    while n >= 0:
        line = lines[n]
        found.append(line)
        n = line.record.after if isinstance(line.record, Resumed) else n - 1
    return found[::-1]


def _returns(line: Line, checkpoint: str) -> bool:
    if not checkpoint:
        return line.n == 0 and isinstance(line.record, Began)
    return isinstance(line.record, Cut) and line.record.checkpoint == checkpoint


def _voided(n: int, record: Resumed, lines: list[Line]) -> Voided:
    told = {line.record.uid for line in lines if not isinstance(line.record, Began | Announced | Cut | Resumed | Finished)}
    trained = {line.record.uid for line in lines if isinstance(line.record, Ended) and line.record.how == "trained"}
    versions = {line.record.version for line in lines if isinstance(line.record, Claimed) and line.record.uid in trained}
    return Voided(n, record.checkpoint, record.why, len(lines), len(told), len(trained), tuple(sorted(versions)))


@dataclass
class _Group:
    """One that has not ended. `how`: of its Cancelled. `line`: of its last change. `age`: when it was claimed."""

    keys: tuple[str, ...]
    start: int
    target: int | None
    state: str = "in flight"
    attempt: int = 0
    how: str = ""
    line: int = 0
    age: int = 0


@dataclass
class _Replay:
    """The surviving line up to some point. `step` says why a line cannot follow; empty: it can, and was counted."""

    began: Began | None = None
    version: int = 0
    groups: dict[str, _Group] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    ends: Counter[str] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    reissued: int = 0
    cuts: int = 0
    cut_step: int = 0
    finished: bool = False

    def step(self, line: Line, first: bool) -> str:
        """Args: first: it is the first line, or follows a Resumed."""
        record = line.record
        if self.finished:  # a Resumed has made that void
            return "the ledger was closed before"
        match record:
            case Began():
                return self._begin(record, first)
            case _ if self.began is None:
                return f"the journal begins with {line.kind}, not with began"
            case Resumed():
                return ""
            case Admitted():
                return self._admit(record, line.n)
            case Announced(version):
                why = f"weight version {version} after {self.version}" if version <= self.version else ""
                self.version = max(version, self.version)
                return why
            case Cut():
                return self._cut(record)
            case Finished():
                self.finished = True
                lost = next((f"{uid!r} is {held.state} since line {held.line}" for uid, held in self.groups.items()), "")
                return f"finished, and group {lost}: it was lost" if lost else ""
        group = self.groups.get(record.uid)
        if group is None:
            what = "has ended before" if record.uid in self.seen else "was never admitted"
            return f"{line.kind}: group {record.uid!r} {what}"
        why = self._change(record, group)
        group.line = line.n
        return f"{line.kind}: group {record.uid!r}{why}" if why else ""

    def _begin(self, record: Began, first: bool) -> str:
        if not first:
            return "began again, without a resume"
        if self.began is not None and record.version != self.version:
            return f"began at weight version {record.version}, and the resumed ledger has {self.version}"
        self.began, self.version = record, record.version
        return ""

    def _admit(self, record: Admitted, n: int) -> str:
        who = f"admitted: group {record.uid!r}"
        if record.uid in self.seen:
            return f"{who} was admitted before"
        if record.version != self.version:
            return f"{who} for weight version {record.version}, and the ledger is at {self.version}"
        if why := self._mint(record.keys):
            return f"{who}{why}"
        self.seen.add(record.uid)
        self.groups[record.uid] = _Group(record.keys, record.version, record.target_version, line=n)
        return ""

    def _mint(self, keys: tuple[str, ...]) -> str:
        if not keys or len(set(keys)) < len(keys):
            return " has no keys, or one twice"
        if old := self.keys.intersection(keys):
            return f" has key {min(old)!r}, which is not new"
        self.keys.update(keys)
        return ""

    def _cut(self, record: Cut) -> str:
        if record.version != self.version:
            return f"checkpoint {record.checkpoint!r} at weight version {record.version}, and the ledger is at {self.version}"
        if record.step < self.cut_step:
            return f"checkpoint {record.checkpoint!r} is of step {record.step}, after one of step {self.cut_step}"
        self.cut_step, self.cuts = record.step, self.cuts + 1
        return ""

    def _change(self, record: Reissued | Stored | Cancelled | Claimed | Released | Ended, group: _Group) -> str:
        needed = {Reissued: "in flight", Stored: "in flight", Cancelled: "in flight", Claimed: "stored", Released: "claimed"}
        if not isinstance(record, Ended) and group.state != needed[type(record)]:
            return f" is {group.state} since line {group.line}, not {needed[type(record)]}"
        match record:
            case Reissued(_, keys, version, attempt):
                if attempt != group.attempt + 1:
                    return f": attempt {attempt} after {group.attempt}"
                if why := self._mint(keys):
                    return why
                group.keys, group.start, group.attempt = keys, version, attempt
                self.reissued += 1
            case Stored(_, keys, start, end):
                if sorted(keys) != sorted(group.keys):
                    return " has other keys than were reserved"
                if end < start:
                    return f": its last token has weight version {end}, its first {start}"
                group.state, group.start = "stored", start
            case Cancelled(_, how):
                if not how.startswith("evicted/"):
                    return f": {how!r} is no reason to cancel"
                group.state, group.how = "cancelled", how
            case Claimed(_, version):
                if why := self._too_old(group, version):
                    return why
                group.state, group.age = "claimed", max(0, version - group.start)
            case Released():
                group.state = "stored"
            case Ended(uid, how):
                return self._end(uid, how, group)
        return ""

    def _too_old(self, group: _Group, version: int) -> str:
        assert self.began is not None
        sampler, bound = self.began.sampler, self.began.max_age
        if version != self.version:
            return f" for weight version {version}, and the ledger is at {self.version}"
        if sampler == "in_order" and group.target != version:
            return f" for weight version {version}, and it was drawn for {group.target}"
        # ready_first promises no bound; neither does a sampler of the user's, of which we know nothing.
        if sampler in ("windowed", "weight_fifo", "in_order") and version - group.start > bound:
            return f" is of weight version {group.start}, at {version}: older than the bound of {bound}"
        return ""

    def _end(self, uid: str, how: str, group: _Group) -> str:
        name, _, reason = how.partition("/")
        if name not in _ENDS or bool(reason) != (name in ("evicted", "dropped")):
            return f": {how!r} is no end of a group"
        if how != "dropped/end" and group.state not in _ENDS[name]:
            return f" is {group.state} since line {group.line}: it cannot end as {how}"
        if group.state == "cancelled" and how not in (group.how, "dropped/end"):
            return f" was cancelled as {group.how}, and ended as {how}"
        self.ends[how] += 1
        if how == "trained":
            self.ages[group.age] += 1
        del self.groups[uid]
        return ""
