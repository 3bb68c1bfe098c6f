"""CUDA-graph options that contradict each other, or have other names now, are refused before anything starts."""

from typing import Any

import pytest
from pydantic import ValidationError

from configs.base import ConfigError
from configs.loader import load
from configs.policy import PolicyConfig

ON: dict[str, Any] = {"impl": "full_iteration"}
PADDED = {"token_buckets": [64]}
PACKED = {"mode": "packed", "tokens_per_micro_batch": 64}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"enable_cuda_graph": True}, "policy.cuda_graph.impl=full_iteration"),
        ({"cuda_graph": {"external_cuda_graph": True}}, "policy.cuda_graph.impl=full_iteration"),
        ({"cuda_graph": {"cuda_graph_scope": "full"}}, "policy.cuda_graph.impl"),
        ({"cuda_graph": ON | {"modules": ["attn"]}}, "captures whole passes"),
        ({"cuda_graph": {"impl": "none", "modules": ["attn"]}}, "leave them out"),
        ({"cuda_graph": ON | {"buckets": [64]}}, "policy.batching.token_buckets"),
        ({"cuda_graph": {"impl": "local"}}, "'local'.*write impl=full_iteration"),
        ({"cuda_graph": {"impl": "transformer_engine"}}, "'transformer_engine'.*write impl=full_iteration"),
        ({"cuda_graph": ON | {"warmup_steps": 0}}, "warmup_steps"),
        ({"cuda_graph": ON, "batching": PADDED, "device": "cpu"}, "device is 'cpu'"),
        ({"cuda_graph": ON, "batching": PADDED, "parallel": {"pipeline": 2}}, "parallel.pipeline=1"),
        ({"cuda_graph": ON}, "batching.token_buckets"),
        ({"cuda_graph": ON, "batching": PACKED | {"token_buckets": [64]}}, "batching.sequence_buckets"),
        ({"cuda_graph": ON, "batching": PACKED | {"sequence_buckets": [8]}}, "batching.token_buckets"),
        ({"cuda_graph": ON, "batching": {"token_buckets": [64, 100]}}, "100 does not divide by 8"),
        ({"cuda_graph": ON, "batching": {"token_buckets": [24]}, "parallel": {"tensor": 2}}, "24 does not divide by 16"),
        ({"attention_dropout": 0.1}, "attention_dropout"),  # there is none, and so no option of that name
        ({"cuda_graph": ON, "batching": {"token_buckets": list(range(8, 8 * 34, 8))}}, "33 batching.token_buckets .* 32"),
    ],
)
def test_refused_with_what_to_write_instead(policy: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PolicyConfig(**policy)


@pytest.mark.parametrize("batching", [PADDED, PACKED | {"token_buckets": [64], "sequence_buckets": [8]}], ids=["padded", "packed"])
def test_taken(batching: dict[str, Any]) -> None:
    assert PolicyConfig(cuda_graph=ON, batching=batching).cuda_graph.warmup_steps == 3


def test_the_command_line_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"policy.*without batching\.token_buckets"):
        load("arithmetic-cpu", ["policy.cuda_graph.impl=full_iteration"])
    with pytest.raises(ConfigError, match=r"policy\.cuda_graph: cuda_graph_scope"):
        load("arithmetic-cpu", ["policy.cuda_graph.cuda_graph_scope=full"])
