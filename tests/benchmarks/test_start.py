"""benchmarks.start: whose process is whose."""

from __future__ import annotations

import pytest

from benchmarks.start import part_of


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("ray::engine-0:Engine.__init__", "engine"),
        ("ray::EngineActor", "engine"),
        ("VLLM::EngineCore", "engine"),
        ("python .../torch/_inductor/compile_worker/__main__.py --workers=16 --parent=7", "Inductor's compilers"),
        ("ray::policy-worker-0:PolicyWorkerActor.setup", "policy workers"),
        ("ray::policy:PolicyGroup.ready", "policy group"),
        ("ray::data_plane_storage_0:StorageUnit.__init__", "data plane"),
        ("ray::RuntimeEnvAgent", "Ray"),
        ("ray::IDLE", "Ray"),
        ("python -m actors.environments.scoring.zygote 40", "rewards"),
        ("python -m prefect server start --host 127.0.0.1 --port 4200", "Prefect's server"),
        ("python -m flows.console run arithmetic-cpu", "flow"),
        ("/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/grpo-abcdefgh/r", "Ray"),
    ],
)
def test_parts(command: str, part: str) -> None:
    assert part_of(command) == part


def test_a_fork_without_a_title_is_the_engines_core() -> None:
    server = "python -P -W ignore -m actors.forks.server 5"
    assert part_of(server, "python -m flows.console run arithmetic-cpu") == "imports"
    assert part_of(server, server) == "engine"
