"""CUDA graphs asked for where there are none: everything eager, bit for bit as without them, and counted. (Captures: tests/gpu.)"""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a policy that picks its device would take the GPU")


def test_on_a_cpu_every_pass_is_eager_and_counted(results: Any) -> None:
    (asked,), (plain,) = results("TP1")["graphs"], results("TP1")["bucketed"]
    assert not asked["setup"]["cuda_graphs"]
    micro_batches = 3  # six rows, two at once
    for metrics, expected in zip(asked["metrics"], plain["metrics"], strict=True):
        counts = {name.removeprefix("cuda_graph/"): metrics.pop(name) for name in list(metrics) if name.startswith("cuda_graph/")}
        assert counts == {"replays": 0, "captures": 0, "eager": micro_batches, "dropped": 0}
        assert metrics == expected
    for name, tensor in plain["weights"].items():
        assert torch.equal(asked["weights"][name], tensor)
    assert all(torch.equal(asked["policy_logprobs"][key], value) for key, value in plain["policy_logprobs"].items())
