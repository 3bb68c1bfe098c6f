"""A worker on the CPU of a machine with GPUs does as on a machine without: the libraries for GPUs are installed there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from configs import settings
from tests.conftest import ROOT
from tests.patience import WAIT_S

CODE = """
import sys, torch
torch.cuda.is_available = lambda: True
from actors.policy.device import runtime
with runtime(torch.device("cpu")):
    import megatron.core.models.gpt.gpt_layer_specs, megatron.core.optimizer
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from torch.distributed.checkpoint import FileSystemWriter, save
    save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(sys.argv[1]), no_dist=True)
assert not HAVE_TE
"""


def test_neither_transformer_engine_nor_streams_of_cuda_are_asked(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine/pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from transformer_engine_torch import kernels\n")  # as there: no part of it without the GPU's
    environment = settings.child_environment(PYTHONPATH=f"{ROOT}:{tmp_path}")
    subprocess.run([sys.executable, "-c", CODE, str(tmp_path / "saved")], cwd=ROOT, env=environment, check=True, timeout=WAIT_S)
