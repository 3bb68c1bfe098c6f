"""A policy that was saved on one kind of device goes on on another. Run by `make gpu-check`."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
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
    found = []
    for number, (device, dtype) in enumerate((saved, resumed)):
        # A process each: Megatron's random states are of the device of a process's first worker.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            found.append(process.submit(stepped, device, dtype, model, tmp_path, resumes=number > 0).result())
    (before, loss_before), (after, loss_after) = found
    error = (before - after).abs()
    if "bfloat16" in (saved[1], resumed[1]):
        assert error.mean() < 2e-2
        assert loss_after == pytest.approx(loss_before, rel=2e-2, abs=2e-2)
    else:
        assert error.max() < 1e-4
        assert loss_after == pytest.approx(loss_before, rel=1e-4, abs=1e-4)


def stepped(device: str, dtype: str, model: Path, folder: Path, *, resumes: bool) -> tuple[torch.Tensor, float]:
    """Log-probabilities [tokens] at the state that is saved in the folder, now or before, and the loss of the step after it."""
    config = PolicyConfig.model_validate({
        "device": device, "dtype": dtype, "batching": {"mode": "padded", "micro_batch_size": 4}, "optimizer": {"lr": 1e-3},
    })  # fmt: skip
    plane, meta, _ = loaded()
    directory = folder / ("resumed" if resumes else "saved")
    directory.mkdir()
    with worker(config, model, plane, directory) as policy:
        plan = plan_batch(meta, config.batching, data_parallel=1).shards[0]
        if resumes:
            policy.load_state(str(folder / "state"), config.optimizer)
        else:
            policy.prepare_save()
            for _ in range(3):
                policy.train(plan, "grpo")
            save(policy, folder / "state")
            assert all(copy.is_pinned() == (device == "cuda") for copy in policy._saver._buffers.values())
        policy.logprob(plan, "policy_logprobs")
        logprobs = torch.cat([row.float().cpu() for row in plane.get(meta, ["policy_logprobs"])["policy_logprobs"]])
        return logprobs, policy.train(plan, "grpo")["loss"]


def save(policy: PolicyWorker, directory: Path) -> None:
    """The policy's state, written to its end."""
    policy.begin_save(str(directory))
    while policy.is_saving():
        pass
    results, _ = policy.save_results()
    policy.finish_save(str(directory), [results], weight_version=3)
