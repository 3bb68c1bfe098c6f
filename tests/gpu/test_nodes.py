"""GRPO over two nodes with a GPU each: one generates, one trains, weights go between them by NCCL. Run by `make gpu-check`.

Two raylets of one machine stand for the nodes. NCCL's ways within a machine (peer to peer, shared memory) are off: it takes sockets, as it
does between machines.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from configs import settings
from tasks.reporting.jsonl import read_lines
from tests.conftest import ROOT
from tests.e2e.commands import processes_with, start_command
from tests.gpu.test_refit import COMMON

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
ADDRESS, MARK = "127.0.0.1:6390", "grpo-two-raylets"
STEPS = 6


@pytest.fixture
def raylets(tmp_path: Path) -> Iterator[None]:
    """Two, of which each sees one GPU."""
    own = {
        "GRPO_TEST_MARK": MARK, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%p", "PYTHONPATH": settings.python_path(ROOT), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }  # fmt: skip
    options = ["--num-cpus=4", "--num-gpus=1", f"--object-store-memory={2**28}", "--disable-usage-stats"]
    host, _, port = ADDRESS.partition(":")
    head = [f"--node-ip-address={host}", "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={tmp_path.parent / 'r'}"]
    try:
        for gpu, where in enumerate((head, ["--node-ip-address=127.0.0.2", f"--address={ADDRESS}"])):
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *where],
                env=settings.child_environment(CUDA_VISIBLE_DEVICES=str(gpu), **own), check=True, timeout=120, stdout=subprocess.PIPE,
            )  # fmt: skip
        yield
    finally:
        left = [psutil.Process(pid) for pid in processes_with(MARK)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)


def test_a_run_over_two_nodes(raylets: None, tmp_path: Path) -> None:
    common = [one for one in COMMON if not one.startswith("policy.batching")]
    own = [
        "mode=async",
        "policy.loss.importance_sampling=token",
        "placement=separate",
        "generation.executor=async",
        f"steps={STEPS}",
        f"validate_every={STEPS}",
    ]
    command = start_command("grpo", tmp_path, MARK, *common, *own, RAY_ADDRESS=ADDRESS)
    said, _ = command.communicate(timeout=400)
    assert command.returncode == 0, said
    rows = read_lines(tmp_path / "latest/metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row][-1] == STEPS, rows
    ways = "".join(log.read_text(errors="replace") for log in tmp_path.glob("nccl.*"))
    assert "via NET/Socket" in ways
    assert "via P2P" not in ways
    assert "via SHM" not in ways
