"""Where a run's actors stand in a cluster of several nodes. In a cluster of one, nothing here is asked.

    the driver's node    data plane, ledger, collector, rewards, policy group: what holds the run's state and reads its files
                         (of a ray:// client: the node of the server that it talks to)
    any node             bundles of one placement group, each whole on a node, dealt over those that have room by `ray.strategy`:
                         a TP group of the policy (colocated: with the engines that share its GPUs), or an engine

A node that is lost takes its bundles along; Ray finds other places for them, and who stands there starts again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors import node
from actors.waiting import find, outcomes, wait_all
from configs.base import ConfigError

_PLACE_S = 10.0  # for Ray to find places
_ROOM_S = 30.0  # the same, where it has yet to notice that a node is gone
_ANSWER_S = 30.0  # of a node: Python starts there, and imports Ray
_LOOK_S = 1.0
_RESOURCES = {"CPU": "num_cpus", "GPU": "num_gpus"}

type Options = Mapping[str, Any]  # of an actor, as Ray takes them

_groups: dict[str, PlacementGroup] = {}  # by the run's namespace; they end with this process


class NoRoomError(RuntimeError):
    """The cluster's nodes have no room for a run's actors. The message says what is needed and what there is."""


@dataclass(frozen=True)
class Bundles:
    """Attributes:
    needs: of each bundle, by Ray's resources. engines, workers: the bundle of each one.
    """

    needs: list[dict[str, float]]
    engines: list[int]
    workers: list[int]


def bundles(engines: int, engine: Options, workers: int, worker: Options, tensor: int, *, together: bool) -> Bundles:
    """What must be on one node, and what needs not.

    Args:
        engine, worker: Ray's options of one. tensor: size of a TP group; its ranks follow each other.
        together: engines stand with the workers that share their GPUs, as of `placement` colocated.
    """
    of_workers = [rank // tensor for rank in range(workers)]
    groups = workers // tensor
    of_engines = [of_workers[index * workers // engines] if together else groups + index for index in range(engines)]
    needs: list[dict[str, float]] = [{} for _ in range(groups if together else groups + engines)]
    for bundle, options in chain(((one, engine) for one in of_engines), ((one, worker) for one in of_workers)):
        for resource, option in _RESOURCES.items():
            if options.get(option):
                needs[bundle][resource] = round(needs[bundle].get(resource, 0.0) + options[option], 4)
    return Bundles(needs, of_engines, of_workers)


def beside_driver() -> dict[str, Any]:
    """Ray's options of an actor that stands on this process's node."""
    return node.pinned(node.own_id()) if len(_alive()) > 1 else {}


def cpus_here() -> int | None:
    """Ray's CPUs of this process's node, free or not, in a cluster of several; None: of one."""
    found = _alive()
    return next(int(one["Resources"].get("CPU", 0)) for one in found if one["NodeID"] == node.own_id()) if len(found) > 1 else None


def reserve(
    namespace: str,
    strategy: str,
    engines: int,
    engine: Options,
    workers: int,
    worker: Options,
    tensor: int,
    *,
    together: bool,
) -> tuple[list[Options], list[Options]]:
    """Find places for a run's engines and policy workers, or see that those that it has are still there. Arguments as of `bundles`.

    Args:
        strategy: Ray's, of the placement group.

    Returns:
        Ray's options of each engine and of each policy worker.

    Raises:
        NoRoomError: there are none.
    """
    if len(_alive()) == 1 and namespace not in _groups:
        return [engine] * engines, [worker] * workers
    wanted = bundles(engines, engine, workers, worker, tensor, together=together)
    if namespace not in _groups:
        _groups[namespace] = placement_group(wanted.needs, strategy=strategy, name=namespace)
    group = _groups[namespace]
    _settled(group, wanted)
    return _within(group, engine, wanted.engines), _within(group, worker, wanted.workers)


def require_shared_gpus(namespace: str, engines: Sequence[str], workers: Sequence[str], timeout_s: float) -> None:
    """Of a colocated run: see that each GPU with a policy worker has an engine, and each with an engine a policy worker.

    Raises:
        ConfigError: one has not. ActorGoneError, ActorTimeoutError.
    """
    asked = {name: find(name, namespace).__ray_call__.remote(_gpus) for name in (*engines, *workers)}
    found = wait_all(asked, what="say which GPU", timeout_s=timeout_s)
    if alone := apart({name: found[name] for name in engines}, {name: found[name] for name in workers}):
        raise ConfigError(f"placement colocated: {alone}, apart from its partner: give the run a cluster whose GPUs are whole and free")


def apart(engines: Mapping[str, Sequence[str]], workers: Mapping[str, Sequence[str]]) -> str:
    """Who is on a GPU that nobody of the other kind has; "": nobody. Arguments: GPUs by actor."""
    lonely = []
    for kind, others in ((engines, workers), (workers, engines)):
        partners = {gpu for found in others.values() for gpu in found}
        lonely += [f"{name} is on {' and '.join(found) or 'no GPU'}" for name, found in kind.items() if not partners.intersection(found)]
    return ", ".join(lonely)


def release(namespace: str) -> None:
    """Give the places back. Idempotent."""
    if group := _groups.pop(namespace, None):
        remove_placement_group(group)


def _within(group: PlacementGroup, options: Options, bundles: Sequence[int]) -> list[Options]:
    return [{**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)} for bundle in bundles]


def _settled(group: PlacementGroup, wanted: Bundles) -> None:
    """Wait until each bundle has a node that answers."""
    deadline, silent = time.monotonic() + _ROOM_S, "its nodes do not answer"
    while (left := deadline - time.monotonic()) > 0 and group.wait(_PLACE_S):
        table: Any = placement_group_table(group)
        places = [table["bundles_to_node_id"][bundle] for bundle in range(len(wanted.needs))]
        answers = {place: ray.remote(_nothing).options(num_cpus=0, max_retries=0, **node.pinned(place)).remote() for place in set(places)}
        failed = [place for place, _, error in outcomes(answers, what="are you there", timeout_s=min(_ANSWER_S, max(1.0, left))) if error]
        if not failed:
            return
        silent = f"node {', '.join(map(_address, failed))} does not answer"
        time.sleep(_LOOK_S)  # Ray has not noticed yet that it is gone, and has not looked for another place
    raise NoRoomError(_no_room(wanted, silent if group.wait(1.0) else ""))


def _no_room(wanted: Bundles, why: str) -> str:
    needs = "; ".join(sorted({" and ".join(f"{amount:g} {name}" for name, amount in one.items()) for one in wanted.needs}))
    there = ", ".join(f"{one['NodeManagerAddress']} ({_has(one)})" for one in _alive())
    gone = sorted({one["NodeManagerAddress"] for one in _nodes() if not one["Alive"]})
    lost = f"; gone: {', '.join(gone)}" if gone else ""
    return (
        f"the cluster has no room for {len(wanted.needs)} bundle(s) of actors{f' ({why})' if why else ''}: "
        f"each needs, whole on one node and free: {needs}. Its nodes: {there}{lost}"
    )


def _has(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{one['Resources'].get(name, 0):g} {name}" for name in _RESOURCES)


def _gpus(_: Any) -> list[str]:
    return node.gpus()


def _nothing() -> None:
    """What a node that is there can do."""


def _nodes() -> list[dict[str, Any]]:
    found: Any = ray.nodes  # untyped in Ray
    return list(found())


def _alive() -> list[dict[str, Any]]:
    return [one for one in _nodes() if one["Alive"]]


def _address(place: str) -> str:
    return next((str(one["NodeManagerAddress"]) for one in _nodes() if one["NodeID"] == place), place)
