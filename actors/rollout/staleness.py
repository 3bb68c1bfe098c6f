"""Staleness samplers: which prompt groups are begun, which are trained next, and which are thrown away. Pure.

With v the version being trained, A = max_trajectory_age_steps, B = groups per step. "Ahead" counts the groups in flight, stored, and taken
for version v; age is v minus the start version (of the group's first token).

sampler       admit                         select                                         evict
windowed      while the buffer has room     oldest start version first                     age > A
ready_first   while ahead < B x (A + 1)     oldest commit first                            never: a slow group is trained at any age
weight_fifo   while ahead < B x (A + 1)     oldest start version first; waits for groups   age > A, which the order prevents as long as
                                            in flight that began under older weights       every version takes B groups
in_order      stamped with the first of     exactly the groups stamped v, oldest           stamped below v, or v' - start > A for the
              v .. v + A that lacks one     admission first                                stamp v'

windowed wastes what falls out of its window, slow (long) responses first; weight_fifo and in_order throw nothing away, and the step waits
for its slowest group; ready_first neither waits nor wastes, and bounds how far generation runs ahead in place of the age.

A group that fails, or is dropped (no reward variance), counts nowhere any more: its place is admitted again, and in_order stamps the
replacement for the same step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from pydantic import ConfigDict, with_config

from actors.data_plane.meta import KVBatchMeta
from configs.base import ConfigError
from configs.import_path import imported
from configs.staleness import AsyncConfig

GroupState = Literal["in_flight", "cancelled", "committed", "claimed"]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Group:
    """The responses to one prompt.

    Attributes:
        uid: id of the prompt; unique among the groups that the buffer holds.
        keys: keys of its rows in the data plane, minted at admission.
        state: "cancelled" means in flight and unwanted; the group holds its slot until its writer commits or fails it.
        start_version: version of the first token; until the commit the version at admission, which is a lower bound.
        target_version: version whose step trains it, or None.
        since: clock time of the last change of state, in seconds.
        end_version, commit_number, meta: version of the last token, number of commits before this one, and rows; set by the commit.
        claimed_version: version that was trained when it was claimed last.
        evicted: reason why it was cancelled.
        attempt: how often it was issued again after a resume.
    """

    uid: str
    keys: tuple[str, ...]
    state: GroupState
    start_version: int
    target_version: int | None
    since: float
    end_version: int | None = None
    commit_number: int | None = None
    meta: KVBatchMeta | None = None
    claimed_version: int | None = None
    evicted: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class BufferState:
    """What a sampler decides on.

    Attributes:
        version: the weight version being trained. groups: all that the buffer holds, in order of admission.
        trained: groups claimed at this version whose step is done (they are in `groups` no more).
    """

    version: int
    groups: Mapping[str, Group]
    trained: int

    def having(self, *states: GroupState) -> list[Group]:
        """The groups in one of these states, in order of admission."""
        return [group for group in self.groups.values() if group.state in states]

    def ahead(self) -> int:
        """Groups in flight, stored, or taken for this version."""
        taken = sum(group.claimed_version == self.version for group in self.having("claimed"))
        return len(self.having("in_flight", "committed")) + taken + self.trained


@dataclass(frozen=True)
class Admission:
    """A place for one more group, for the step of `target_version` or for any."""

    target_version: int | None = None


@dataclass(frozen=True)
class Refusal:
    """No place at present; the reason is for a person."""

    reason: str


@runtime_checkable
class StalenessSampler(Protocol):
    """A rule. Built as `cls(max_age=A, groups_per_step=B)`; keeps no state of its own: the buffer's is all there is."""

    def __init__(self, max_age: int, groups_per_step: int) -> None: ...

    def required_capacity(self) -> int:
        """Fewest groups that the buffer must hold for the rule to work."""
        ...

    def admit(self, state: BufferState) -> Admission | Refusal:
        """Whether one more group may begin. The buffer's own bounds (capacity, groups in flight) hold beside this one."""
        ...

    def select(self, state: BufferState, count: int) -> Sequence[Group]:
        """The committed groups to train next, best first, at most `count`. Fewer mean: wait."""
        ...

    def evict(self, state: BufferState) -> Mapping[str, str]:
        """Groups in flight or committed that must not be trained: uid to reason, a short name for the metrics."""
        ...


