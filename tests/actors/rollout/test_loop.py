"""The one rollout path with the real ledger, scoring and an in-memory data plane; engines and verifier are stand-ins of a few lines."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import names
from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.interface import DataPlane
from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.generation.fleet import Change
from actors.generation.types import EngineDiedError, GenerationRequest, GenerationResult
from actors.rollout.assemble import TRAIN_FIELDS
from actors.rollout.cut import RolloutState, load_rollout, save_rollout
from actors.rollout.in_flight import request_id, seeded_request
from actors.rollout.ledger_actor import ClaimReply, ledger_actor_class
from actors.rollout.loop import RolloutLoop
from actors.rollout.prompts import DrawnPrompt
from actors.rollout.scoring import Scoring
from actors.waiting import wait
from configs.rollout import RolloutConfig
from configs.staleness import AsyncConfig
from tests.patience import WAIT_S

STEP, ROWS = 3, 2
SYNC = AsyncConfig(sampler="in_order", max_trajectory_age_steps=0, buffer_capacity=2 * STEP, stall_timeout_s=60)
numbers = count()


def plane() -> DataPlane:
    made = MemoryPlane(timeout_s=30)
    made.register_partition("train", fields=TRAIN_FIELDS)
    return made


class Verifier:
    """Pays by the prompt's number; drops the groups that it is told to."""

    def __init__(self, dropped: Sequence[str], seconds: float) -> None:
        self._dropped, self._seconds = dropped, seconds

    def score(self, problems: list[Problem], responses: list[Response]) -> list[Verdict]:
        time.sleep(self._seconds)
        return [Verdict(1.0, "scored", True, "group" if problem.uid in self._dropped else "no") for problem in problems]


