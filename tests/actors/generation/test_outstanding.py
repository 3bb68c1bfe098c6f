"""No request is lost and none ends twice, whatever engines die and results come: by state machine. And who gets a request: by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from actors.generation.outstanding import MOST_ENGINES, Outstanding, cost
from actors.generation.types import GenerationRequest, NoEngineError, RequestError
from tests.actors.generation.conftest import request


class Ledger(RuleBasedStateMachine):
    """The model: for each request that is out, the engines that it was given to; and how each ended."""

    @initialize(count=st.integers(1, 6))
    def start(self, count: int) -> None:
        self.names = [f"engine-{i}" for i in range(count)]
        self.outstanding = Outstanding(self.names)
        self.given: dict[str, list[str]] = {}
        self.lost: set[str] = set()
        self.held: set[str] = set()  # of these: given to none yet
        self.unwanted: list[tuple[str, str]] = []  # results of withdrawn requests, on their way
        self.made = 0

    @rule(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6))
    def submit(self, lengths: list[int]) -> None:
        requests = [request(str(self.made + i), [1] * n) for i, n in enumerate(lengths)]
        self.made += len(requests)
        if not self.outstanding.alive:
            with pytest.raises(NoEngineError):
                self.outstanding.assign(requests)
            assert self.outstanding.assign(requests, hold=True) == {}
            self.given |= {r.request_id: [self.names[0]] for r in requests}
            self.held |= {r.request_id for r in requests}
            self.lost |= {r.request_id for r in requests}
            return
        for engine, part in self.outstanding.assign(requests).items():
            assert engine in self.outstanding.alive
            self.given |= {r.request_id: [engine] for r in part}

    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        if self.given and self.outstanding.alive:
            name = data.draw(st.sampled_from(sorted(self.given)))
            with pytest.raises(RequestError, match=repr(name)):
                self.outstanding.assign([request("other", [1]), request(name, [1])])

    @rule(data=st.data())
    def result(self, data: st.DataObject) -> None:
        if self.given:
            name = data.draw(st.sampled_from(sorted(self.given)))
            engine = data.draw(st.sampled_from(self.names))
            wanted = self.given[name][-1] == engine and (engine, name) not in self.unwanted
            if (engine, name) in self.unwanted:
                self.unwanted.remove((engine, name))
            assert self.outstanding.finish(engine, name) == wanted
            if wanted:
                self.forget(name)

    @rule(data=st.data(), ended=st.booleans(), again=st.booleans())
    def withdraw(self, data: st.DataObject, ended: bool, again: bool) -> None:
        if not self.given:
            return
        name = data.draw(st.sampled_from(sorted(self.given)))
        engine = self.forget(name)
        assert self.outstanding.withdraw([name, "never"]) == {engine: [name]}
        if ended and (engine, name) not in self.unwanted:
            self.outstanding.ended_before(engine, [name])
            self.unwanted.append((engine, name))
        if again and self.outstanding.alive:
            ((engine, _),) = self.outstanding.assign([request(name, [1])]).items()
            self.given[name] = [engine]

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(self.names))
        self.outstanding.mark_dead(engine, "killed")
        self.lost |= {name for name, engines in self.given.items() if engines[-1] == engine}

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(self.names))
        if engine in self.outstanding.dead:
            self.unwanted = [one for one in self.unwanted if one[0] != engine]
        self.outstanding.mark_alive(engine)

    def forget(self, name: str) -> str:
        self.lost.discard(name)
        self.held.discard(name)
        return self.given.pop(name)[-1]

    @rule(hold=st.booleans())
    def reassign(self, hold: bool) -> None:
        lost = set(self.lost)
        parts, given_up = self.outstanding.reassign(hold=hold)
        if hold and not self.outstanding.alive:
            assert (parts, given_up) == ({}, {})
            return
        sent = {r.request_id: engine for engine, part in parts.items() for r in part}
        ended = {name: engine for engine, names in given_up.items() for name in names}
        assert set(sent) | set(ended) == lost
        assert not set(sent) & set(ended)
        for name, engine in sent.items():
            assert engine in self.outstanding.alive
            self.given[name] = [engine] if name in self.held else [*self.given[name], engine]
            self.lost.discard(name)
            self.held.discard(name)
            assert len(self.given[name]) <= MOST_ENGINES
        for name, engine in ended.items():
            assert engine == self.given[name][-1]
            assert len(self.given[name]) == MOST_ENGINES or not self.outstanding.alive
            self.forget(name)

    @invariant()
    def engines_hold_what_they_were_given(self) -> None:
        if hasattr(self, "outstanding"):
            for name in self.names:
                assert sorted(self.outstanding.at(name)) == sorted(r for r, engines in self.given.items() if engines[-1] == name)
                assert (self.outstanding.load[name] > 0) == bool(self.outstanding.at(name))
            assert set(self.outstanding.lost()) == self.lost
            assert self.outstanding.engines() == {engines[-1] for engines in self.given.values()}


TestLedger = Ledger.TestCase


def test_cost_is_the_longest_text() -> None:
    assert cost(request("a", [1, 2, 3], max_new_tokens=4)) == 7


LENGTHS = st.lists(st.integers(1, 4096), max_size=60)
COUNT = st.integers(1, 6)


def _names(count: int) -> list[str]:
    return [f"engine-{i}" for i in range(count)]


def _requests(lengths: list[int], first: int = 0) -> list[GenerationRequest]:
    return [request(str(first + i), [1] * n, max_new_tokens=1) for i, n in enumerate(lengths)]


@given(COUNT, LENGTHS)
def test_loads_differ_by_at_most_one_request(count: int, lengths: list[int]) -> None:
    made = Outstanding(_names(count))
    made.assign(_requests(lengths))
    assert sum(made.load.values()) == sum(lengths) + len(lengths)
    assert max(made.load.values()) - min(made.load.values()) <= max(lengths, default=0) + 1


@given(COUNT, LENGTHS, LENGTHS)
def test_the_same_history_gives_the_same_assignment(count: int, first: list[int], second: list[int]) -> None:
    one, two = Outstanding(_names(count)), Outstanding(_names(count))
    batches = _requests(first), _requests(second, len(first))
    assert [one.assign(batch) for batch in batches] == [two.assign(batch) for batch in batches]


@given(st.integers(2, 6), LENGTHS, LENGTHS, st.data())
def test_a_dead_engine_is_never_assigned(count: int, before: list[int], after: list[int], data: st.DataObject) -> None:
    made = Outstanding(_names(count))
    made.assign(_requests(before))
    dead = data.draw(st.sampled_from(_names(count)))
    made.mark_dead(dead, "first reason")
    made.mark_dead(dead, "second reason")
    assert dead not in made.assign(_requests(after, len(before)))
    made.withdraw([str(i) for i in range(len(before) + len(after))])
    assert set(made.load.values()) == {0}
    assert made.dead == {dead: "first reason"}


def test_a_tie_goes_to_the_first_name() -> None:
    made = Outstanding(["b", "a", "c"])
    assert {name: len(part) for name, part in made.assign(_requests([5, 5, 5, 1])).items()} == {"b": 2, "a": 1, "c": 1}


def test_no_engine_left_says_why() -> None:
    made = Outstanding(["engine-0"])
    made.mark_dead("engine-0", "killed by signal 9")
    with pytest.raises(NoEngineError, match="engine-0: killed by signal 9"):
        made.assign(_requests([1]))


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_names_are_unique(names: list[str]) -> None:
    with pytest.raises(ValueError, match="unique"):
        Outstanding(names)
