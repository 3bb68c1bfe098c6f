"""No engine serves with weights older than those announced, and each that is lost serves again or is given up: by state machine.

The world has processes that die, hang, wake up, start and fail to; a client and a trainer that know only what calls tell them, each with a
fleet of its own; and refits, during which all of that goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.generation.fleet import MOST_FAILURES, Change, Fleet, Verdict
from actors.generation.types import EngineHealth

RESTART_S = 100.0
NAMES = ["engine-0", "engine-1", "engine-2"]
_incarnations = count()


@dataclass
class Process:
    """What Ray and the engine are, whatever anybody knows of it."""

    state: str = "ready"
    stale: bool = False
    version: int = 0
    hangs: bool = False
    incarnation: str = field(default_factory=lambda: f"process-{next(_incarnations)}")

    @property
    def health(self) -> EngineHealth:
        return EngineHealth(self.state, self.version, 0, stale=self.stale, incarnation=self.incarnation)  # type: ignore[arg-type]


class World(RuleBasedStateMachine):
    @initialize(engines=st.integers(1, 3), restarts=st.integers(0, 12))
    def start(self, engines: int, restarts: int) -> None:
        self.now, self.announced, self.version = 0.0, 0, 0
        self.names = NAMES[:engines]
        self.restarts = dict.fromkeys(self.names, restarts)
        self.processes: dict[str, Process | None] = {name: Process() for name in self.names}  # None: gone for good
        self.client, self.trainer = (Fleet(self.names, RESTART_S, lambda: self.now) for _ in range(2))
        self.refit: dict[str, str] | None = None

    def replace(self, name: str, verdict: Verdict = "restart") -> None:
        """Its process ends; Ray starts another, as long as it may."""
        if verdict and self.processes[name] is not None:
            again = verdict == "restart" and self.restarts[name] > 0
            self.restarts[name] -= again
            self.processes[name] = Process("new", stale=True) if again else None

    def ask(self, fleet: Fleet, name: str) -> None:
        process = self.processes[name]
        if process is None:
            self.replace(name, fleet.unanswered(name, ended=False, gone=True))
        elif process.hangs:
            self.replace(name, fleet.unanswered(name, ended=False))
        else:
            self.replace(name, fleet.answered(name, process.health))

    # ---- what goes wrong ----

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        if name in self.names:
            self.replace(name)

    @rule(name=st.sampled_from(NAMES), hangs=st.booleans())
    def hang_or_wake_up(self, name: str, hangs: bool) -> None:
        if (process := self.processes.get(name)) is not None:
            process.hangs = hangs

    @rule(name=st.sampled_from(NAMES), fails=st.booleans())
    def be_up(self, name: str, fails: bool) -> None:
        if (process := self.processes.get(name)) is not None and process.state == "new":
            process.state = "failed" if fails else "ready"

    @rule(seconds=st.sampled_from([1.0, 10.0, RESTART_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # ---- what the client and the trainer do ----

    @rule(name=st.sampled_from(NAMES))
    def request(self, name: str) -> None:
        if name in self.names and self.client.standing(name) == "healthy":
            process = self.processes[name]
            if process is None:
                self.client.lost(name, "died", gone=True)
            elif process.hangs:
                self.client.lost(name, "silent", hangs=True)
            elif process.state == "failed":
                self.client.lost(name, "failed", hangs=True)
            elif process.state == "new" or process.stale or not self.client.seen(name, process.incarnation):
                self.client.lost(name, "started again")

    @rule()
    def look(self) -> None:
        for name in self.client.due():
            self.ask(self.client, name)

    @precondition(lambda self: self.refit is None)
    @rule()
    def begin_refit(self) -> None:
        self.version += 1
        self.refit = self.members()

    def members(self) -> dict[str, str]:
        """As `Supervisor.members`."""
        ready = {}
        for name in self.names:
            process, standing = self.processes[name], self.trainer.standing(name)
            if standing == "given_up":
                continue
            if standing == "healthy":
                if process is None:
                    self.trainer.lost(name, "died", gone=True)
                elif process.hangs:
                    self.trainer.lost(name, "silent", hangs=True)
                elif process.state != "ready" or not self.trainer.seen(name, process.incarnation):
                    self.trainer.lost(name, "started again", hangs=process.state == "failed")
            self.ask(self.trainer, name)
            process = self.processes[name]
            if process is not None and process.state == "ready" and self.trainer.standing(name) in ("healthy", "stale"):
                ready[name] = process.incarnation
        return ready

    @precondition(lambda self: self.refit is not None)
    @rule(late=st.booleans())
    def end_refit(self, late: bool) -> None:
        """`late`: what hangs has loaded before."""
        assert self.refit is not None
        members, self.refit, taken = self.refit, None, 0
        for name, incarnation in members.items():
            process = self.processes[name]
            if process is None:
                self.trainer.lost(name, "died", gone=True)
                continue
            there = process.incarnation == incarnation and process.state == "ready"
            if there and (late or not process.hangs):
                process.version, process.stale = self.version, False
            if there and not process.hangs:
                self.trainer.refitted(name, incarnation)
                taken += 1
            else:
                self.trainer.lost(name, "refit", hangs=process.hangs)
        if taken < len(members):
            self.members()
        if taken:
            self.announced = self.version

    # ---- what must hold ----

    @invariant()
    def nobody_serves_with_old_weights(self) -> None:
        for name, process in getattr(self, "processes", {}).items():
            serves = process is not None and process.state == "ready" and not process.stale and not process.hangs
            if serves and self.client.standing(name) == "healthy" and self.refit is None:
                assert process.version >= self.announced

    @invariant()
    def who_is_given_up_is_gone(self) -> None:
        for name, process in getattr(self, "processes", {}).items():
            assert process is None or "given_up" not in (self.client.standing(name), self.trainer.standing(name))

    def teardown(self) -> None:
        """Nothing goes wrong any more: soon all serve, or are given up."""
        if not hasattr(self, "processes"):
            return
        if self.refit is not None:
            self.end_refit(late=False)
        for _ in range(4 * MOST_FAILURES):
            self.now += RESTART_S
            for name in self.names:
                self.be_up(name, fails=False)
                self.request(name)
            self.look()
            self.begin_refit()
            self.end_refit(late=False)
        for name in self.names:
            for fleet in (self.client, self.trainer):
                assert fleet.standing(name) == ("given_up" if self.processes[name] is None else "healthy"), name
                assert not fleet.returning


World.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase


@pytest.fixture
def fleet() -> tuple[Fleet, list[float]]:
    now = [0.0]
    return Fleet(NAMES[:1], RESTART_S, lambda: now[0]), now


def health(state: str, incarnation: str, stale: bool = True) -> EngineHealth:
    return EngineHealth(state, 0, 0, "no memory" if state == "failed" else "", stale=stale, incarnation=incarnation)  # type: ignore[arg-type]


def test_the_way_back(fleet: tuple[Fleet, list[float]]) -> None:
    here, _ = fleet
    assert here.seen("engine-0", "first")
    here.lost("engine-0", "silent", hangs=True)
    assert here.unanswered("engine-0", ended=False) == "restart"
    assert here.unanswered("engine-0", ended=True) == ""
    for state, stale, standing in (("new", True, "restarting"), ("ready", True, "stale"), ("ready", False, "healthy")):
        assert here.answered("engine-0", health(state, "second", stale)) == ""
        assert here.standing("engine-0") == standing
    assert here.changes() == [Change("engine-0", "dead", "silent"), Change("engine-0", "healthy")]
    assert here.restarts == 1


def test_a_refit_that_found_another_process_does_not_make_it_serve(fleet: tuple[Fleet, list[float]]) -> None:
    here, _ = fleet
    here.lost("engine-0", "died")
    here.answered("engine-0", health("ready", "second"))
    here.refitted("engine-0", "first")
    assert here.standing("engine-0") == "stale"
    here.refitted("engine-0", "second")
    assert here.standing("engine-0") == "healthy"


def test_one_that_cannot_start_is_tried_with_growing_pauses_and_given_up(fleet: tuple[Fleet, list[float]]) -> None:
    here, now = fleet
    here.lost("engine-0", "died")
    kills, verdicts = list[int](), list[Verdict]()
    for second in range(1000):
        now[0] = float(second)
        verdict = here.answered("engine-0", health("failed", f"process {len(kills)}"))
        if verdict:
            kills.append(second)
            verdicts.append(verdict)
    assert kills == [0, 1, 6, 16, 36, 76]
    assert verdicts == ["restart"] * MOST_FAILURES + ["end"]
    assert here.standing("engine-0") == "given_up"
    assert here.changes()[-1].reason == "died; it did not come back, 5 times in a row (last: no memory)"


def test_one_that_served_again_starts_with_a_clean_record(fleet: tuple[Fleet, list[float]]) -> None:
    here, _ = fleet
    for number in range(3 * MOST_FAILURES):
        here.lost("engine-0", "silent", hangs=True)
        assert here.unanswered("engine-0", ended=False) == "restart"
        here.answered("engine-0", health("ready", f"process {number}", stale=False))
        assert here.standing("engine-0") == "healthy"


def test_a_process_that_was_silent_is_ended_also_when_it_wakes_up(fleet: tuple[Fleet, list[float]]) -> None:
    here, _ = fleet
    assert here.seen("engine-0", "first")
    here.lost("engine-0", "silent", hangs=True)
    assert here.answered("engine-0", health("ready", "first", stale=False)) == "restart"
    assert here.standing("engine-0") == "restarting"


def test_a_slow_start_is_ended(fleet: tuple[Fleet, list[float]]) -> None:
    here, now = fleet
    here.lost("engine-0", "died")
    assert here.answered("engine-0", health("new", "second")) == ""
    now[0] = RESTART_S
    assert here.answered("engine-0", health("new", "second")) == ""
    now[0] += 1
    assert here.answered("engine-0", health("new", "second")) == "restart"