class _Aged:
    """What the built-in rules share: their two numbers, A + 1 steps of capacity, and the age bound."""

    def __init__(self, max_age: int, groups_per_step: int) -> None:
        self._max_age, self._groups_per_step = max_age, groups_per_step

    def required_capacity(self) -> int:
        return self._groups_per_step * (self._max_age + 1)

    def evict(self, state: BufferState) -> Mapping[str, str]:
        oldest = state.version - self._max_age
        return {group.uid: "too_old" for group in state.having("in_flight", "committed") if group.start_version < oldest}


class Windowed(_Aged):
    """Any group of the last A + 1 versions; over-samples as far as the buffer's capacity allows."""

    def required_capacity(self) -> int:
        return self._groups_per_step

    def admit(self, state: BufferState) -> Admission | Refusal:
        return Admission()

    def select(self, state: BufferState, count: int) -> Sequence[Group]:
        return sorted(state.having("committed"), key=_by_age)[:count]


class _Gated(_Aged):
    """Admission bounded as in AReaL's staleness control (arXiv 2505.24298): generation runs at most A steps ahead of training."""

    def admit(self, state: BufferState) -> Admission | Refusal:
        ahead, most = state.ahead(), self.required_capacity()
        if ahead < most:
            return Admission()
        return Refusal(f"{ahead} groups ahead of version {state.version}, at most {self._groups_per_step} x ({self._max_age} + 1)")


class ReadyFirst(_Gated):
    """What was committed first, however old it is."""

    def select(self, state: BufferState, count: int) -> Sequence[Group]:
        return sorted(state.having("committed"), key=lambda group: group.commit_number or 0)[:count]

    def evict(self, state: BufferState) -> Mapping[str, str]:
        return {}


class WeightFifo(_Gated):
    """Oldest weights first: no group is overtaken by one that began under newer weights."""

    def select(self, state: BufferState, count: int) -> Sequence[Group]:
        barrier = min((group.start_version for group in state.having("in_flight")), default=None)
        stored = [group for group in state.having("committed") if barrier is None or group.start_version <= barrier]
        return sorted(stored, key=_by_age)[:count]


class InOrder(_Aged):
    """Each step has its own groups, chosen when they are admitted."""

    def admit(self, state: BufferState) -> Admission | Refusal:
        for version in range(state.version, state.version + self._max_age + 1):
            stamped = sum(g.target_version == version for g in state.having("in_flight", "committed", "claimed"))
            if stamped + (state.trained if version == state.version else 0) < self._groups_per_step:
                return Admission(version)
        return Refusal(f"{self._groups_per_step} groups each for versions {state.version} to {state.version + self._max_age}")

    def select(self, state: BufferState, count: int) -> Sequence[Group]:
        return [group for group in state.having("committed") if group.target_version == state.version][:count]

    def evict(self, state: BufferState) -> Mapping[str, str]:
        found = {}
        for group in state.having("in_flight", "committed"):
            assert group.target_version is not None  # `admit` stamps every group
            if group.target_version < state.version:
                found[group.uid] = "step_passed"
            elif group.target_version - group.start_version > self._max_age:
                found[group.uid] = "too_old"
        return found


_BUILT_IN: dict[str, type[StalenessSampler]] = {
    "windowed": Windowed,
    "ready_first": ReadyFirst,
    "weight_fifo": WeightFifo,
    "in_order": InOrder,
}


def build(config: AsyncConfig, groups_per_step: int) -> StalenessSampler:
    """The sampler that the configuration names.

    Raises:
        ConfigError: the class cannot be imported or is no sampler, or the buffer is too small for it.
    """
    cls = _BUILT_IN.get(config.sampler) or _imported(config.sampler)
    sampler = cls(max_age=config.max_trajectory_age_steps, groups_per_step=groups_per_step)
    capacity, required = config.capacity(groups_per_step), sampler.required_capacity()
    if capacity < required:
        raise ConfigError(
            f"buffer_capacity: {capacity} groups, and sampler {config.sampler!r} needs {required} ({groups_per_step} groups per step, "
            f"max_trajectory_age_steps = {config.max_trajectory_age_steps}): raise buffer_capacity or lower the others"
        )
    return sampler


def _imported(path: str) -> type[StalenessSampler]:
    found: type[StalenessSampler] = imported(path, "asynchronous.sampler")
    # Before it is called: a name may be anything's.
    if not inspect.isclass(found) or not issubclass(found, StalenessSampler):
        raise ConfigError(f"sampler: {path!r} is no class, or lacks one of required_capacity, admit, select and evict")
    return found


def _by_age(group: Group) -> tuple[int, int]:
    return group.start_version, group.commit_number or 0
