"""A run on a disk that it fills: it ends before a write would fail, with its last checkpoint standing."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

from actors.checkpoints.store import CheckpointStore
from tests.e2e.commands import start_command
from tests.e2e.conftest import SHORT
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow
EVERY = ["checkpoint.every_steps=1", "checkpoint.keep_every=1", "steps=50"]


def test_a_run_that_fills_its_disk_ends_saved(server: str, tmp_path: Path) -> None:
    """Each checkpoint has 1 MiB, the disk 24, of which a run leaves 16 to others."""
    disk = tmp_path / "disk"
    (tmp_path / "logs").mkdir()
    overrides = [*SHORT, *EVERY, f"output_dir={disk}"]
    command = start_command("grpo", tmp_path / "logs", uuid.uuid4().hex, *overrides, server=server, disk=(disk, 24))
    said = command.communicate(timeout=WAIT_S)[0]
    assert command.returncode == 1, said
    found = re.search(r"NoSpaceError: .*the disk has no room for another checkpoint and the trained model: saved after step (\d+)", said)
    assert found, said
    assert re.search(rf"{disk}/arithmetic-cpu: the run may write .* MiB there \(hf .*, 50 checkpoints .*\), and .* are free", said), said
    after = tmp_path / "disk-after" / "arithmetic-cpu" / "checkpoints"
    store = CheckpointStore(str(after), tmp_path)
    last = int(found[1])
    assert store.steps() == list(range(1, last + 1))
    assert last >= 2
    assert {path.name for path in (after / "data").iterdir()} == {Path(store.at(step).folder).name for step in store.steps()}
    for step in store.steps():
        with store.fetched(store.at(step)):
            pass
    assert not (after.parent / "hf").exists()
    assert (after.parent / "ray-logs" / "raylet.out").exists()
