"""A policy that was saved on one kind of device goes on on another. Run by `make gpu-check`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.data_plane.sharding import plan_batch
from actors.policy.worker import PolicyWorker
from configs.policy import PolicyConfig
from tests.actors.policy import tiny
from tests.gpu.test_policy import loaded, worker

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(("cuda", "bfloat16"), ("cpu", "float32"), id="gpu-to-cpu"),
        pytest.param(("cuda", "float32"), ("cpu", "float32"), id="gpu-to-cpu-float32"),
        pytest.param(("cpu", "float32"), ("cuda", "bfloat16"), id="cpu-to-gpu"),
    ],
)
def test_a_checkpoint_goes_on_on_another_device(saved: tuple[str, str], resumed: tuple[str, str], tmp_path: Path) -> None:
    """Log-probabilities are within the parity bounds; a step further is the same step."""
    model = tiny.write_model(tmp_path / "model", "qwen2", tied=True)
    plane, meta, _ = loaded()
    found, losses = [], []
    for number, (device, dtype) in enumerate((saved, resumed)):
        config = PolicyConfig.model_validate({
            "device": device, "dtype": dtype, "batching": {"mode": "padded", "micro_batch_size": 4}, "optimizer": {"lr": 1e-3},
        })  # fmt: skip
        directory = tmp_path / str(number)
        directory.mkdir()
        with worker(config, model, plane, directory) as policy:
            plan = plan_batch(meta, config.batching, data_parallel=1).shards[0]
            if number == 0:
                for _ in range(3):
                    policy.train(plan, "grpo")
                save(policy, tmp_path / "state")
            else:
                policy.load_state(str(tmp_path / "state"), config.optimizer)
            policy.logprob(plan, "policy_logprobs")
            found.append(torch.cat([row.float().cpu() for row in plane.get(meta, ["policy_logprobs"])["policy_logprobs"]]))
            losses.append(policy.train(plan, "grpo")["loss"])
    error = (found[0] - found[1]).abs()
    if "bfloat16" in (saved[1], resumed[1]):
        assert error.mean() < 2e-2
        assert losses[1] == pytest.approx(losses[0], rel=2e-2, abs=2e-2)
    else:
        assert error.max() < 1e-4
        assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-4)


def save(policy: PolicyWorker, directory: Path) -> None:
    """The policy's state, written to its end."""
    policy.begin_save(str(directory))
    while policy.is_saving():
        pass
    results, _ = policy.save_results()
    policy.finish_save(str(directory), [results], weight_version=3)
