"""Nodes of a cluster go away while a run is spread over them: what the run does, and after how long.

    three nodes; engine, policy worker, policy worker, each on one of its own; model and data on the first node alone
    a node's processes are killed  ─► there is room for its actors on another node: the run goes on from its checkpoint
    a node's power goes            ─► there is none: one error that says so

python -m tests.chaos.nodes             about three minutes on two cores; one JSON line
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from actors.preflight import prepare_model
from configs.loader import load
from tasks.reporting.jsonl import read_lines
from tests.e2e.commands import said_until, start_command
from tests.e2e.conftest import SHORT
from tests.nodes import Node, cluster

CPUS = (1, 2, 2)  # three bundles of one: each has a node of its own, and there is room when one of the last two goes
# The head's, as docs/cluster.md advises. Ray's own values (10 s, five times) notice a silent node after more than a minute.
HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "5000", "RAY_health_check_failure_threshold": "3"}


def recipe(private: Path, *overrides: str) -> list[str]:
    """Overrides of a run whose model and data lie in the directory `private`; it writes them."""
    rows = [{"prompt": f"Remainder of {n} by 2.", "answer": str(n % 2)} for n in random.Random(0).sample(range(1000), 500)]
    (private / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = [
        *(one for one in SHORT if not one.startswith(("model.", "environment."))),
        f"environment={{kind: dataset, path: {private}/rows.jsonl, validation_size: 12}}",
        "policy.parallel.data=2", "checkpoint.every_steps=1", "validate_every=1000",
        "rewards=[{kind: math, timeout_s: 300}]",  # ten seconds of a busy machine may not be enough for an answer
        "policy.optimizer.decay_style=constant",  # else the number of steps would change each of them
        "policy.compiled_graph.enabled=false",  # few cores have it on one node only, and the metrics say so
        *overrides,
    ]  # fmt: skip
    prepare_model(load("arithmetic-cpu", [*own, *(one for one in SHORT if one.startswith("model."))]), private / "model")
    return [*own, f"model={{path: {private}/model}}"]


def start(output: Path, node: Node, address: str, overrides: list[str]) -> subprocess.Popen[str]:
    """The run, begun on this node."""
    return start_command("grpo", output, uuid.uuid4().hex, *overrides, node=node, RAY_ADDRESS=address)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as private, tempfile.TemporaryDirectory(prefix="runs-") as output:
        overrides = recipe(Path(private), "steps=100000")
        with cluster(Path(private), CPUS, **HEALTH) as (address, nodes):
            command = start(Path(output), nodes[0], address, overrides)
            said = said_until(command, "step 2/")
            nodes[2].end()
            said += said_until(command, "lost: ") + said_until(command, "step 6/")
            gone = time.monotonic()
            nodes[1].cut_off()
            said += said_until(command, "lost: ")
            noticed = time.monotonic() - gone
            said += command.communicate()[0]
            ended = time.monotonic() - gone
        losses = read_lines(Path(output) / "latest/losses.jsonl")
        error = said.strip().splitlines()[-1]
        print(said, file=sys.stderr)
    came_back = [round(one["seconds"], 1) for one in losses]
    seconds = {"came_back_s": came_back, "noticed_s": round(noticed, 1), "ended_s": round(ended, 1)}
    print(json.dumps({"lost": [one["lost"] for one in losses], **seconds, "error": error}))
    return int(not (came_back and "NoRoomError" in error and ended < 60))


if __name__ == "__main__":
    raise SystemExit(main())
