"""Token columns against a row built by hand; keys and tags of a group."""

from typing import Any

import torch

from actors.data_plane.meta import mint_key
from actors.environments.scoring.verdict import Verdict
from actors.generation.types import GenerationResult
from actors.rollout.assemble import NO_VERSION, ROLLOUT_FIELDS, Trajectory, group_rows, token_columns
from actors.rollout.transitions import Admitted


def test_columns_of_two_rows() -> None:
    rows = [Trajectory().with_context(prompt).with_response(*sampled) for prompt, *sampled in (
        ([5, 6, 7], [1, 2], [-0.5, -0.25], [4, 4]), ([8], [3], [-1.0], [4]),
    )]  # fmt: skip
    columns = token_columns(rows)
    assert columns["input_ids"][0].tolist() == [5, 6, 7, 1, 2]
    assert columns["input_ids"][0].dtype == torch.int64
    assert columns["token_mask"][0].tolist() == [False, False, False, True, True]
    assert columns["generation_logprobs"][0].tolist() == [0, 0, 0, -0.5, -0.25]
    assert columns["generation_logprobs"][1].dtype == torch.float32
    assert columns["sample_mask"][1].shape == ()


def test_a_demonstration_was_sampled_by_no_weights() -> None:
    row = Trajectory.demonstration([1], [2, 3])
    assert (row.loss_mask, row.logprobs, row.versions) == ((False, True, True), (0, 0, 0), (NO_VERSION,) * 3)


def test_what_the_environment_says_between_two_turns_is_context() -> None:
    row = Trajectory().with_context([1]).with_response([2, 3], [-0.5, -1.0], [4, 5]).with_context([6]).with_response([7], [-2.0], [5])
    assert row.token_ids == (1, 2, 3, 6, 7)
    assert row.loss_mask == (False, True, True, False, True)
    assert row.logprobs == (0, -0.5, -1.0, 0, -2.0)
    assert row.versions == (NO_VERSION, 4, 5, NO_VERSION, 5)
    assert row.sampled_by == (4, 5, 5)
    assert len(row) == 5


def rows_of(uid: str, prompt: list[int], results: list[GenerationResult], verdicts: list[Verdict], filtering: bool = False) -> Any:
    trajectories = [Trajectory.single_turn(prompt, result) for result in results]
    place = Admitted(uid, tuple(mint_key(4, uid, row) for row in range(len(results))), 4, None)
    cut = [result.finish_reason == "length" for result in results]
    return group_rows("train", place, trajectories, cut, verdicts, overlong_filtering=filtering)


def test_a_group_s_rows_carry_uid_versions_and_reward_in_tags() -> None:
    results = [
        GenerationResult("0.17/0", [1, 2, 3], [-0.5, -0.25, -1.0], "stop", ((4, 1), (5, 2))),
        GenerationResult("0.17/1", [9, 9], [-2.0, -3.0], "length", ((5, 2),)),
    ]
    meta, columns = rows_of("0.17", [7, 8], results, [Verdict(1.0, "scored", True), Verdict(0.0, "scored", False)])
    assert meta.keys == (mint_key(4, "0.17", 0), mint_key(4, "0.17", 1)) == ("v4_p0.17_g0", "v4_p0.17_g1")
    assert meta.sequence_lengths == (5, 4)
    common = {"prompt_uid": "0.17", "weight_version": 4, "dropped": False}
    assert meta.tags == (
        common
        | {
            "start_version": 4,
            "end_version": 5,
            "weight_versions": 2,
            "reward": 1.0,
            "dropped": False,
            "masked": False,
            "response_length": 3,
            "truncated": False,
        },
        common
        | {
            "start_version": 5,
            "end_version": 5,
            "weight_versions": 1,
            "reward": 0.0,
            "dropped": False,
            "masked": False,
            "response_length": 2,
            "truncated": True,
        },
    )
    assert set(columns) == set(ROLLOUT_FIELDS)
    assert [row.tolist() for row in columns["weight_versions"]] == [[-1, -1, 4, 5, 5], [-1, -1, 5, 5]]
    assert columns["weight_versions"][0].dtype == torch.int32
    assert [row.tolist() for row in columns["input_ids"]] == [[7, 8, 1, 2, 3], [7, 8, 9, 9]]
    assert columns["generation_logprobs"][1].tolist() == [0, 0, -2.0, -3.0]


def test_a_dropped_response_keeps_its_row_and_counts_for_nothing() -> None:
    results = [GenerationResult(f"u/{row}", [1, 2], [-1.0, -1.0], "stop", ((4, 2),)) for row in range(3)]
    verdicts = [Verdict(1.0, "scored", True), Verdict(0.0, "timed_out", False, "sample"), Verdict(0.0, "scored", False)]
    meta, columns = rows_of("u", [7], results, verdicts)
    assert [tag["dropped"] for tag in meta.tags] == [False, True, False]
    assert [mask.item() for mask in columns["sample_mask"]] == [1, 0, 1]
    verdicts[1] = Verdict(0.0, "failed", False, "group")
    meta, columns = rows_of("u", [7], results, verdicts)
    assert [mask.item() for mask in columns["sample_mask"]] == [0, 0, 0]
    assert all(tag["dropped"] for tag in meta.tags)


def test_overlong_filtering_masks_what_was_cut_off_and_leaves_it_in_its_group() -> None:
    results = [GenerationResult(f"u/{row}", [1, 2], [-1.0, -1.0], why, ((4, 2),)) for row, why in enumerate(["stop", "length", "length"])]
    verdicts = [Verdict(1.0, "scored", True), Verdict(0.0, "scored", False), Verdict(0.0, "timed_out", False, "sample")]
    for filtering, masks in (False, [1, 1, 0]), (True, [1, 0, 0]):
        meta, columns = rows_of("u", [7], results, verdicts, filtering)
        assert [mask.item() for mask in columns["sample_mask"]] == masks
        assert [tag["masked"] for tag in meta.tags] == [mask == 0 for mask in masks]
        assert [tag["dropped"] for tag in meta.tags] == [False, False, True]