class Encoder:
    """Text of token ids."""

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Stream:
    """Prompts 0, 1, 2 ..; notes the order in which they are drawn and observed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._next = 0

    def draw_encoded(self, wanted: int) -> list[DrawnPrompt]:
        drawn = [str(self._next + place) for place in range(wanted)]
        self._next += len(drawn)
        self.events += [f"draw {uid}" for uid in drawn]
        return [DrawnPrompt(uid, self.again(int(uid), None), [7, int(uid)]) for uid in drawn]

    def number(self, uid: str) -> int:
        return int(uid)

    def again(self, number: int, level: None) -> Problem:
        return Problem(str(number), str(number), "")

    def state(self) -> dict[str, Any]:
        return {"seed": 0, "size": 99, "position": self._next, "dropped": 0, "truncated": 0, "curriculum": None, "source": None}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = state["position"]

    def observe(self, problem: Problem, accuracy: float) -> None:
        self.events.append(f"observe {problem.uid}")

    def metrics(self) -> dict[str, float]:
        return {}


class Pool:
    """Answers in any order, some at a time."""

    def __init__(self, seed: int, dies_at: int | None = None) -> None:
        self._luck, self._dies_at = random.Random(seed), dies_at
        self.submitted: list[list[str]] = []
        self.version = 0
        self._waiting: list[GenerationRequest] = []
        self.alive, self.restarts = ["engine-0"], 0

    def submit(self, requests: list[GenerationRequest]) -> None:
        self.submitted.append([request.request_id for request in requests])
        self._waiting += requests
        if len(self.submitted) == self._dies_at:
            self.alive = []
            raise EngineDiedError("engine-0", "engine-0 died", tuple(request.request_id for request in requests))

    def collect(self, timeout_s: float, until: Any = None) -> list[GenerationResult]:
        self._luck.shuffle(self._waiting)
        cut = self._luck.randint(0, len(self._waiting))
        done, self._waiting = self._waiting[:cut], self._waiting[cut:]
        time.sleep(0.001)
        return [GenerationResult(one.request_id, [1, 2], [-1.0, -1.0], "stop", ((self.version, 2),)) for one in done]

    def abort(self, request_ids: Sequence[str]) -> None:
        self._waiting = [one for one in self._waiting if one.request_id not in request_ids]

    def news(self) -> tuple[list[Change], list[str]]:
        return [], []


class SlowPool(Pool):
    """Answers one request at a time, the shortest response first; how long it is depends on the seed alone."""

    def __init__(self, version: int) -> None:
        super().__init__(seed=0)
        self.version = version
        self.asked: dict[str, int] = {}

    def submit(self, requests: list[GenerationRequest]) -> None:
        super().submit(requests)
        self.asked |= {request.request_id: request.seed for request in requests}

    def collect(self, timeout_s: float, until: Any = None) -> list[GenerationResult]:
        time.sleep(0.01)
        self._waiting.sort(key=lambda one: length(one.seed))
        done, self._waiting = self._waiting[:1], self._waiting[1:]
        lengths = [(one.request_id, length(one.seed)) for one in done]
        return [GenerationResult(name, [1] * long, [-0.1] * long, "stop", ((self.version, long),)) for name, long in lengths]


def length(seed: int) -> int:
    return 1 + seed % 50


class Rig:
    """A loop and its ledger."""

    def __init__(
        self, pool: Pool, rules: AsyncConfig, ahead: bool, dropped: Sequence[str] = (), seconds: float = 0.0, resumes: Path | None = None
    ) -> None:
        self.pool, self.stream, namespace = pool, Stream(), f"loop-{next(numbers)}"
        remote: Any = ray.remote
        self._scorer = remote(num_cpus=0)(Verifier).remote(dropped, seconds)
        options = ledger_actor_class().options(name=names.LEDGER, namespace=namespace, num_cpus=0)
        self.ledger = options.remote(rules, STEP, 0, "train", plane, int)
        self.call("ready")
        self._sampler = rules.sampler
        stand_ins: Any = (self.stream, self.pool, Encoder())
        resumed = None
        if resumes is not None:
            resumed = load_rollout(resumes, stand_ins[0], sampler=rules.sampler, rows=ROWS)
            resumed = resumed.at(self.call("restore", resumed.ledger, resumed.kept()))
        self.loop = RolloutLoop(
            stream=stand_ins[0],
            rollout=RolloutConfig(prompts_per_step=STEP, responses_per_prompt=ROWS),
            seed=0,
            pool=stand_ins[1],
            scoring=Scoring(self._scorer, stand_ins[2], plane(), "train", WAIT_S, replaces=ahead, overlong_filtering=False),
            ledger=self.ledger,
            at_once=STEP,
            ahead=ahead,
            shown=2,
            resumed=resumed,
        )

    def cut(self, directory: Path) -> RolloutState:
        """Also as files in the directory."""
        state, stream = self.loop.cut(1, WAIT_S), self.stream
        stand_in: Any = stream
        save_rollout(directory, state, stand_in, sampler=self._sampler, rows=ROWS)
        return state

    def call(self, method: str, *arguments: Any) -> Any:
        return wait(getattr(self.ledger, method).remote(*arguments), who="ledger", what=method, timeout_s=WAIT_S)

    def announce(self, version: int) -> None:
        self.pool.version = version
        self.call("set_version", version)

    def claim(self, groups: int = STEP) -> Any:
        reply: ClaimReply = self.call("claim", groups, 30.0)
        assert reply.claim is not None
        return reply.claim

    def end(self) -> None:
        self.loop.stop()
        for handle in (self.ledger, self._scorer):
            ray.kill(handle)


@pytest.fixture
def rig(ray_session: None) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(pool: Pool, rules: AsyncConfig = SYNC, ahead: bool = False, **more: Any) -> Rig:
        made.append(Rig(pool, rules, ahead, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_a_synchronous_step_is_drawn_submitted_and_served_as_one(rig: Callable[..., Rig]) -> None:
    """Whatever the order of the answers; the next step's prompts are drawn when the curriculum knows of all of these."""
    here = rig(Pool(seed=1, dies_at=5), dropped=("1",))
    for version in range(4):
        claim = here.claim()
        first = version * STEP
        assert claim.uids == tuple(str(first + row) for row in range(STEP))
        assert [tag["prompt_uid"] for tag in claim.meta.tags] == [uid for uid in claim.uids for _ in range(ROWS)]
        assert [tag["dropped"] for tag in claim.meta.tags] == [tag["prompt_uid"] == "1" for tag in claim.meta.tags]
        assert {tag["weight_version"] for tag in claim.meta.tags} == {version}
        report = here.loop.report()
        assert [sample.uid for sample in report.samples] == [str(first), str(first + 1)]
        assert report.metrics["generated_tokens"] == STEP * ROWS * 2
        assert here.call("metrics")["replay/admitted"] == first + STEP  # nothing before its weights are announced
        here.call("trained", claim.uids)
        here.announce(version + 1)
    with pytest.raises(EngineDiedError, match="engine-0 died"):
        here.claim()
    progress = here.loop.progress(5.0)
    assert (progress.ended, progress.error) == (True, "EngineDiedError: engine-0 died")
    submitted = [sorted({request.split("/")[0] for request in batch}, key=int) for batch in here.pool.submitted]
    assert submitted == [[str(step * STEP + row) for row in range(STEP)] for step in range(5)]
    events = here.stream.events
    for step in range(4):
        observed = [events.index(f"observe {step * STEP + row}") for row in range(STEP)]
        assert observed == sorted(observed)
        assert observed[-1] < events.index(f"draw {(step + 1) * STEP}")


