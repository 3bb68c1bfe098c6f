"""No request is lost and none ends twice, whatever engines die and results come: by state machine."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from actors.generation.outstanding import MOST_ENGINES, Outstanding, cost
from actors.generation.routing import NoEngineError, Router
from actors.generation.types import RequestError
from tests.actors.generation.conftest import request


class Ledger(RuleBasedStateMachine):
    """The model: for each request that is out, the engines that it was given to; and how each ended."""

    @initialize(count=st.integers(1, 6))
    def start(self, count: int) -> None:
        self.names = [f"engine-{i}" for i in range(count)]
        self.router = Router(self.names)
        self.outstanding = Outstanding(self.router)
        self.given: dict[str, list[str]] = {}
        self.unwanted: list[tuple[str, str]] = []  # results of withdrawn requests, on their way
        self.made = 0

    @rule(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6))
    def submit(self, lengths: list[int]) -> None:
        requests = [request(str(self.made + i), [1] * n) for i, n in enumerate(lengths)]
        self.made += len(requests)
        if not self.router.alive:
            with pytest.raises(NoEngineError):
                self.outstanding.assign(requests)
            return
        for engine, part in self.outstanding.assign(requests).items():
            assert engine in self.router.alive
            self.given |= {r.request_id: [engine] for r in part}

    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        if self.given and self.router.alive:
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
                del self.given[name]

    @rule(data=st.data(), ended=st.booleans(), again=st.booleans())
    def withdraw(self, data: st.DataObject, ended: bool, again: bool) -> None:
        if not self.given:
            return
        name = data.draw(st.sampled_from(sorted(self.given)))
        engine = self.given.pop(name)[-1]
        assert self.outstanding.withdraw([name, "never"]) == {engine: [name]}
        if ended and (engine, name) not in self.unwanted:
            self.outstanding.ended_before(engine, [name])
            self.unwanted.append((engine, name))
        if again and self.router.alive:
            ((engine, _),) = self.outstanding.assign([request(name, [1])]).items()
            self.given[name] = [engine]

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.router.mark_dead(data.draw(st.sampled_from(self.names)), "killed")

    @rule()
    def reassign(self) -> None:
        lost = {name for name, engines in self.given.items() if engines[-1] in self.router.dead}
        parts, given_up = self.outstanding.reassign()
        sent = {r.request_id: engine for engine, part in parts.items() for r in part}
        ended = {name: engine for engine, names in given_up.items() for name in names}
        assert set(sent) | set(ended) == lost
        assert not set(sent) & set(ended)
        for name, engine in sent.items():
            assert engine in self.router.alive
            self.given[name].append(engine)
            assert len(self.given[name]) <= MOST_ENGINES
        for name, engine in ended.items():
            assert engine == self.given[name][-1]
            assert len(self.given[name]) == MOST_ENGINES or not self.router.alive
            del self.given[name]

    @invariant()
    def engines_hold_what_they_were_given(self) -> None:
        if hasattr(self, "outstanding"):
            for name in self.names:
                assert sorted(self.outstanding.at(name)) == sorted(r for r, engines in self.given.items() if engines[-1] == name)
                if name in self.router.alive:
                    assert (self.router.outstanding(name) > 0) == bool(self.outstanding.at(name))
            assert self.outstanding.engines() == {engines[-1] for engines in self.given.values()}


TestLedger = Ledger.TestCase


def test_cost_is_the_longest_text() -> None:
    assert cost(request("a", [1, 2, 3], max_new_tokens=4)) == 7
