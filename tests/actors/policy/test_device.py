"""The CPU shim and the rendezvous, each in a process of its own: the shim changes torch for good."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actors.policy import device as devices
from tests.patience import WAIT_S

SHIM = """
import threading, torch
from actors.policy import device as devices
def use():
    with devices.runtime(torch.device("cpu")):
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2, device=0).cuda().device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        with devices.runtime(torch.device("cpu")):
            assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"
    done.append(1)
done = []
use()
thread = threading.Thread(target=use)  # a compiled graph calls on a thread of its own
thread.start(); thread.join()
assert len(done) == 2
"""
FUSED = """
import sys, types, torch
from importlib.machinery import ModuleSpec
class Installed:
    # Transformer Engine, as far as Megatron looks at it when it is imported: every name is there.
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "transformer_engine" else None
    def create_module(self, spec):
        return types.ModuleType(spec.name)
    def exec_module(self, module):
        module.__version__ = "1.0"
        module.__getattr__ = named
class Named(type):
    def __getattr__(cls, name):
        return named(name)
def named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Named(name, (), {"__module__": "transformer_engine"})
sys.meta_path.insert(0, Installed())
from actors.policy import device as devices
with devices.runtime(torch.device("cpu")):
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads
print(clip_grads.l2_norm_impl.__name__, clip_grads.multi_tensor_scale_impl.__name__, optimizer.Adam.__module__)
"""
ALONE = """
import sys, torch
from actors.policy import device as devices
from configs.policy import ParallelConfig
with devices.runtime(torch.device("cpu")):
    devices.init_distributed(torch.device("cpu"), ParallelConfig(data=2), int(sys.argv[1]), sys.argv[2], seed=0, timeout_s=2)
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=WAIT_S)


def test_the_shim_belongs_to_the_block_and_to_every_thread() -> None:
    result = run(SHIM)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_for_the_others_ends_with_an_error_that_names_them(rank: int, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/rendezvous"
    result = run(ALONE, str(rank), address)
    assert result.returncode == 1
    assert f"PeerLostError: policy worker {rank} of 2 did not meet the others at {address} within 2 s" in result.stderr


def test_on_a_cpu_gradients_stay_away_from_kernels_for_gpus() -> None:
    """Also where Transformer Engine is installed, and the process sees a GPU."""
    done = run(FUSED)
    assert done.stdout.split() == ["local_multi_tensor_l2_norm", "local_multi_tensor_scale", "torch.optim.adamw"], done.stderr


def test_choose() -> None:
    assert devices.choose("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert devices.choose("auto").type == "cpu"
        with pytest.raises(RuntimeError, match=r"policy\.device is 'cuda'"):
            devices.choose("cuda")
