"""benchmarks.rollout: both sides are asked the same, and what is said of the rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.preflight import prepare_model
from benchmarks.grpo_step import configure
from benchmarks.rollout import compare, draw


def test_vllm_alone_gets_the_collectors_requests(tmp_path: Path) -> None:
    config = configure("4x3x8", [], engines=1)
    first, second = draw(config, prepare_model(config, tmp_path), 2)
    assert len(first) == len(second) == 12
    assert len({request.seed for request in first + second}) == 24
    assert {(one.max_new_tokens, one.temperature, one.top_p) for one in first} == {(8, 1.0, 1.0)}
    assert [len({tuple(request.prompt_token_ids) for request in of[:3]}) for of in (first, second)] == [1, 1]
    assert {request.request_id for request in first}.isdisjoint(request.request_id for request in second)


def test_a_ratio_is_of_one_round() -> None:
    rows = [
        {"alone": 100.0, "generate": 110.0, "stored": 100.0},
        {"alone": 50.0, "generate": 60.0, "stored": 40.0},  # the host was slower: for both
        {"alone": 100.0, "generate": 100.0, "stored": 90.0},
    ]
    value, detail = compare(rows)
    assert value == pytest.approx(1.1)
    assert detail["spread"] == [1.0, 1.2]
    assert detail["stored_to_alone"] == pytest.approx(0.9)
