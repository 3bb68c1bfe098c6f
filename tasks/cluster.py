"""The Ray cluster of a run: one that the user points at, one that this process already joined, or one of its own."""

from __future__ import annotations

import logging
import random
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]  # not in its stub

from actors.forks import client
from actors.forks import server as forks
from configs import settings
from configs.base import ConfigError
from configs.run import RayConfig
from tasks.scratch import RAY, note_raylet, scratch

_PROBE_TIMEOUT_S = 5.0
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
_PORTS = range(20_000, 32_768)  # below Linux's ephemeral ones: any connection may take one of those before the agent comes to it


@contextmanager
def cluster(config: RayConfig, namespace: str, num_cpus: int, num_gpus: int | None) -> Iterator[str]:
    """Join or start Ray, and leave it as it was found. Yields a line that says which.

    Raises:
        ConfigError: the address does not answer (Ray itself would wait a minute and then end the process), or not to us.
    """
    if ray.is_initialized():
        yield "the Ray cluster that this process has joined"
        return
    with scratch() as place, nullcontext() if config.joined else forks.running(place):
        yield from _cluster(config, namespace, num_cpus, num_gpus, place)


def _cluster(config: RayConfig, namespace: str, num_cpus: int, num_gpus: int | None, place: Path) -> Iterator[str]:
    address = config.joined
    # ray.init puts its own SIGTERM handler in place of Prefect's, and a cancelled run would then end as Crashed.
    handler = signal.getsignal(signal.SIGTERM)
    if address:
        probe(address)
        _join(address, namespace)
        where = f"the Ray cluster at {address}"
    else:
        if settings.get("RAY_AUTH_MODE") != "disabled":
            settings.make_ray_token()
        with _interruptible_children(), bare_head(), forked_workers(), chosen_agent_ports():
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=config.num_cpus or num_cpus,
                num_gpus=num_gpus,
                object_store_memory=config.object_store_mib * 2**20,
                include_dashboard=False,
                _temp_dir=str(place / RAY),
                _node_ip_address="127.0.0.1",  # else every service of the cluster listens on the network card
                log_to_driver=False,
                logging_level=logging.ERROR,  # the terminal belongs to the run's progress
            )
        note_raylet(place, raylet())
        where = "a Ray cluster of its own"
    _restore(handler)
    try:
        yield where
    finally:
        ray.shutdown()
        _restore(handler)


def keep_logs(target: Path) -> None:
    """Copy the logs of a cluster of this process's own, which end with it, into the directory. Nothing happens without one."""
    if ray.is_initialized() and (node := own_node()) is not None and node.is_head():
        shutil.copytree(node.get_logs_dir_path(), target, dirs_exist_ok=True, ignore_dangling_symlinks=True)


def raylet() -> int:
    """Pid of the raylet that this process has started."""
    pid: int = own_node().all_processes["raylet"][0].process.pid
    return pid


def own_node() -> Any:
    """This process's ray._private.node.Node, which knows the processes that it has started. None before Ray runs."""
    return ray._private.worker._global_node  # Ray tells its pids and directories nowhere else


def _join(address: str, namespace: str) -> None:
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(
            f"ray.address: no Ray cluster lets us in at {address!r} ({first}): is it one, of Ray {ray.__version__}? "
            "If it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; "
            "if it asks for none, RAY_AUTH_MODE=disabled"
        ) from error


def probe(address: str) -> None:
    """See that something listens at host:port (or ray://host:port).

    Raises:
        ConfigError: nothing does.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S):
            return
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ray.address: no Ray cluster answers at {address!r} ({error}): start one with `ray start --head`, "
            "or unset ray.address and RAY_ADDRESS to let the run start its own"
        ) from None


def _restore(handler: object) -> None:
    with suppress(ValueError):  # not the main thread: there was no handler of ours to lose
        signal.signal(signal.SIGTERM, handler)  # type: ignore[arg-type]


@contextmanager
def bare_head() -> Iterator[None]:
    """Clusters that start inside the block have no autoscaler, and no dashboard's process to send usage statistics: a quarter of the CPU
    time of Ray's start, in which ray.init waits for the second. It has no option for either.
    """
    with patch.multiple(Node, start_monitor=_start_nothing, start_api_server=_start_nothing):
        yield


@contextmanager
def forked_workers() -> Iterator[None]:
    """Workers of clusters that start inside the block are forks of the process's server, if there is one (actors/forks)."""
    with patch.object(ray_constants, "SETUP_WORKER_FILENAME", client.__file__):  # joined to a directory's path, which this one replaces
        yield


@contextmanager
def chosen_agent_ports() -> Iterator[None]:
    """The agents of nodes that start inside the block get their ports from here. Where an agent chooses its own, the raylet waits 15 s to
    hear of it, and then ends (github.com/ray-project/ray/issues/65983). Ray has no option for that, and on a full machine the agents'
    imports take longer.
    """
    start = Node.start_raylet

    def start_raylet(node: Node, *arguments: Any, **options: Any) -> None:
        ports = dict(zip(_AGENT_PORTS, _free_ports(len(_AGENT_PORTS)), strict=True))
        node._ray_params.update(**ports)
        # The only one of them that Ray does not hand to the raylet.
        persist_port(node.get_session_dir_path(), node.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, ports["dashboard_agent_listen_port"])
        start(node, *arguments, **options)

    with patch.object(Node, "start_raylet", start_raylet):
        yield


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    # A generator of its own: the run's seeds stay as they are.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise ConfigError(f"no {count} free ports between {_PORTS[0]} and {_PORTS[-1]} for Ray's agents")


def _start_nothing(_: Node, **__: Any) -> None:
    """In place of a method that starts a process of a head node."""


@contextmanager
def _interruptible_children() -> Iterator[None]:
    # A shell starts background commands with SIGINT ignored, and children inherit that. Ray cancels a task by an interrupt.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
