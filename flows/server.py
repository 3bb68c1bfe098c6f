"""A Prefect server for a run from the command line: the configured one, or one of its own for as long as the run lasts."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from configs import settings
from configs.base import ConfigError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEFAULT_PORT = 4200
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
_DRAIN_TIMEOUT_S = 10.0


@contextmanager
def prefect_server() -> Iterator[str]:
    """Yield the URL of the UI. Runs inside the block report to that server.

    Raises:
        ConfigError: a configured server does not answer, or one of our own does not start in time.
    """
    configured = _configured_url()
    if configured:
        if not _healthy(configured):
            raise ConfigError(f"PREFECT_API_URL: no Prefect server answers at {configured}: start it, or unset PREFECT_API_URL")
        yield configured.removesuffix("/api")
        return
    port = _port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=settings.child_environment(PREFECT_UI_API_URL=f"{url}/api"),  # else the page asks port 4200, whoever is there
        start_new_session=True,  # Ctrl-C reaches the run first; the server outlives it to hear the end
        preexec_fn=_end_with_parent,
    )
    try:
        _await_health(server, f"{url}/api")
        with _api_url(f"{url}/api"):
            yield url
    finally:
        _drain()
        _stop(server)


@contextmanager
def _api_url(url: str) -> Iterator[None]:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    settings.set_for_process(PREFECT_API_URL=url)  # for child processes
    with temporary_settings({PREFECT_API_URL: url}):
        yield


def _configured_url() -> str | None:
    from prefect.settings import get_current_settings

    return settings.prefect_api_url() or (str(url) if (url := get_current_settings().api.url) else None)


def _healthy(api_url: str) -> bool:
    try:
        return httpx.get(f"{api_url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _await_health(server: subprocess.Popen[bytes], api_url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _healthy(api_url):
        if server.poll() is not None:
            raise ConfigError(f"the Prefect server ended with code {server.returncode}; run `prefect server start` to see why")
        if time.monotonic() > deadline:
            raise ConfigError(f"the Prefect server at {api_url} was not healthy within {_START_TIMEOUT_S:.0f} s")
        time.sleep(0.3)


def _end_with_parent() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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


def _port() -> int:
    for port in (_DEFAULT_PORT, 0):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise ConfigError("no free port on the loopback interface for the Prefect server")