def test_groups_that_a_synchronous_step_does_not_want_are_replaced_the_same_way_in_every_run(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    """Under the same weights, in one submission; what was drawn for that and is left over comes next, also after a resume."""

    def steps(here: Rig, versions: range) -> list[str]:
        uids: list[str] = []
        for version in versions:
            here.announce(version)
            first = here.claim()
            here.call("drop", first.uids[:2], "zero_variance")
            second = here.claim(2)
            here.call("drop", second.uids[1:], "zero_variance")
            third = here.claim(1)
            claims = (first, second, third)
            assert {tag["weight_version"] for claim in claims for tag in claim.meta.tags} == {version}
            uids += [uid for claim in claims for uid in claim.uids]
            here.call("trained", [*first.uids[2:], *second.uids[:1], *third.uids])
        return uids

    whole, here = rig(Pool(seed=1)), rig(Pool(seed=2))
    undisturbed, before = steps(whole, range(4)), steps(here, range(2))
    state = here.cut(tmp_path)
    assert (state.flying, state.scoring, state.begun) == ((), (), {})
    assert state.drawn
    there = rig(Pool(seed=3), resumes=tmp_path)
    assert undisturbed == [str(number) for number in range(4 * 6)]
    assert before + steps(there, range(2, 4)) == undisturbed
    assert [len(batch) // ROWS for batch in whole.pool.submitted[:12]] == [3, 2, 1] * 4
    assert here.pool.submitted[:6] + there.pool.submitted[:6] == whole.pool.submitted[:12]
    numbers = {event: here.stream.events.index(event) for event in here.stream.events}
    assert numbers["observe 4"] < numbers["draw 6"]  # the curriculum knows of a batch before the next is drawn


def test_ahead_a_dropped_group_is_replaced(rig: Callable[..., Rig]) -> None:
    here = rig(Pool(seed=3), AsyncConfig(stall_timeout_s=60), ahead=True, dropped=("1",))
    assert "1" not in here.claim().uids
    deadline = time.monotonic() + WAIT_S  # group 1 may be scored after the three that the claim took
    while "replay/failed" not in here.call("metrics"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert here.call("metrics")["replay/failed"] == 1


def test_a_resumed_synchronous_run_goes_on_as_if_nothing_had_been(rig: Callable[..., Rig], tmp_path: Path) -> None:
    def steps(here: Rig, versions: range) -> list[Any]:
        done = []
        for version in versions:
            here.announce(version)
            done.append(here.claim())
            here.call("trained", done[-1].uids)
        return done

    whole = rig(Pool(seed=1), dropped=("1",))
    undisturbed = steps(whole, range(4))
    here = rig(Pool(seed=2), dropped=("1",))
    before = steps(here, range(2))
    state = here.cut(tmp_path)
    assert (state.flying, state.scoring, state.begun) == ((), (), {})
    there = rig(Pool(seed=3), dropped=("1",), resumes=tmp_path)
    after = steps(there, range(2, 4))
    assert [claim.uids for claim in before + after] == [claim.uids for claim in undisturbed]
    assert [claim.meta.keys for claim in before + after] == [claim.meta.keys for claim in undisturbed]
    assert here.pool.submitted[:2] + there.pool.submitted[:2] == whole.pool.submitted[:4]
    assert there.call("metrics")["replay/trained"] == 4 * STEP
    seen = [event for event in there.stream.events if event.startswith("observe")]
    assert seen == [f"observe {number}" for number in range(2 * STEP, 4 * STEP)]
    assert f"draw {int(state.stream['position']) - 1}" not in there.stream.events


def test_an_asynchronous_run_goes_on_in_the_midst_of_everything(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Three lives, each from a cut of the one before: nothing is lost, doubled, generated twice, or favoured for its length."""
    rules = AsyncConfig(max_trajectory_age_steps=3, sampler="weight_fifo", stall_timeout_s=60)
    options: dict[str, Any] = {"rules": rules, "ahead": True, "dropped": ("4",), "seconds": 0.05}
    here = rig(SlowPool(0), **options)
    versions, trained, again, seeds = count(), list[str](), set[str](), dict[str, int]()
    for _ in range(3):
        state = None
        while state is None or not (state.scoring and any(group.results for group in state.flying)):
            here.announce(next(versions))
            trained += train_and_check(here)
            state = here.cut(tmp_path)
        seeds |= here.pool.asked  # type: ignore[attr-defined]
        there = rig(SlowPool(state.ledger["version"]), **options, resumes=tmp_path)
        here.end()
        again |= {group.uid for group in (*state.flying, *state.scoring)}
        check_resumed(there, state, seeds)
        here = there
    here.announce(next(versions))
    final = here.loop.cut(9, WAIT_S)
    check_unreported(final)
    assert final.ledger["counts"]["failed"] == 1
    assert not any(name.startswith("evicted") for name in final.ledger["counts"])
    held = {group["uid"] for group in final.ledger["groups"]} | {drawn.uid for drawn in final.drawn}
    assert len(set(trained)) == len(trained)
    assert set(trained) & again
    assert sorted([*trained, *held, "4"], key=int) == [str(number) for number in range(final.stream["position"])]


def train_and_check(here: Rig) -> tuple[str, ...]:
    """One step. Every response of every group is as long as its seed says: none is missing for being long, or short."""
    claim = here.claim()
    assert max(claim.ages) <= 3
    seeds = [seeded_request(0, request_id(uid, row), [], 1, 1.0, 1.0).seed for uid in claim.uids for row in range(ROWS)]
    assert [tag["response_length"] for tag in claim.meta.tags] == list(map(length, seeds))
    here.call("trained", claim.uids)
    uids: tuple[str, ...] = claim.uids
    return uids


def check_resumed(there: Rig, state: RolloutState, seeds: dict[str, int]) -> None:
    """It asks for what was lacking, with the same seeds; and the curriculum hears of every group, in the order of drawing."""
    kept = {request_id(group.uid, row) for group in (*state.flying, *state.scoring) for row in group.results}
    lacking = {request_id(group.uid, row) for group in state.flying for row in range(ROWS)} - kept
    deadline = time.monotonic() + WAIT_S
    while not (there.pool.submitted and [event for event in there.stream.events if event.startswith("observe")]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asked: dict[str, int] = dict(there.pool.asked)  # type: ignore[attr-defined]
    assert set(there.pool.submitted[0]) == lacking
    assert not kept & asked.keys()
    assert {name: seed for name, seed in asked.items() if name in lacking} == {name: seeds.get(name, asked[name]) for name in lacking}
    seen = [int(event.split()[1]) for event in there.stream.events if event.startswith("observe")]
    assert seen == list(range(int(next(iter(state.begun))), seen[-1] + 1))


def check_unreported(state: RolloutState) -> None:
    """Nobody asked for a report: each group is in the next one, once, whichever life it was finished in."""
    seen = [str(number) for number in range(min(map(int, state.begun)))]
    assert [sample.uid for sample in state.unreported.samples] == seen[:2]
    assert len(state.unreported.verdicts) == ROWS * len(seen)
    unfinished = {group.uid: group for group in (*state.flying, *state.scoring)}
    finished = [str(number) for number in range(state.stream["position"] - len(state.drawn)) if str(number) not in unfinished]
    seeds = [seeded_request(0, request_id(uid, row), [], 1, 1.0, 1.0).seed for uid in finished for row in range(ROWS)]
    held = [len(result.token_ids) for group in unfinished.values() for result in group.results.values()]
    assert state.unreported.tokens == sum(map(length, seeds)) + sum(held)


def test_a_cut_says_why_there_is_none(rig: Callable[..., Rig]) -> None:
    here = rig(Pool(seed=1, dies_at=1))
    here.loop.progress(WAIT_S)
    with pytest.raises(EngineDiedError, match="engine-0 died"):
        here.loop.cut(1, WAIT_S)
    there = rig(Pool(seed=1))
    there.loop.stop()
    with pytest.raises(RuntimeError, match="cut: generation has ended: it was stopped"):
        there.loop.cut(1, WAIT_S)
