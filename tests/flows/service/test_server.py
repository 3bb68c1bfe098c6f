"""Whose server answers: two that start at once may both have found the same port free."""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs import settings
from configs.base import ConfigError
from flows.service import server
from tests.conftest import ROOT
from tests.patience import WAIT_S


class Healthy(http.server.BaseHTTPRequestHandler):
    """Answers as a healthy server does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def foreign() -> Iterator[str]:
    """The API URL of a healthy server of this process."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}/api"
        httpd.shutdown()


def test_a_foreign_server_on_the_port_is_not_taken_for_ours(foreign: str) -> None:
    assert server.healthy(foreign)
    assert server.listens(os.getpid(), foreign)
    ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(3)"])
    assert not server.listens(ours.pid, foreign)
    with pytest.raises(ConfigError, match="ended with code 3"):
        server.await_health(ours, foreign)


ORPHANED = """
import os, time
from flows.service import server
parent = os.fork()
if not parent:
    parent = os.getpid()
    if not os.fork():
        while os.getppid() == parent:
            time.sleep(0.01)
        server._end_with(parent)
        print("it lives", flush=True)
    os._exit(0)
os.waitpid(parent, 0)
"""


def test_a_server_whose_run_ended_while_it_was_begun_ends() -> None:
    """SIGTERM may end the run before its server has asked the kernel to be told of that end."""
    done = subprocess.run([sys.executable, "-c", ORPHANED], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_child_that_ends_meanwhile_does_not_hide_the_others(foreign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = psutil.Process(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE).pid)

    def children(of: psutil.Process, recursive: bool) -> list[psutil.Process]:
        gone.kill()
        gone.wait()
        return [gone]

    monkeypatch.setattr(psutil.Process, "children", children)
    assert server.listens(os.getpid(), foreign)


def test_a_taken_port_is_passed_over(foreign: str) -> None:
    taken = int(foreign.removesuffix("/api").rpartition(":")[2])
    assert server.free_port(taken) != taken


def test_a_configured_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no Prefect server answers at http://127\.0\.0\.1:1/api"):
        server.check_configured("http://127.0.0.1:1/api")


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.200"):
        server.free_port(0, "192.0.2.200")


def test_a_server_that_was_begun_for_nothing_ends_with_its_command(tmp_path: Path) -> None:
    code = "from flows.service import server\nserver.begin()\n(process, _), = server._ahead\nprint(process.pid)"
    environment = settings.child_environment(PREFECT_API_URL="", PREFECT_HOME=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, timeout=WAIT_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(WAIT_S)
