"""The queue's actors: started and stopped with one run. They end with `stop`, or with the process that called `start`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import ray

from actors import node
from actors.data_plane.address import DataPlaneAddress, Endpoint
from actors.data_plane.interface import DataPlaneError, DataPlaneGoneError
from actors.data_plane.transfer_queue import locks
from actors.data_plane.transfer_queue.connection import CONTROLLER, disconnect, require_ray
from actors.data_plane.transfer_queue.processes import Controller, StorageUnit
from actors.waiting import ActorGoneError, ActorTimeoutError, find, wait, wait_all
from configs.run import DataPlaneConfig

STORAGE = "data_plane_storage_{}"
# For the queue's own processes: else every request on a machine of under 8 cores warns about torch threads, and a look-up of a
# key that is gone (no error here, or a typed one) warns in the driver's log.
_ACTOR_ENV = {"TQ_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}
_START_S = 300.0  # the actors import torch: 10 to 25 s, and 100 s were seen on a busy machine

_owned: dict[str, list[Any]] = {}  # namespace -> actor handles; Ray ends a non-detached actor with its last handle


def start(namespace: str, config: DataPlaneConfig) -> DataPlaneAddress:
    """Start one run's queue. Its actors end with `stop`, or with this process: this module holds their only handles.

    Raises:
        DataPlaneError: no Ray cluster attached, the namespace has a data plane already, or the Prometheus port is taken.
        DataPlaneGoneError: an actor died or was not ready within 300 s.
    """
    require_ray()
    # On this node, where the rows come from; and no other node's loss takes them along.
    here = node.pinned(node.own_id())
    options = {"namespace": namespace, "num_cpus": 0, "runtime_env": {"env_vars": _ACTOR_ENV}, **here}
    actors: dict[str, Any] = {}
    opened = locks.choose()
    try:
        actors[CONTROLLER] = ray.remote(Controller).options(name=CONTROLLER, **options).remote(opened)
        for unit in range(config.num_storage_units):
            name = STORAGE.format(unit)
            actors[name] = ray.remote(StorageUnit).options(name=name, **options).remote(opened, unit, config.num_storage_units)
        answers = {name: actor.get_zmq_server_info.remote() for name, actor in actors.items()}
        servers = wait_all(answers, what=f"start the data plane of {namespace!r}", timeout_s=_START_S)
        metrics = None if config.prometheus_port is None else _start_metrics(actors, servers, config.prometheus_port)
    except ValueError as error:
        _undo(actors.values(), opened)
        raise DataPlaneError(f"namespace {namespace!r} has a data plane already: {error}") from error
    except (ActorGoneError, ActorTimeoutError) as error:  # before OSError, which the second one is, too
        _undo(actors.values(), opened)
        raise DataPlaneGoneError(str(error)) from error
    except OSError as error:
        _undo(actors.values(), opened)
        raise DataPlaneError(f"data_plane.prometheus_port = {config.prometheus_port}: {error}; choose another, or 0 for any") from error
    _owned[namespace] = list(actors.values())
    ends = [Endpoint(name, server.id, server.ip, tuple(sorted(server.ports.items()))) for name, server in servers.items()]
    keys = opened.of_clients if isinstance(opened, locks.Keys) else None
    return DataPlaneAddress(namespace=namespace, controller=ends[0], storage=tuple(ends[1:]), metrics=metrics, keys=keys)


def stop(address: DataPlaneAddress) -> None:
    """End the run's queue, from any process of the cluster. Idempotent."""
    disconnect(address)
    for end in (address.controller, *address.storage):
        with contextlib.suppress(ActorGoneError):
            _kill([find(end.actor, address.namespace)])
    locks.remove(address.controller.host)
    _owned.pop(address.namespace, None)


def _start_metrics(actors: dict[str, Any], servers: dict[str, Any], port: int) -> str:
    """TransferQueue's Prometheus exporter in the controller; it collects from the storage units. Returns "host:port"."""
    for name, actor in actors.items():  # an exporter is what makes a storage unit time its requests
        chosen = port if name == CONTROLLER else 0
        endpoint = wait(actor.serve_metrics.remote(chosen), who=name, what="start its metrics", timeout_s=_START_S)
        if name == CONTROLLER:
            metrics: str = endpoint
    units = {name: server for name, server in servers.items() if name != CONTROLLER}
    register = actors[CONTROLLER].register_storage_units_for_metrics.remote(units)
    wait(register, who=CONTROLLER, what="register the storage units for metrics", timeout_s=_START_S)
    return metrics


def _kill(handles: Iterable[Any]) -> None:
    for handle in handles:
        ray.kill(handle, no_restart=True)


def _undo(handles: Iterable[Any], opened: locks.Locks) -> None:
    _kill(handles)
    if isinstance(opened, locks.Folder):
        locks.remove(opened.host)
