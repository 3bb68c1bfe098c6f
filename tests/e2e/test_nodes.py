"""A run over three nodes computes what it computes on one, also when a node is lost meanwhile; what cannot work is refused.

Model, data and the run's directory, with its checkpoints, lie on the first node alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs import settings
from flows.grpo import grpo
from tasks.reporting.jsonl import read_lines
from tests.chaos.nodes import CPUS, HEALTH, recipe, start
from tests.conftest import ROOT
from tests.e2e.commands import said_until
from tests.e2e.conftest import Run
from tests.e2e.test_resume import numbers, samples
from tests.nodes import Node, cluster

pytestmark = pytest.mark.slow
# The lost node's processes are killed, which a check sees at once; one that only waits for a core must not count as lost.
PATIENT = {**HEALTH, "RAY_health_check_timeout_ms": "60000"}
REFUSED = """
import sys
import ray
from tasks import nodes

ray.init(address=sys.argv[1], namespace="refused", log_to_driver=False)
nodes._PLACE_S = 2.0
try:
    nodes.reserve("refused", "SPREAD", 0, {}, 1, {"num_cpus": 3}, 1, together=False)
except nodes.NoRoomError as error:
    print(error)
nodes.release("refused")
"""


@pytest.fixture
def spread(run_recorded: Callable[..., Run], temporary: Path) -> Iterator[tuple[str, list[Node]]]:
    """Three nodes. What lies in `temporary` is on the first alone. (After this process's own cluster, which has other variables.)"""
    with cluster(temporary, CPUS, **PATIENT) as found:
        yield found


def test_three_nodes_of_which_one_is_lost(run_recorded: Callable[..., Run], spread: tuple[str, list[Node]], temporary: Path) -> None:
    address, nodes = spread
    script = [sys.executable, "-c", REFUSED, address]
    environment = settings.child_environment(PYTHONPATH=settings.python_path(ROOT))
    refused = subprocess.run(nodes[0].command(script), env=environment, capture_output=True, text=True, check=False)
    lines = refused.stdout.splitlines()
    assert len(lines) == 1, refused
    assert "each needs, whole on one node and free: 3 CPU. Its nodes: " in lines[0]
    assert "10.77.0.2 (2 CPU, 0 GPU)" in lines[0]

    overrides, output = recipe(temporary, "steps=5"), temporary / "runs"
    output.mkdir()
    command = start(output, nodes[0], address, overrides)
    said = said_until(command, "step 3/")  # then the checkpoint of step 1 is whole, whatever the copies take
    nodes[2].end()
    said += command.communicate()[0]
    assert command.returncode == 0, said
    (lost,) = read_lines(output / "latest/losses.jsonl")
    assert lost["from_step"] in (1, 2, 3, 4), lost

    alone = run_recorded(grpo, "arithmetic-cpu", *overrides)
    assert numbers(output / "latest") == numbers(alone.directory)
    assert samples(output / "latest") == samples(alone.directory)
    assert (output / "latest/hf/model.safetensors").read_bytes() == (alone.directory / "hf/model.safetensors").read_bytes()
