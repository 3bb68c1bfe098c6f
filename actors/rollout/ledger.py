"""The ledger of a run: a state machine over prompt groups, from their admission to their end. Pure: no Ray, no threads, an injected clock.

In a synchronous run it admits one step's groups at a time; in an asynchronous one it is the replay buffer. The samplers (staleness.py) have
the rules.

    reserve ──► in_flight ──commit──► committed ──claim──► claimed ──trained──► gone
                 │  │  │                │  ▲                │   │
                 │  │  └──────────┐     │  └────release─────┘   └──drop──► gone
                 │  fail          │     ├── drop ──► gone
                 │  └──► gone     │     └── evicted (set_version, commit, release) ──► gone
                 └─ evicted ─► cancelled ── commit or fail ──► gone

    gone = the group's keys are cleared from the data plane, once, and its slot is free

Every change is a transition (transitions.py), made in one place (`_record`); `state` is one JSON value, and `restore` its inverse.

A group is trained at most once, and no group is lost: admitted = in the buffer + failed + evicted + dropped + trained.

Each change of state first clears the rows through a callback. When clearing fails, the group keeps its state and the call can be repeated
(clearing twice is no error). The writer of a group in flight may still put rows: eviction only cancels such a group, and its keys are
cleared when the writer commits or fails it.

One caller at a time: `ledger_actor` holds a lock around every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from actors.data_plane.meta import KVBatchMeta, mint_key
from actors.rollout.ledger_types import Claim, GroupStateError, SamplerError
from actors.rollout.staleness import Admission, BufferState, Group, GroupState, Refusal, StalenessSampler
from actors.rollout.transitions import Admitted, Announced, Cancelled, Claimed, Committed, Ended, Reissued, Released, Transition

GUARD = "guard/"  # prefix of the reason for which a step that was skipped drops its groups
_GROUPS = TypeAdapter(list[Group])


class Ledger:
    """See the module's picture.

    Args:
        capacity: largest number of groups held, in any state. max_in_flight: largest number in flight or cancelled.
        version: version of the weights that the next step trains.
        clear: callback that removes keys from the data plane; keys that were never written are no error.
        clock: monotonic time, in seconds.
        journal: callback that receives all transitions made together, after they are made.
    """

    def __init__(
        self,
        sampler: StalenessSampler,
        *,
        capacity: int,
        max_in_flight: int,
        version: int,
        clear: Callable[[Sequence[str]], None],
        clock: Callable[[], float],
        journal: Callable[[Sequence[Transition]], None] | None = None,
    ) -> None:
        self._sampler, self._capacity, self._max_in_flight = sampler, capacity, max_in_flight
        self._version, self._clear, self._clock, self._journal = version, clear, clock, journal
        self._groups: dict[str, Group] = {}
        self._trained_now = 0  # groups claimed at the present version whose step is done
        self._counts: Counter[str] = Counter()
        self._ages: Counter[int] = Counter()
        self._last_commit = clock()
        self._last_failure = ""

    # ---- the writer's side: the collector ----

    def reserve(self, uid: str, rows: int) -> Admitted | Refusal:
        """Reserve a slot and the keys for the `rows` responses to prompt `uid`; or say why there is none at present.

        Raises:
            GroupStateError: the buffer holds a group of this uid. ValueError: no rows.
        """
        if rows < 1:
            raise ValueError(f"group {uid!r}: {rows} rows")
        if uid in self._groups:
            raise GroupStateError(f"group {uid!r} is {self._groups[uid].state}: a prompt's uid is free again when its group is gone")
        admission = self._admit()
        if isinstance(admission, Refusal):
            return admission
        keys = tuple(mint_key(self._version, uid, index) for index in range(rows))
        place = Admitted(uid, keys, self._version, admission.target_version)
        self._record(place)
        return place

    def commit(self, uid: str, meta: KVBatchMeta, start_version: int, end_version: int) -> bool:
        """Store a group whose rows are all written. False: it was cancelled or is too old, and its rows are cleared.

        Raises:
            GroupStateError: not in flight, other keys than reserved, or versions that run backwards.
        """
        group = self._in(uid, "commit", "in_flight", "cancelled")
        if sorted(meta.keys) != sorted(group.keys):
            strange = sorted(set(meta.keys) ^ set(group.keys))[0]
            raise GroupStateError(
                f"group {uid!r}: commit of {len(meta)} keys, {len(group.keys)} are reserved, and {strange!r} is in one only: "
                "write every response under its reserved key, or fail the group"
            )
        if end_version < start_version:
            raise GroupStateError(f"group {uid!r}: the last token's weight version {end_version} is below the first's, {start_version}")
        if group.state == "cancelled":
            self._record(Ended(uid, group.evicted))
            return False
        committed = Committed(uid, meta, start_version, end_version)
        late = self._late(self._state({uid: self._stored(committed)}))
        if uid in late:
            self._record(Ended(uid, late[uid]))
            return False
        self._record(committed)
        return True

    def fail(self, uid: str, reason: str) -> None:
        """The group will not be committed. Rows that were written are cleared, however many they are.

        Raises:
            GroupStateError: not in flight.
        """
        group = self._in(uid, "fail", "in_flight", "cancelled")
        self._record(Ended(uid, group.evicted or "failed"))
        self._last_failure = reason

    def abandon(self, reason: str) -> tuple[str, ...]:
        """Fail every group in flight: their writer is gone. Returns their uids."""
        gone = [Ended(group.uid, group.evicted or "failed") for group in self._state().having("in_flight", "cancelled")]
        self._record(*gone)
        self._last_failure = reason
        return tuple(end.uid for end in gone)

    def reissue(self, kept: Mapping[str, int]) -> tuple[Admitted, ...]:
        """After `restore`: every group in flight is generated again, under keys of its next attempt.

        Cancelled groups end, and claimed ones are released: who had them is gone.

        Args:
            kept: of the groups that keep responses, by uid, the lowest weight version of their tokens.

        Returns:
            The new places, in order of admission. A place's version is the group's start version: that of the oldest token that it
            keeps, or the present one.
        """
        state = self._state()
        self._record(*(Ended(group.uid, group.evicted) for group in state.having("cancelled")))
        self.release(group.uid for group in state.having("claimed"))
        places = [self._again(group, kept.get(group.uid, self._version)) for group in state.having("in_flight")]
        self._record(*places)
        return tuple(Admitted(new.uid, new.keys, new.version, self._groups[new.uid].target_version) for new in places)

    def cancelled(self) -> tuple[str, ...]:
        """Groups whose generation can be stopped: a commit would be refused. Each waits for its `fail` (or commit)."""
        return tuple(group.uid for group in self._state().having("cancelled"))

    # ---- the reader's side: the trainer ----

    def claim(self, count: int) -> Claim | None:
        """Take `count` whole groups for the step that trains the present version, or none at all.

        Raises:
            ValueError: a count below 1, or above what the buffer can hold.
        """
        if not 1 <= count <= self._capacity:
            raise ValueError(f"claim of {count} groups: the buffer holds 1 to {self._capacity}")
        chosen = self._select(count)
        if len(chosen) < count:
            return None
        self._record(*(Claimed(group.uid, self._version) for group in chosen))
        metas = [group.meta for group in chosen if group.meta is not None]  # all have one: they are committed
        ages = tuple(_age(group, self._version) for group in chosen)
        return Claim(tuple(group.uid for group in chosen), KVBatchMeta.concat(metas), self._version, ages)

    def release(self, uids: Iterable[str]) -> tuple[str, ...]:
        """Give claimed groups back untrained: they can be claimed again. Returns those that were too old for that and are gone.

        Raises:
            GroupStateError: not claimed, or not held; nothing changes then.
        """
        back = {uid: replace(self._in(uid, "release", "claimed"), state="committed") for uid in uids}
        late = {uid: how for uid, how in self._late(self._state(back)).items() if uid in back}
        self._record(*(Ended(uid, how) for uid, how in late.items()), *(Released(uid) for uid in back if uid not in late))
        return tuple(late)

    def trained(self, uids: Iterable[str]) -> None:
        """These claimed groups were trained on; their rows are cleared.

        Raises:
            GroupStateError: not claimed, or not held; nothing changes then.
        """
        groups = {uid: self._in(uid, "trained", "claimed") for uid in uids}
        self._record(*(Ended(uid, "trained") for uid in groups))

    def drop(self, uids: Iterable[str], reason: str) -> None:
        """Remove committed or claimed groups, for example those without reward variance; others are admitted in their place.

        Not in the place of claimed groups that a guard has dropped (reason GUARD/NAME): their step is over.

        Raises:
            GroupStateError: in flight, or not held; nothing changes then.
        """
        groups = {uid: self._in(uid, "drop", "committed", "claimed") for uid in uids}
        self._record(*(Ended(uid, f"dropped/{reason}") for uid in groups))

    def set_version(self, version: int) -> tuple[str, ...]:
        """The next step trains the weights of this version. Evicts what is too old for it; returns the uids of those.

        Claimed groups stay: their step has begun.

        Raises:
            ValueError: the version runs backwards.
        """
        if version < self._version:
            raise ValueError(f"weight version {version} after {self._version}: versions only grow")
        late = self._late(BufferState(version, self._groups, 0))
        ends = [Ended(uid, how) if self._groups[uid].state == "committed" else Cancelled(uid, how) for uid, how in late.items()]
        self._record(*ends, *([Announced(version)] if version > self._version else []))
        return tuple(late)

    def clear(self) -> None:
        """Remove every group and clear its keys. For the end of a run, when nobody writes or trains."""
        self._record(*(Ended(uid, "dropped/end") for uid in self._groups))

    # ---- as one value ----

    def state(self) -> dict[str, Any]:
        """All that the ledger knows, as JSON; clock times are seconds before now."""
        now = self._clock()
        groups = [replace(group, since=now - group.since) for group in self._groups.values()]
        return {
            "version": self._version,
            "trained_now": self._trained_now,
            "counts": dict(self._counts),
            "ages": {str(age): number for age, number in self._ages.items()},
            "since_commit": now - self._last_commit,
            "last_failure": self._last_failure,
            "groups": _GROUPS.dump_python(groups, mode="json"),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; its rows must be in the data plane. The journal receives nothing."""
        now = self._clock()
        self._groups = {group.uid: replace(group, since=now - group.since) for group in _GROUPS.validate_python(state["groups"])}
        self._version, self._trained_now = state["version"], state["trained_now"]
        self._counts, self._ages = Counter(state["counts"]), Counter({int(age): number for age, number in state["ages"].items()})
        self._last_commit, self._last_failure = now - state["since_commit"], state["last_failure"]

    # ---- what people and metrics see ----

    def since_commit(self) -> float:
        """Seconds since a group was committed last, or since the start."""
        return self._clock() - self._last_commit

    def unsettled(self) -> int:
        """Groups that were claimed for an earlier version: their step is over, and what became of them has not been said yet."""
        return sum(group.claimed_version != self._version for group in self._state().having("claimed"))

    def waiting_for(self, count: int) -> str:
        """Why `claim(count)` finds too little, in one line."""
        state, now = self._state(), self._clock()
        ready, flying = len(self._select(count)), state.having("in_flight")
        parts = [f"{ready} of {count} groups ready for weight version {self._version}"]
        if flying:
            oldest = min(flying, key=lambda group: group.since)
            parts.append(f"{len(flying)} in flight (the longest, {oldest.uid!r}, for {now - oldest.since:.0f} s)")
        else:
            parts.append("none in flight")
        others = {"stored": len(state.having("committed")), "claimed": len(state.having("claimed")), "cancelled": len(self.cancelled())}
        parts += [f"{number} {what}" for what, number in others.items() if number]
        if unsettled := self.unsettled():
            parts.append(f"{unsettled} of an earlier step are not settled")
        losses = sorted(what for what in self._counts if what.startswith(("failed", "evicted", "dropped")))
        parts += [f"{self._counts[what]} {what.replace('/', ' ')}" for what in losses]
        if self._last_failure:
            parts.append(f"last failure: {self._last_failure}")
        admission = self._admit()
        parts.append(f"admission waits: {admission.reason}" if isinstance(admission, Refusal) else "admission is open")
        parts.append(f"last commit {self.since_commit():.0f} s ago")
        return "; ".join(parts)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, present occupancy by state, and how many groups were claimed at each age."""
        state = self._state()
        found = {f"replay/{name}": float(number) for name, number in sorted(self._counts.items())}
        states: tuple[GroupState, ...] = ("in_flight", "cancelled", "committed", "claimed")
        found |= {f"replay/occupancy/{name}": float(len(state.having(name))) for name in states}
        found["replay/occupancy"] = len(self._groups) / self._capacity
        found |= {f"replay/age/{age}": float(number) for age, number in sorted(self._ages.items())}
        if self._ages:
            found["replay/age/mean"] = sum(age * number for age, number in self._ages.items()) / self._ages.total()
        return found

    # ---- inside ----

    def _state(self, changed: dict[str, Group] | None = None) -> BufferState:
        return BufferState(self._version, self._groups | (changed or {}), self._trained_now)

    def _admit(self) -> Admission | Refusal:
        state = self._state()
        if len(self._groups) >= self._capacity:
            return Refusal(f"the buffer holds {len(self._groups)} groups, its capacity")
        if (flying := len(state.having("in_flight", "cancelled"))) >= self._max_in_flight:
            return Refusal(f"{flying} groups in flight, the most that may be")
        return self._sampler.admit(state)

    def _in(self, uid: str, what: str, *states: GroupState) -> Group:
        group = self._groups.get(uid)
        if group is None:
            raise GroupStateError(f"{what}: no group {uid!r}: it was never reserved, or is gone (trained, failed, evicted or dropped)")
        if group.state not in states:
            raise GroupStateError(f"{what}: group {uid!r} is {group.state}, not {' or '.join(states)}")
        return group

    def _select(self, count: int) -> Sequence[Group]:
        chosen = self._sampler.select(self._state(), count)
        self._trust("select", [group.uid for group in chosen], self._groups, "committed")
        if len(chosen) > count:
            raise SamplerError(f"{type(self._sampler).__name__}.select: {len(chosen)} groups, {count} were asked for")
        return chosen

    def _late(self, state: BufferState) -> dict[str, str]:
        """How the groups that must not be trained end, by uid."""
        reasons = self._sampler.evict(state)
        self._trust("evict", reasons, state.groups, "in_flight", "committed")
        return {uid: f"evicted/{reason}" for uid, reason in reasons.items()}

    def _trust(self, what: str, uids: Collection[str], groups: Mapping[str, Group], *states: GroupState) -> None:
        # A sampler may be the user's own; what it may not do is have a group trained twice, or taken from the trainer.
        for uid in uids:
            if uid not in groups or groups[uid].state not in states:
                found = groups[uid].state if uid in groups else "not in the buffer"
                raise SamplerError(f"{type(self._sampler).__name__}.{what}: group {uid!r} is {found}, not {' or '.join(states)}")
        if len(set(uids)) < len(uids):
            raise SamplerError(f"{type(self._sampler).__name__}.{what}: a group occurs twice in {list(uids)}")

    def _record(self, *changes: Transition) -> None:
        """Clear the rows of the groups that end, then make the changes, then tell the journal."""
        if ended := [change.uid for change in changes if isinstance(change, Ended)]:
            self._clear([key for uid in ended for key in self._groups[uid].keys])
        for change in changes:
            self._make(change)
        if changes and self._journal:
            self._journal(changes)

    def _make(self, change: Transition) -> None:
        now = self._clock()
        match change:
            case Admitted(uid, keys, version, target):
                self._groups[uid] = Group(uid, keys, "in_flight", version, target, now)
                self._counts["admitted"] += 1
            case Reissued(uid, keys, version, attempt):
                self._groups[uid] = replace(self._groups[uid], keys=keys, start_version=version, attempt=attempt, since=now)
                self._counts["reissued"] += 1
            case Committed(uid):
                self._groups[uid] = self._stored(change)
                self._counts["committed"] += 1
                self._last_commit, self._last_failure = now, ""
            case Cancelled(uid, how):
                self._groups[uid] = replace(self._groups[uid], state="cancelled", evicted=how, since=now)
            case Claimed(uid, version):
                self._ages[_age(self._groups[uid], version)] += 1
                self._groups[uid] = replace(self._groups[uid], state="claimed", claimed_version=version, since=now)
                self._counts["claimed"] += 1
            case Released(uid):
                self._groups[uid] = replace(self._groups[uid], state="committed", since=now)
                self._counts["released"] += 1
            case Ended(uid, how):
                group = self._groups.pop(uid)
                self._counts[how] += 1
                done = how == "trained" or how.startswith(f"dropped/{GUARD}")
                self._trained_now += done and group.claimed_version == self._version
            case Announced(version):
                self._version, self._trained_now = version, 0

    def _again(self, group: Group, version: int) -> Reissued:
        attempt = group.attempt + 1
        keys = tuple(mint_key(version, group.uid, row, attempt) for row in range(len(group.keys)))
        return Reissued(group.uid, keys, version, attempt)

    def _stored(self, change: Committed) -> Group:
        return replace(
            self._groups[change.uid], state="committed", start_version=change.start_version, end_version=change.end_version,
            meta=change.meta, commit_number=self._counts["committed"], since=self._clock(),
        )  # fmt: skip


def _age(group: Group, version: int) -> int:
    return max(0, version - group.start_version)
