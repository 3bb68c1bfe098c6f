"""The one rollout path with the real ledger, scoring and an in-memory data plane; engines and verifier are stand-ins of a few lines."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
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

    def __init__(self, dropped: Sequence[str]) -> None:
        self._dropped = dropped

    def score(self, problems: list[Problem], responses: list[Response]) -> list[Verdict]:
        return [Verdict(1.0, "scored", True, "group" if problem.uid in self._dropped else "no") for problem in problems]


class Encoder:
    """Text of token ids."""

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Stream:
    """Prompts 0, 1, 2 ..; notes the order in which they are drawn and observed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._next = count()

    def draw_encoded(self, wanted: int) -> list[DrawnPrompt]:
        drawn = [str(next(self._next)) for _ in range(wanted)]
        self.events += [f"draw {uid}" for uid in drawn]
        return [DrawnPrompt(uid, Problem(uid, uid, ""), [7, int(uid)]) for uid in drawn]

    def observe(self, problem: Problem, accuracy: float) -> None:
        self.events.append(f"observe {problem.uid}")

    def metrics(self) -> dict[str, float]:
        return {}


class Pool:
    """Answers in any order, some at a time."""

    def __init__(self, seed: int, dies_at: int | None = None) -> None:
        self._luck, self._dies_at = random.Random(seed), dies_at
        self.submitted: list[list[str]] = []
        self.sleeps = self.version = 0
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

    def sleep(self) -> None:
        self.sleeps += 1

    def news(self) -> tuple[list[Change], list[str]]:
        return [], []


class Rig:
    """A loop and its ledger."""

    def __init__(self, pool: Pool, rules: AsyncConfig, ahead: bool, dropped: Sequence[str] = ()) -> None:
        self.pool, self.stream, namespace = pool, Stream(), f"loop-{next(numbers)}"
        remote: Any = ray.remote
        self._scorer = remote(num_cpus=0)(Verifier).remote(dropped)
        options = ledger_actor_class().options(name=names.LEDGER, namespace=namespace, num_cpus=0)
        self.ledger = options.remote(rules, STEP, 0, "train", plane, int)
        self.call("ready")
        stand_ins: Any = (self.stream, self.pool, Encoder())
        self.loop = RolloutLoop(
            stream=stand_ins[0],
            rollout=RolloutConfig(prompts_per_step=STEP, responses_per_prompt=ROWS),
            seed=0,
            pool=stand_ins[1],
            scoring=Scoring(self._scorer, stand_ins[2], plane(), "train", WAIT_S, replaces=ahead),
            ledger=self.ledger,
            at_once=STEP,
            ahead=ahead,
            sleeps=not ahead,
            shown=2,
        )

    def call(self, method: str, *arguments: Any) -> Any:
        return wait(getattr(self.ledger, method).remote(*arguments), who="ledger", what=method, timeout_s=WAIT_S)

    def announce(self, version: int) -> None:
        self.pool.version = version
        self.call("set_version", version)

    def claim(self) -> Any:
        reply: ClaimReply = self.call("claim", STEP, 30.0)
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
    assert here.pool.sleeps >= 4
    events = here.stream.events
    for step in range(4):
        observed = [events.index(f"observe {step * STEP + row}") for row in range(STEP)]
        assert observed == sorted(observed)
        assert observed[-1] < events.index(f"draw {(step + 1) * STEP}")


def test_ahead_a_dropped_group_is_replaced(rig: Callable[..., Rig]) -> None:
    here = rig(Pool(seed=3), AsyncConfig(stall_timeout_s=60), ahead=True, dropped=("1",))
    assert "1" not in here.claim().uids
    deadline = time.monotonic() + WAIT_S  # group 1 may be scored after the three that the claim took
    while "replay/failed" not in here.call("metrics"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert here.call("metrics")["replay/failed"] == 1
