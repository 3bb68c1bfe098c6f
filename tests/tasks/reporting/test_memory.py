"""Planned and measured memory side by side: the largest of all steps, of the stages that measured something."""

from __future__ import annotations

from pathlib import Path

from actors.models.memory_parts import GIB
from actors.models.memory_plan import GpuPlan, Phase, stages
from tasks.reporting.html import write_report
from tasks.reporting.memory import MemoryUse, Peaks
from tasks.reporting.summary import Summary, render_summary_text
from tests.tasks.reporting.runs import summary, write_run

PARTS = {"worker's weights": 2 * GIB, "worker's context": GIB, "engine's KV cache": 4 * GIB, "engine's weights": 2 * GIB}
PLAN = GpuPlan(
    "engine and policy worker",
    (Phase("logprob", PARTS | {"worker's activations": GIB}), Phase("train", PARTS | {"worker's activations": 3 * GIB})),
)
USE = MemoryUse(gpu_planned=12, gpu_measured=11.5, worker_planned=5, worker_measured=4.75)


def test_the_largest_of_all_steps_is_set_beside_the_plan() -> None:
    peaks = Peaks()
    assert not peaks
    for device, reserved in ((9.0, 4.75), (11.5, 4.5), (8.0, None)):
        peaks.see({"gpu_memory/train_device_gib": device, "gpu_memory/train_reserved_gib": reserved, "loss": 100.0})
    peaks.see({"gpu_memory/ref_logprob_reserved_gib": 2.5})
    assert peaks
    assert peaks.compared(stages([PLAN])) == {
        "ref_logprob": MemoryUse(gpu_planned=10, gpu_measured=None, worker_planned=3, worker_measured=2.5),
        "train": USE,
    }
    assert peaks.compared(stages([])) == {}


def test_a_worker_that_is_alone_on_its_gpu_is_all_that_torch_holds() -> None:
    alone = Phase("train", {"weights": 2 * GIB, "context": GIB, "communicators": GIB, "activations": 3 * GIB})
    assert alone.torch_of_worker == 5 * GIB


def test_the_report_shows_it_and_a_run_without_a_gpu_does_not(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    assert "Memory of a GPU" not in write_report(directory).read_text()
    summary(memory={"train": USE}).write(directory)
    assert Summary.read(directory.summary).memory == {"train": USE}
    page = write_report(directory).read_text()
    assert "Memory of a GPU" in page
    assert (
        '<tr><td>train</td><td class="num">12</td><td class="num">11.50</td><td class="num">5</td><td class="num">4.750</td></tr>' in page
    )
    assert "  GPU memory    train 11.50 GiB (planned 12)" in render_summary_text(summary(memory={"train": USE})).splitlines()
