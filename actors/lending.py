"""Directories of this node that actors on other nodes write or read, where the nodes share no file system.

    lend       the directory itself where a node sees it, else an empty folder of that node
    collect    folders ── pieces over Ray, SHA-256 ──► the directory              after the actors have written
    deliver    the directory ── pieces over Ray, SHA-256 ──► folders              before they read
    take_back  folders go

A folder is never under the directory's name: a node that sees a shared file system late must not be taken for one that has another.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError

from actors import node
from actors.files import FileServer, Remote, copy_files
from actors.waiting import ActorGoneError, ActorTimeoutError, wait, wait_all

_ANSWER_S = 60.0  # of a node: Python starts there, and imports Ray
_LOOK_S = 2.0  # between two looks whether the nodes are still there
_PER_S = 10e6  # bytes, at worst

type Lent = Mapping[str, str]  # the path that a node, by Ray's id, has for the directory


def lend(directory: Path, nodes: Iterable[str]) -> Lent:
    """Paths of the nodes for the directory, which is made if need be. Those that see it, and this one, have its own.

    Raises:
        ActorGoneError, ActorTimeoutError: a node does not answer.
    """
    every, others = list(nodes), sorted({*nodes} - {node.own_id()})
    if not others:
        return dict.fromkeys(every, str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / f".seen-{uuid4().hex}"
    token.touch()
    try:
        asked = {one: _there(one, _place).remote(str(token)) for one in others}
        found = _answers(asked, f"look for {directory}", _ANSWER_S)
    finally:
        token.unlink(missing_ok=True)
    return {one: found.get(one) or str(directory) for one in every}


def collect(lent: Lent, directory: Path) -> None:
    """Copy what was written into the folders to the directory, over files of the same names.

    Raises:
        OSError: it cannot be written. ConfigError: a file changed meanwhile. ActorGoneError, ActorTimeoutError: a node does not answer.
    """
    for one, place in _folders(lent, directory).items():
        with _served(one, place) as remote:
            copy_files(remote, remote.contents(), directory)


def deliver(directory: Path, lent: Lent) -> None:
    """Copy the files in the directory to the folders.

    Raises:
        OSError, ConfigError: a node has no room. ActorGoneError, ActorTimeoutError: it does not answer.
    """
    folders = _folders(lent, directory)
    if not folders:
        return
    with _served(node.own_id(), str(directory)) as remote:
        patience = _ANSWER_S + remote.bytes / _PER_S
        sent = {one: _there(one, _receive).remote(str(directory), remote.server, place) for one, place in folders.items()}
        _answers(sent, f"receive {directory}", patience)


def take_back(lent: Lent, directory: Path) -> None:
    """Remove the folders. A node that is lost keeps its own, in its temporary directory."""
    gone = {one: _there(one, _remove).remote(place) for one, place in _folders(lent, directory).items()}
    with suppress(RuntimeError, TimeoutError):
        _answers(gone, "remove a folder", _ANSWER_S)


@contextmanager
def lending(directory: Path, nodes: Iterable[str]) -> Iterator[Lent]:
    """`lend` for the time of the block."""
    lent = lend(directory, nodes)
    try:
        yield lent
    finally:
        take_back(lent, directory)


def _answers(asked: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
    """By node. Ray fails a task on a node that fell silent later than it gives the node up, or never: so that is asked as well."""
    deadline = time.monotonic() + timeout_s
    with _nodes_there(what):
        while True:
            try:
                return wait_all(asked, what=what, timeout_s=max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except ActorTimeoutError:
                listed: Any = ray.nodes
                if gone := asked.keys() - {one["NodeID"] for one in listed() if one["Alive"]}:
                    raise ActorGoneError(f"{what}: {len(gone)} node(s) of the run are gone") from None
                if time.monotonic() >= deadline:
                    raise


@contextmanager
def _nodes_there(what: str) -> Iterator[None]:
    """Ray has many ways to say that the node of a task, or of a new actor, is gone; here it is one."""
    try:
        yield
    except RayError as error:
        raise ActorGoneError(f"{what}: a node of the run is gone ({type(error).__name__})") from error


def _folders(lent: Lent, directory: Path) -> dict[str, str]:
    return {one: place for one, place in lent.items() if place != str(directory)}


@contextmanager
def _served(one: str, place: str) -> Iterator[Remote]:
    server: Any = ray.remote(FileServer)
    server = server.options(num_cpus=0, **node.pinned(one)).remote(place)
    try:
        with _nodes_there(f"read {place}"):
            wait(server.ready.remote(), who=f"the node of {place}", what="serve files", timeout_s=_ANSWER_S)
            yield Remote(place, server)
    finally:
        ray.kill(server)


def _there(one: str, work: Any) -> Any:
    remote: Any = ray.remote(work)
    return remote.options(num_cpus=0, max_retries=0, **node.pinned(one))


def _place(token: str) -> str | None:
    return None if Path(token).is_file() else tempfile.mkdtemp(prefix="grpo-lent-")


def _receive(directory: str, server: Any, place: str) -> None:
    remote = Remote(directory, server)
    free = shutil.disk_usage(place).free
    if free < remote.bytes:
        raise OSError(f"{place} on node {node.address()} has no room for {directory}: {remote.bytes:,} bytes are needed, {free:,} are free")
    copy_files(remote, remote.contents(), Path(place))


def _remove(place: str) -> None:
    shutil.rmtree(place, ignore_errors=True)
