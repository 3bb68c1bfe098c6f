"""A Prefect server that asks for a password, and what the project's commands say and do with the right one, a wrong one and none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from configs import settings
from configs.base import ConfigError
from flows.service import doctor, server, up
from flows.service.parts import Record
from tests.conftest import ROOT
from tests.flows.service.test_doctor import LAPTOP
from tests.homes import prefect_home
from tests.patience import WAIT_S

PASSWORD = "someone:correct-horse-7319"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API URL of a server with a password."""
    url = f"http://127.0.0.1:{server.free_port()}"
    own = {"PREFECT_HOME": str(prefect_home(tmp_path_factory.mktemp("prefect"))), "PREFECT_SERVER_API_AUTH_STRING": PASSWORD}
    with subprocess.Popen(
        server.server_command(url), env=server.server_environment(url) | own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            server.await_health(process, f"{url}/api")
            yield f"{url}/api"
        finally:
            process.terminate()


def test_it_lets_in_who_has_the_password(locked: str) -> None:
    with temporary_settings({PREFECT_API_URL: locked, PREFECT_API_AUTH_STRING: PASSWORD}), get_client(sync_client=True) as client:
        server.check_configured(locked)
        assert client.read_work_pools() == []


@pytest.mark.parametrize(("given", "said"), [(None, "asks for a password"), ("someone:else", "refuses the password")])
def test_it_refuses_others_in_one_line(locked: str, given: str | None, said: str) -> None:
    with temporary_settings({PREFECT_API_AUTH_STRING: given}), pytest.raises(ConfigError, match=said) as caught:
        server.check_configured(locked)
    assert "PREFECT_API_AUTH_STRING" in str(caught.value)
    assert "someone" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", [("flows.service.up", "--home", "."), ("flows.grpo", "steps=1")])
def test_a_command_without_the_password_says_so_in_one_line(locked: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    environment = settings.child_environment(
        PREFECT_API_URL=locked, PREFECT_API_AUTH_STRING="", PREFECT_SERVER_API_AUTH_STRING="", PYTHONPATH=settings.python_path(ROOT)
    )
    command = (sys.executable, "-m", *command)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")][-1].count("asks for a password") == 1
    assert "Traceback" not in done.stderr


def test_the_doctor_sees_it(locked: str) -> None:
    with temporary_settings({PREFECT_API_AUTH_STRING: None}):
        refused = doctor.check_prefect(replace(LAPTOP, prefect_url=locked, answers={locked: True}, refusal=server.refusal(locked)))
    assert (refused.state, "password" in refused.found) == ("missing", True)
    assert "PREFECT_API_AUTH_STRING" in refused.fix
    with temporary_settings({PREFECT_API_AUTH_STRING: PASSWORD}):
        assert server.refusal(locked) is None


def test_down_stops_what_it_started_also_without_the_password(locked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runs cannot be cancelled then; their processes end with the worker."""
    with Record.locked(tmp_path) as record, temporary_settings({PREFECT_API_AUTH_STRING: None}):
        for name in (up.SERVER, up.WORKER):
            record.start(name, locked.removesuffix("/api"), ["sleep", "600"], settings.child_environment(), tmp_path)
        assert up.Up(record, tmp_path).stop() == [up.WORKER, up.SERVER]
    assert "cannot be cancelled" in capsys.readouterr().err


def test_a_server_of_a_runs_own_asks_for_it_and_the_run_has_it(tmp_path: Path) -> None:
    """`PREFECT_SERVER_API_AUTH_STRING` alone is enough, as of `make up`: our processes are clients with the same password."""
    code = (
        "from flows.service import server\n"
        "server.DEFAULT_PORT = 0\n"  # another test's server may have the other by now
        "server.begin()\n"  # as a command does
        "import httpx, prefect\n"
        "from prefect.client.orchestration import get_client\n"
        "(_, begun), = server._ahead\n"
        "with server.prefect_server() as url, get_client(sync_client=True) as client:\n"
        "    assert url == begun\n"
        "    assert client.read_work_pools() == []\n"
        "    assert httpx.get(f'{url}/api/admin/version').status_code == 401\n"
    )
    environment = settings.child_environment(
        PREFECT_API_URL="", PREFECT_API_AUTH_STRING="", PREFECT_SERVER_API_AUTH_STRING=PASSWORD, PREFECT_HOME=str(prefect_home(tmp_path))
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=WAIT_S)
