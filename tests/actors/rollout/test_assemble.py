"""Token columns against a row built by hand; keys and tags of a group."""

import pytest
import torch

from actors.data_plane.meta import mint_key
from actors.rollout.assemble import group_meta, token_columns


def test_columns_of_two_rows() -> None:
    columns = token_columns([[5, 6, 7], [8]], [[1, 2], [3]], [[-0.5, -0.25], [-1.0]])
    assert columns["input_ids"][0].tolist() == [5, 6, 7, 1, 2]
    assert columns["input_ids"][0].dtype == torch.int64
    assert columns["token_mask"][0].tolist() == [False, False, False, True, True]
    assert columns["generation_logprobs"][0].tolist() == [0, 0, 0, -0.5, -0.25]
    assert columns["generation_logprobs"][1].dtype == torch.float32
    assert columns["sample_mask"][1].shape == ()


def test_supervised_rows_have_no_generation_logprobs() -> None:
    assert set(token_columns([[1]], [[2]])) == {"input_ids", "token_mask", "sample_mask"}


def test_a_response_without_tokens_and_a_wrong_count_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1: a response without tokens"):
        token_columns([[1], [1]], [[2], []], [[-1.0], []])
    with pytest.raises(ValueError, match="row 0: 1 log-probabilities for 2 response tokens"):
        token_columns([[1]], [[2, 3]], [[-1.0]])


def test_group_meta_carries_uid_and_version_in_tags() -> None:
    meta = group_meta("train", "rollout", 4, "0.17", [9, 8], [{"reward": 1.0}, {"reward": 0.0}])
    assert meta.keys == (mint_key(4, "0.17", 0), mint_key(4, "0.17", 1)) == ("v4_p0.17_g0", "v4_p0.17_g1")
    assert meta.tags[1] == {"prompt_uid": "0.17", "weight_version": 4, "reward": 0.0}
    assert meta.sequence_lengths == (9, 8)
