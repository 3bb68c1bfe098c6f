"""CUDA graphs asked for where there are none: everything eager, bit for bit as without them, and counted. (Captures: tests/gpu.)"""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from configs.policy import ParallelConfig


def test_megatron_takes_the_options() -> None:
    from actors.policy.model import transformer_config

    shape = Qwen3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = transformer_config(shape, ParallelConfig(), torch.bfloat16, graphs=True)
    assert (config.cuda_graph_impl, config.cuda_graph_modules, config.use_te_rng_tracker) == ("full_iteration", [], True)
    assert transformer_config(shape, ParallelConfig(), torch.bfloat16).cuda_graph_impl == "none"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a policy that picks its device would take the GPU")
def test_on_a_cpu_every_pass_is_eager_and_counted(results: Any) -> None:
    (asked,), (plain,) = results("TP1")["graphs"], results("TP1")["bucketed"]
    assert "all passes are eager" in asked["setup"]["cuda_graphs"]
    # Six rows, two at once: three passes for the gradient, and before the first step as many for each column of log-probabilities.
    for metrics, expected, eager in zip(asked["metrics"], plain["metrics"], (9, 3, 3), strict=True):
        counts = {name.removeprefix("cuda_graph/"): metrics.pop(name) for name in list(metrics) if name.startswith("cuda_graph/")}
        assert counts == {"replays": 0, "captures": 0, "eager": eager, "dropped": 0}
        assert metrics == expected
    for name, tensor in plain["weights"].items():
        assert torch.equal(asked["weights"][name], tensor)
    assert all(torch.equal(asked["policy_logprobs"][key], value) for key, value in plain["policy_logprobs"].items())
