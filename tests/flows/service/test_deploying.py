"""`make up` deploys to a server whose database others write to all the time."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client

from configs.base import ConfigError
from flows.service import deploying, server
from tests.homes import prefect_home
from tests.patience import WAIT_S

EVERY_S = 0.002  # shorter than a request takes from what it reads to what it writes; the lock is free in between
NAMES = [f"d{number}" for number in range(8)]  # one of so many meets a commit


@contextmanager
def commits(database: Path) -> Iterator[threading.Event]:
    """Commits to a table of its own, one after the other, until the event is set or the block ends."""
    stop = threading.Event()

    def commit() -> None:
        with closing(sqlite3.connect(database, timeout=WAIT_S, isolation_level=None)) as connection:
            connection.execute("CREATE TABLE beside (n INTEGER)")
            connection.execute("INSERT INTO beside VALUES (0)")
            while not stop.wait(EVERY_S):
                connection.execute("UPDATE beside SET n = n + 1")
            connection.execute("DROP TABLE beside")

    thread = threading.Thread(target=commit, name="commits")
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join()


def deployments(directory: Path) -> Path:
    """A file of deployments of a flow that is quick to import."""
    (directory / "quick.py").write_text("from prefect import flow\n\n\n@flow\ndef quick() -> None: ...\n")
    entry = {"entrypoint": f"{directory}/quick.py:quick", "work_pool": {"name": deploying.POOL}}
    path = directory / "prefect.yaml"
    path.write_text(yaml.safe_dump({"name": "quick", "deployments": [{"name": name, **entry} for name in NAMES]}))
    return path


def test_a_busy_database_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's requests read, then write. A commit between the two is an error at once: no time-out of SQLite's counts."""
    said: list[str] = []
    monkeypatch.setenv("PREFECT_HOME", str(prefect_home(tmp_path)))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(deploying, "_DEPLOYMENTS", deployments(tmp_path))
    with server.prefect_server() as url, get_client(sync_client=True) as client:
        # Of the command that deploys, which by default would repeat for a minute before its error.
        monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
        deploying.create_pool(client)
        with commits(tmp_path / "prefect.db"), monkeypatch.context() as once:
            once.setattr(deploying, "_ATTEMPTS", 1)
            with pytest.raises(ConfigError, match=r"deploy --all` failed:(?s:.*)503 Service Unavailable"):
                deploying.deploy_all(client, f"{url}/api")
        with commits(tmp_path / "prefect.db") as stop:

            def say(line: str) -> None:
                said.append(line)
                stop.set()
                monkeypatch.delenv("PREFECT_CLIENT_MAX_RETRIES")  # the server's own services are busy, too

            monkeypatch.setattr(deploying, "print", say, raising=False)
            deploying.deploy_all(client, f"{url}/api")
        assert said == ["deploying: the server's database was busy; deploying again"]
        assert {deployment.name for deployment in client.read_deployments()} == set(NAMES)
