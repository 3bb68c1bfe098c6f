"""What a claim reports of its groups, and what is left of it without some of them."""

from __future__ import annotations

import pytest

from actors.data_plane.meta import KVBatchMeta, mint_key
from actors.rollout.ledger_types import Claim
from tasks.rollout import _without, staleness


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
