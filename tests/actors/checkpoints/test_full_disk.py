"""A disk that is really full: what stood stands, and nothing half-written stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.disks import with_disk
from tests.patience import WAIT_S

SCRIPT = """
import errno, sys
from pathlib import Path
import pytest
from actors.checkpoints.errors import CheckpointError
from actors.checkpoints.store import CheckpointStore
from actors.space import NoSpaceError, free_bytes, require
from configs.base import ConfigError
from tasks.lease import Lease
from tasks.retraining.registry import Registry
from tests.actors.checkpoints.test_store import RULES, filled, manifest_of, write
from tests.tasks.retraining.test_registry import attempt

disk, other = Path(sys.argv[1]), Path(sys.argv[2])
store = CheckpointStore(str(disk / "checkpoints"), other)
first = write(store, 1)

def fill(left):
    (disk / "filler").write_bytes(bytes(free_bytes(disk) - left))

# The draft's own files do not fit.
fill(100_000)
draft = store.draft(2)
with pytest.raises(OSError) as caught:
    (draft.directory / "weights").write_bytes(bytes(200_000))
assert caught.value.errno == errno.ENOSPC
assert free_bytes(disk) == 0
store.discard(draft)
assert not draft.directory.exists()

# They fit, and the manifest does not.
draft = filled(store, 2)
(draft.directory / "more").write_bytes(bytes(free_bytes(disk)))
with pytest.raises(ConfigError, match="No space left on device"):
    store.publish(draft, manifest_of(2), RULES)
store.discard(draft)
assert store.newest() == first
with store.fetched(first):
    pass
assert sorted(path.name for path in (disk / "checkpoints").rglob("*") if path.is_file() and path.parent.name != "policy") == [
    "metrics.jsonl", "rollout.json", "step-000001.json"]

# A draft that has become a checkpoint is none that may be discarded.
(disk / "filler").unlink()
draft = filled(store, 3)
third = store.publish(draft, manifest_of(3), RULES)
store.discard(draft)
with store.fetched(third):
    pass

# A model does not begin to be copied.
registry = Registry(str(disk / "registry"))
lease = Lease(registry.lease_folder, "a night", 60)
(other / "model").mkdir()
(other / "model" / "model.safetensors").write_bytes(bytes(2**20))
with lease.held(), pytest.raises(NoSpaceError, match="no room for the new model: 17.0 MiB are needed, and "):
    registry.promote(other / "model", attempt(None), {}, lease, 5)
assert registry.folder.names() == ["lease"]
"""


def test_a_full_disk_leaves_what_stood(tmp_path: Path) -> None:
    disk, other = tmp_path / "disk", tmp_path / "other"
    other.mkdir()
    command = with_disk(disk, 4, [sys.executable, "-c", SCRIPT, str(disk), str(other)])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
