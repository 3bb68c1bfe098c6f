"""`doctor --cluster`: what is judged, by values; and the probes on two raylets of this machine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flows.service import doctor
from flows.service.cluster_doctor import NodeFacts, problems, table, written_paths
from tests.patience import WAIT_S

VERSIONS = {"Python": "3.12.3", "ray": "2.59.0"}
WRITTEN = ["/runs", "/saves"]
WELL = NodeFacts(
    "10.0.0.1:1", versions=VERSIONS, paths={"/runs": True, "/saves": True}, gpus=[("H100", 79.0)],
    free_gib={"memory": 100.0, "disk": 100.0, "shared memory": 10.0}, clock_s=0.01, rates={"10.0.0.2:1": 900.0},
)  # fmt: skip


def test_a_node_that_has_all_has_no_problem() -> None:
    assert problems([WELL], VERSIONS, WRITTEN) == []
    assert table([WELL], []).splitlines()[1].split() == [
        "10.0.0.1:1", "3.12.3", "H100", "(79)", "100.0", "GiB", "100.0", "GiB", "10.0", "GiB", "+0.010", "s", "900", "MB/s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "words", "fails"),
    [
        (replace(WELL, lost="ImportError: no flows"), "cannot be probed: ImportError", True),
        (replace(WELL, versions=VERSIONS | {"ray": "2.60.0"}), "ray 2.60.0 (here 2.59.0)", True),
        (replace(WELL, versions={"Python": "3.12.3"}), "ray not installed (here 2.59.0)", True),
        (replace(WELL, paths={"/runs": True}), "/saves is not there: checkpoints and hf/ come from this node over Ray", False),
        (replace(WELL, paths={"/runs": False, "/saves": True}), "/runs cannot be written", True),
        (replace(WELL, free_gib={**WELL.free_gib, "disk": 1.0}), "1.0 GiB of disk free", True),
        (replace(WELL, clock_s=-2.0), "its clock is 2.0 s behind", False),
        (replace(WELL, rates={"10.0.0.2:1": 9.0}), "9 MB/s from 10.0.0.2:1", False),
        (replace(WELL, rates={"10.0.0.2:1": None}), "did not come within 20 s", True),
    ],
)
def test_each_problem_is_named_with_its_node_and_what_mends_it(node: NodeFacts, words: str, fails: bool) -> None:
    (found,) = problems([WELL, node], VERSIONS, WRITTEN)
    assert words in found.what
    assert found.node == node.address
    assert found.fix
    assert found.fails == fails
    assert [line.split()[0] for line in table([node], [found]).splitlines()[-2:]] == ["PROBLEM" if fails else "--", "└"]


def test_the_directories_that_a_recipe_has_written(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f'name: mine\noutput_dir: {tmp_path}/runs/deep\ncheckpoint: {{url: "s3://bucket/run"}}\nmodel: {{path: {tmp_path}/model}}\n'
    )
    assert written_paths(str(recipe)) == [str(tmp_path)]
    assert written_paths(None) == []


def test_without_an_address_nothing_is_joined(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor.main(["--cluster"]) == 2
    assert "RAY_ADDRESS" in capsys.readouterr().err


TWO_NODES = """
import os, shutil, sys
from actors import node as this
from configs import settings
settings.apply_defaults()
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster
from flows.service import doctor
os.makedirs(get_default_ray_temp_dir(), exist_ok=True)  # Cluster notes its address there, and no other Ray may have made it
assert doctor.main(["--cluster", "127.0.0.1:1"]) == 2
folder = this.private_folder("ray-")
node = {"temp_dir": str(folder), "node_ip_address": "127.0.0.1", "num_cpus": 1, "object_store_memory": 160 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
cluster.add_node(**node)
try:
    code = doctor.main(["--cluster", cluster.address, "--recipe", sys.argv[1]])
finally:
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
raise SystemExit(code)
"""


def test_two_nodes_are_probed(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"name: mine\noutput_dir: {tmp_path}\n")
    done = subprocess.run([sys.executable, "-c", TWO_NODES, str(recipe)], capture_output=True, text=True, timeout=2 * WAIT_S)
    assert "2 node(s)" in done.stdout, done.stderr
    assert "no Ray cluster answers" in done.stderr
    assert "is not there" not in done.stdout
    nodes = [line for line in done.stdout.splitlines() if line.startswith("127.0.0.1:")]
    assert [line.endswith(" MB/s") for line in nodes] == [True, True]  # a busy machine's are remarked as slow, once more
    assert "other versions" not in done.stdout
