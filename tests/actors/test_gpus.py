"""What nvidia-smi is asked, and what becomes of its answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.models.memory_plan import gpu_capacity
from actors.models.step_plan import gpu_name
from actors.node import query_gpus


def program(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only one on the path, beside the shell's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return tmp_path


def test_its_fields_come_as_text(folder: Path) -> None:
    program(folder, f"echo \"$@\" > {folder}/asked; printf 'NVIDIA H100 80GB HBM3, 81559\\nNVIDIA A100, 40960\\n'")
    assert query_gpus("name", "memory.total", only="0,1") == [["NVIDIA H100 80GB HBM3", "81559"], ["NVIDIA A100", "40960"]]
    assert (folder / "asked").read_text() == "--query-gpu=name,memory.total --format=csv,noheader,nounits --id=0,1\n"


def test_the_smallest_gpu_and_the_first_name(folder: Path) -> None:
    program(folder, "case $1 in *name) echo 'NVIDIA H100'; echo 'NVIDIA A100';; *) echo 81559; echo 40960;; esac")
    assert gpu_capacity() == 40960 * 2**20
    assert gpu_name() == "NVIDIA H100"


@pytest.mark.parametrize("script", ["echo '[N/A]'", "exit 9", "true"])
def test_a_gpu_that_does_not_say(folder: Path, script: str) -> None:
    program(folder, script)
    assert gpu_capacity() is None


def test_without_the_program(folder: Path) -> None:
    assert query_gpus("name") == []
    assert gpu_capacity() is gpu_name() is None
