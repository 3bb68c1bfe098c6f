"""What a claim reports of its groups, what is left of it without some of them, and how dynamic sampling fills a step."""

from __future__ import annotations

from itertools import count, islice
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.logging import disable_run_logger

from actors.data_plane.meta import KVBatchMeta, mint_key
from actors.rollout.audit import audit
from actors.rollout.journal import Finished, Record, parse
from actors.rollout.ledger import Ledger
from actors.rollout.ledger_actor import ClaimReply
from actors.rollout.ledger_types import Claim
from actors.rollout.staleness import Refusal, build
from actors.rollout.transitions import Admitted, Transition
from configs.loader import load
from configs.rollout import RolloutConfig
from tasks import rollout as stage
from tasks.rollout import _without, fill, staleness
from tests.actors.rollout.journals import began, written


def meta(versions: list[list[int]]) -> KVBatchMeta:
    rows = [(str(uid), row, count) for uid, group in enumerate(versions) for row, count in enumerate(group)]
    return KVBatchMeta(
        partition_id="train",
        keys=tuple(mint_key(0, uid, row) for uid, row, _ in rows),
        sequence_lengths=tuple(range(1, len(rows) + 1)),
        tags=tuple({"prompt_uid": uid, "weight_version": 0, "weight_versions": count} for uid, _, count in rows),
    )


def test_staleness_of_groups_and_version_mix_of_responses() -> None:
    found = staleness([0, 2, 2, 1], meta([[1, 1], [3, 1], [2, 1], [1, 1]]))
    assert found == pytest.approx(
        {
            "staleness/mean": 1.25,
            "staleness/max": 2.0,
            "staleness/age_0": 0.25,
            "staleness/age_1": 0.25,
            "staleness/age_2": 0.5,
            "weight_versions/mean": 11 / 8,
            "weight_versions/max": 3.0,
            "weight_versions/mixed": 2 / 8,
        }
    )


def test_a_claim_without_some_groups_keeps_the_others_whole() -> None:
    whole = Claim(("0", "1", "2"), meta([[1, 1], [1, 1], [1, 1]]), 5, (0, 1, 2))
    left = _without(whole, ["1"])
    assert (left.uids, left.version, left.ages) == (("0", "2"), 5, (0, 2))
    assert left.meta.keys == ("v0_p0_g0", "v0_p0_g1", "v0_p2_g0", "v0_p2_g1")
    assert left.meta.sequence_lengths == (1, 2, 5, 6)


class SynchronousRun:
    """The ledger of a synchronous run, and beside it what the collector's loop does: what is admitted together ends in any order.

    Of the prompts 0, 1, 2 .. some are dead (their rewards are equal), and some fail.
    """

    def __init__(self, step: int, luck: Random, kinds: list[str]) -> None:
        self.journal: list[Record | Transition] = [began("in_order", 0)]
        self._luck, self._kinds = luck, kinds
        self._next, self.rules = 0, load("arithmetic-cpu", [f"rollout.prompts_per_step={step}"]).ledger
        held = self.rules.capacity(step)
        self.ledger = Ledger(
            build(self.rules, step), capacity=held, max_in_flight=held, version=0, clear=lambda keys: None, clock=lambda: 0.0,
            journal=self.journal.extend,
        )  # fmt: skip

    def kind(self, number: int) -> str:
        return self._kinds[number] if number < len(self._kinds) else "alive"

    def claim(self, groups: int) -> Claim:
        while (claim := self.ledger.claim(groups)) is None:
            begun: list[Admitted] = []
            while isinstance(place := self.ledger.reserve(str(self._next), 2), Admitted):
                begun.append(place)
                self._next += 1
            assert begun
            self._luck.shuffle(begun)
            for place in begun:
                kind = self.kind(int(place.uid))
                if kind == "fails":
                    self.ledger.fail(place.uid, "unlucky")
                    continue
                rewards = [0.0, 0.0 if kind == "dead" else 1.0]
                tags = tuple(
                    {
                        "prompt_uid": place.uid,
                        "weight_version": place.version,
                        "weight_versions": 1,
                        "reward": r,
                        "dropped": False,
                        "masked": False,
                    }
                    for r in rewards
                )
                stored = KVBatchMeta(partition_id="train", keys=place.keys, sequence_lengths=(5, 5), tags=tags)
                assert self.ledger.commit(place.uid, stored, place.version, place.version)
        assert isinstance(self.ledger.reserve("early", 2), Refusal)  # nobody draws prompts that no step asked for
        return claim


@given(
    step=st.integers(1, 5), batches=st.integers(1, 4), kinds=st.lists(st.sampled_from(["alive", "dead", "dead", "fails"]), max_size=60),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_a_synchronous_step_draws_until_its_batch_is_full_or_its_budget_spent(step: int, batches: int, kinds: list[str], seed: int) -> None:
    """The same groups in the same order, in whichever order they end; and the journal's audit is clean."""
    run = SynchronousRun(step, Random(seed), kinds)
    stored = (number for number in count() if run.kind(number) != "fails")  # the prompts that a rollout meets, in their order
    for version in range(4):
        kept, missing, used = list[int](), step, 0
        while missing and used < batches:  # the rule as the settings say it
            drawn, used = list(islice(stored, missing)), used + 1
            alive = [number for number in drawn if run.kind(number) == "alive"] if used < batches else drawn
            kept, missing = kept + alive, missing - len(alive)
        claims = fill(step, batches, run.claim, lambda dead: run.ledger.drop(dead, "zero_variance"))
        uids = [uid for claim in claims for uid in claim.uids]
        assert [int(uid) for uid in uids] == kept
        assert len(uids) == step
        assert len(claims) == used
        assert {claim.version for claim in claims} == {version}
        assert {age for claim in claims for age in claim.ages} == {0}
        run.ledger.trained(uids)
        run.ledger.set_version(version + 1)
    run.ledger.clear()
    found = audit(parse(written([*run.journal, Finished()])))
    assert found.clean, found.verdict
    assert found.ends["trained"] == 4 * step


@pytest.mark.parametrize("sleep_s", [None, 7.0])
def test_engines_sleep_when_all_groups_are_there_and_not_before(monkeypatch: pytest.MonkeyPatch, sleep_s: float | None) -> None:
    run = SynchronousRun(2, Random(0), ["dead", "alive", "dead"])
    said: list[str] = []

    def ask(namespace: str, actor: str, timeout_s: float, method: Any, *arguments: Any) -> Any:
        said.append(method.__name__)
        match method.__name__:
            case "claim":
                return ClaimReply(run.claim(arguments[0]), (), {})
            case "drop":
                return run.ledger.drop(*arguments)
        assert timeout_s == sleep_s

    monkeypatch.setattr(stage, "ask", ask)
    wanted = RolloutConfig(prompts_per_step=2, dynamic_sampling=True, max_num_gen_batches=3)
    with disable_run_logger():
        found = stage.rollout.fn("run", 1, wanted, run.rules, sleep_s)
    assert isinstance(found, stage.Rollout)
    assert said == ["claim", "drop", "claim", "drop", "claim", *(["sleep_engines"] if sleep_s else [])]
    assert found.uids == ("1", "3")
    assert (found.metrics["groups/replaced"], found.metrics["groups/gen_batches"]) == (2, 3)
