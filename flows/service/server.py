"""A Prefect server: the configured one, or one of its own for as long as a run lasts (`make up` starts one that stays)."""

from __future__ import annotations

import base64
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings, temporary_settings

from configs import settings
from configs.base import ConfigError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
DEFAULT_PORT = 4200
START_TIMEOUT_S = 300.0  # seconds are enough on an idle machine; on a busy shared one 120 were not
_STOP_TIMEOUT_S = 15.0
_DRAIN_TIMEOUT_S = 10.0
_ANSWER_S = 5.0
# A run uses no blocks. To register them the server would import prefect-ray, and with it Ray.
_FOR_ONE_RUN = {"PREFECT_API_BLOCKS_REGISTER_ON_START": "false", "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false"}


_ahead: list[tuple[subprocess.Popen[bytes], str]] = []  # the server that `begin` has started, and its URL


def begin() -> None:
    """Start the server for which `prefect_server` will wait, where none is configured: it computes as long as a flow is imported, and so
    both go on side by side. One that nobody comes for ends with this process.
    """
    if not _ahead and configured_url() is None:
        _ahead.append(_launch(DEFAULT_PORT))


@contextmanager
def prefect_server() -> Iterator[str]:
    """Yield the URL of the UI. Runs inside the block report to that server.

    Raises:
        ConfigError: a configured server does not answer, or one of our own does not start in time.
    """
    configured = configured_url()
    if configured:
        check_configured(configured)
        yield configured.removesuffix("/api")
        return
    server, url = _start()
    try:
        api_url = f"{url}/api"
        with settings.variables(PREFECT_API_URL=api_url), temporary_settings({PREFECT_API_URL: api_url}):  # also for child processes
            yield url
    finally:
        _drain()
        _stop(server)


def _start() -> tuple[subprocess.Popen[bytes], str]:
    ports = [DEFAULT_PORT, 0, 0]  # two that start at once may both find a port free; the one that loses it takes another
    while True:
        preferred = ports.pop(0)
        server, url = _ahead.pop() if _ahead else _launch(preferred)
        try:
            await_health(server, f"{url}/api")
            return server, url
        except BaseException as error:
            lost_the_port = isinstance(error, ConfigError) and server.poll() is not None
            _stop(server)
            if not ports or not lost_the_port:
                raise


def _launch(preferred: int) -> tuple[subprocess.Popen[bytes], str]:
    url = f"http://127.0.0.1:{free_port(preferred)}"
    server = subprocess.Popen(
        server_command(url),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=server_environment(url) | _FOR_ONE_RUN,
        start_new_session=True,  # Ctrl-C reaches the run first; the server outlives it to hear the end
        preexec_fn=functools.partial(_end_with, os.getpid()),
    )
    return server, url


def _end_with(parent: int) -> None:
    """This process, a child of `parent`, ends when that one does, and at once if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # ended already: the kernel tells nobody of it
        os._exit(0)


def configured_url() -> str | None:
    """The API's URL that the environment, a settings file or a profile of Prefect names."""
    return settings.get("PREFECT_API_URL") or (str(url) if (url := get_current_settings().api.url) else None)


def check_configured(api_url: str) -> None:
    """See that the configured server answers, and lets us in.

    Raises:
        ConfigError: it does not.
    """
    if not healthy(api_url):
        raise ConfigError(
            f"PREFECT_API_URL: no Prefect server answers at {api_url}: start it, or take that setting away "
            "(the variable, a profile, or the prefect.toml of `make up`, which `make down` removes)"
        )
    if why := refusal(api_url):
        raise ConfigError(f"PREFECT_API_URL: the Prefect server at {api_url} {why}")


def refusal(api_url: str) -> str | None:
    """Why a server that answers does not let this process in, and what to do; None: it does."""
    password = PREFECT_API_AUTH_STRING.value()
    headers = {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"} if password else {}
    try:
        if httpx.get(f"{api_url}/admin/version", headers=headers, timeout=_ANSWER_S).status_code != httpx.codes.UNAUTHORIZED:
            return None
    except httpx.HTTPError:
        return None  # whether it answers is asked elsewhere
    said = "refuses the password in PREFECT_API_AUTH_STRING" if password else "asks for a password"
    return f"{said}: set PREFECT_API_AUTH_STRING to what the server has as PREFECT_SERVER_API_AUTH_STRING"


def server_command(url: str) -> list[str]:
    """The command that serves http://host:port."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", port]


def server_environment(url: str) -> dict[str, str]:
    """The environment of that command."""
    return settings.child_environment(PREFECT_UI_API_URL=f"{url}/api")  # else the page asks port 4200, whoever is there


def healthy(api_url: str) -> bool:
    """Whether a server answers at the API's URL."""
    try:
        return httpx.get(f"{api_url}/health", timeout=_ANSWER_S).status_code == 200
    except httpx.HTTPError:
        return False


def listens(pid: int, url: str) -> bool:
    """Whether it is that process or a child of it that listens at the URL's port: two that start at once may both have found it free."""
    port = int(url.removesuffix("/api").rpartition(":")[2])
    try:
        family = [process := psutil.Process(pid), *process.children(recursive=True)]
    except psutil.Error:
        return False
    return any(socket.status == psutil.CONN_LISTEN and socket.laddr.port == port for each in family for socket in _sockets(each))


def _sockets(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections("tcp"))
    except psutil.Error:  # a child that ended meanwhile says nothing about the others
        return []


def await_health(server: subprocess.Popen[bytes], api_url: str) -> None:
    """Until the server answers.

    Raises:
        ConfigError: it ended, or took too long.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (healthy(api_url) and listens(server.pid, api_url)):
        if server.poll() is not None:
            raise ConfigError(f"the Prefect server ended with code {server.returncode}; run `prefect server start` to see why")
        if time.monotonic() > deadline:
            raise ConfigError(f"the Prefect server at {api_url} was not healthy within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.3)


def _drain() -> None:
    """Hand over the last log lines and events while the server still listens."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=_DRAIN_TIMEOUT_S)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def free_port(preferred: int = 0, host: str = "127.0.0.1") -> int:
    """The preferred port of that address, or any free one.

    Raises:
        ConfigError: this machine has no such address.
    """
    for port in (preferred, 0):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise ConfigError(f"cannot listen on {host}: this machine has no such address")
