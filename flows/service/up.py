"""`make up` and `make down`: everything that `prefect deployment run grpo/async --watch` needs, on this machine.

 up    server ──┐
       Ray   ───┼─► all answer ─► work pool ─► deploy all ─► worker ready ─► URL, next command
       reports ─┘
 down  cancel the worker's flow runs ─► worker ─► reports ─► Ray ─► server

A server that PREFECT_API_URL names and a cluster that RAY_ADDRESS names are used, and never stopped.
A second `up` starts what has died since, and deploys again; an `up` that fails stops what it started.

python -m flows.service.up          python -m flows.service.up --down          python -m flows.service.up --host 10.0.0.5
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed

from configs import settings
from configs.base import ConfigError
from flows.arguments import parse
from flows.service import automations, deploying, pages, runs, server
from flows.service.deploying import POOL
from flows.service.parts import PACKAGE, Part, Record, default_home, is_checkout, look
from tasks import scratch
from tasks.cluster import probe

SERVER, RAY, REPORTS, WORKER = "server", "ray", "reports", "worker"
_RAY_PORT, _REPORTS_PORT = 6379, 4201
_LEAST_CPUS = 4  # logical CPUs of the cluster: what one run on the smallest machine asks for, and one more
_ATTEMPTS = 3
_AGAIN = {  # what a part says before it ends, where another start may do better
    "already in use": "another process took its port in the same moment",
    "does not match persisted value": "another cluster took its port in the same moment",  # ray/_private/node.py
    "timed out during startup": "its processes took longer to start than Ray waits for them",  # there, too
}
_STOP_TIMEOUT_S = 20.0
_CANCEL_TIMEOUT_S = 60.0
_SETTINGS_HEAD = "# Written by `make up`, removed by `make down`: Prefect's commands in this directory use that server.\n"


class Up:
    """What runs for one home directory, and the two commands on it.

    Args:
        home: where .grpo/ and prefect.toml go.
        host: the address of this machine to listen on.
    """

    def __init__(self, record: Record, home: Path, host: str = "127.0.0.1") -> None:
        self._record, self._host = record, host
        self._settings_file, self._pages = home / "prefect.toml", record.directory / "pages"
        self._started: list[str] = []
        self._ray_place: Path | None = None  # of a Ray that this command has started

    def start(self) -> None:
        """Start what is missing, and deploy.

        Raises:
            ConfigError: something does not start or answer. What this call started has ended again.
        """
        try:
            for name in [name for name, part in self._record.parts.items() if not part.alive()]:
                print(f"{name}: had ended by itself (its last words are in {self._record.log(name)}); starting it again")
            self._start_server()
            self._start_ray()
            self._start_reports()
            self._await_server()
            self._await_ray()
            self._await_reports()
            server.check_configured(self.api_url)
            with temporary_settings({PREFECT_API_URL: self.api_url}), get_client(sync_client=True) as client:
                deploying.create_pool(client)
                has_worker = self._look_for_worker()
                print("deploying prefect.yaml")
                deploying.deploy_all(client, self.api_url)
                automations.install(client)
                if not has_worker:
                    self._start_worker(client)  # not before: a run that it goes on with keeps the server's database busy
                self._await(WORKER, "to start", lambda: self._said(WORKER, "started!"))
            self._write_settings()
        except BaseException:
            print("stopping what was started", file=sys.stderr)
            for name in reversed(self._started):
                self._stop(name)
            raise

    def stop(self) -> list[str]:
        """Stop every part that is recorded. Returns their names, with what was found of those that had died before."""
        stopped = []
        if WORKER in self._record.parts and server.healthy(self.api_url):
            self._cancel_runs()
        for name in (WORKER, REPORTS, RAY, SERVER):
            if name in self._record.parts:
                stopped.append(name if self._record.parts[name].alive() else f"{name} (had ended by itself)")
                self._stop(name)
        return stopped

    def _cancel_runs(self) -> None:
        if why := server.refusal(self.api_url):
            print(f"the worker's runs cannot be cancelled, and end without a report: the server {why}", file=sys.stderr)
            return
        with temporary_settings({PREFECT_API_URL: self.api_url}), get_client(sync_client=True) as client:
            runs.cancel(client, self._runs(client), _CANCEL_TIMEOUT_S)

    # ---- addresses ----

    @property
    def api_url(self) -> str:
        """Of the API that runs report to."""
        part = self._record.parts.get(SERVER)
        url = f"{part.address}/api" if part else server.configured_url()
        assert url is not None
        return url

    @property
    def ray_address(self) -> str:
        """Of the cluster that runs join."""
        part = self._record.parts.get(RAY)
        address = part.address if part else settings.ray_address()
        assert address is not None
        return address

    @property
    def _worker_address(self) -> str:
        """Where a worker reports, and the cluster of its runs."""
        return f"{self.api_url} {self.ray_address}"

    # ---- parts ----

    def _start_server(self) -> None:
        part, configured = self._record.parts.get(SERVER), server.configured_url()
        if part is None and configured is not None:
            server.check_configured(configured)
        elif part is None or not part.alive():
            url = f"http://{self._place(part, server.DEFAULT_PORT)}"
            self._start(SERVER, url, server.server_command(url), server.server_environment(url))

    def _await_server(self) -> None:
        if SERVER in self._record.parts:
            self._await_start(SERVER, "to answer", self._serves, self._start_server)

    def _serves(self) -> bool:
        part = self._record.parts[SERVER]
        return server.healthy(self.api_url) and server.listens(part.pid, part.address)

    def _start_ray(self) -> None:
        part, configured = self._record.parts.get(RAY), settings.ray_address()
        if part is None and configured is not None:
            probe(configured)
        elif part is None or not part.alive():
            address = self._place(part, _RAY_PORT)
            with scratch.handed_over() as (place, lock):
                self._ray_place = place
                environment = self._ray_environment() | scratch.environment(place)
                self._start(RAY, address, _ray_command(address, server.free_port(), place), environment, lock)

    def _await_ray(self) -> None:
        if RAY in self._record.parts:
            self._await_start(RAY, "to start", lambda: self._said(RAY, "Ray runtime started"), self._start_ray)
            self._note_raylet()

    def _note_raylet(self) -> None:
        if self._ray_place is not None:  # this command has started it
            for process in self._record.parts[RAY].members():
                with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended meanwhile: Ray's agents start short commands
                    if Path(f"/proc/{process.pid}/comm").read_text().strip() == "raylet":
                        scratch.note_raylet(self._ray_place, process.pid)

    def _start_reports(self) -> None:
        part = self._record.parts.get(REPORTS)
        if part is None or not part.alive():
            address = self._place(part, _REPORTS_PORT)
            self._start(REPORTS, address, pages.command(self._pages, address), settings.child_environment())

    def _await_reports(self) -> None:
        self._await_start(REPORTS, "to start", lambda: self._said(REPORTS, "serving at"), self._start_reports)

    def _look_for_worker(self) -> bool:
        """Whether a worker runs. If it has died, the run that it left behind is ended.

        Raises:
            ConfigError: it runs for another server or cluster.
        """
        part = self._record.parts.get(WORKER)
        if part is None or not part.alive():
            self._stop(WORKER)
            return False
        if part.address != self._worker_address:
            raise ConfigError(f"the worker that runs was started for {part.address}, not for {self._worker_address}: `make down` first")
        return True

    def _start_worker(self, client: SyncPrefectClient) -> None:
        if SERVER in self._record.parts:
            for run in runs.at_work(client, POOL):
                if run.infrastructure_pid is None or look(int(run.infrastructure_pid)) is None:
                    runs.force(client, run, Crashed(message="The worker of this run ended."))
        environment = self._ray_environment() | {
            "PREFECT_API_URL": self.api_url,
            "RAY_ADDRESS": self.ray_address,
            "PREFECT_WORKER_WEBSERVER_HOST": self._host,
            **pages.environment(self._pages, self._record.parts[REPORTS].address),
        }
        self._start(WORKER, self._worker_address, worker_command(POOL, f"make-up-{socket.gethostname()}"), environment)

    def _runs(self, client: SyncPrefectClient) -> list[FlowRun]:
        """The pool's runs at work that are this worker's: all of them on a server of our own, else those of its processes."""
        found, part = runs.at_work(client, POOL), self._record.parts.get(WORKER)
        pids = {str(process.pid) for process in part.members()} if part else set()
        return [run for run in found if SERVER in self._record.parts or run.infrastructure_pid in pids]

    def _await(self, name: str, what: str, check: Callable[[], bool]) -> None:
        self._record.await_true(name, what, check, server.START_TIMEOUT_S)

    def _await_start(self, name: str, what: str, check: Callable[[], bool], start: Callable[[], None]) -> None:
        """Until the check holds. A part that ends is started again where that may help: on a full machine, or beside another `make up`."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._await(name, what, check)
            except ConfigError:
                why = [why for words, why in _AGAIN.items() if self._said(name, words)]
                if attempt == _ATTEMPTS or not why or self._record.parts[name].alive():
                    raise
                print(f"{name}: {why[0]}; starting it again")
                start()

    def _said(self, name: str, words: str) -> bool:
        return words in self._record.log(name).read_text(errors="replace")

    def _start(self, name: str, address: str, command: list[str], environment: dict[str, str], *holds: int) -> None:
        print(f"{name}: starting for {address}" if name == WORKER else f"{name}: starting at {address}")
        if name in self._record.parts:
            self._stop(name)  # what a dead part has left behind
        self._started.append(name)
        self._record.start(name, address, command, environment, default_home(), holds)

    def _stop(self, name: str) -> None:
        if name not in self._record.parts:
            return  # it did not get as far as that
        if name == SERVER:
            self._remove_settings()
        # Ray ends its processes on SIGTERM; Prefect's commands end best on SIGINT.
        self._record.stop(name, signal.SIGTERM if name == RAY else signal.SIGINT, _STOP_TIMEOUT_S)
        if name == RAY:
            scratch.sweep()

    def _place(self, dead: Part | None, preferred: int) -> str:
        """host:port, where the dead part was if that is free: those who knew it find it again."""
        port = int(dead.address.rpartition(":")[2]) if dead else preferred
        return f"{self._host}:{server.free_port(port, self._host)}"

    def _ray_environment(self) -> dict[str, str]:
        """For the cluster and for whoever joins it: the address as it was given, and a token, without which anyone here could use it."""
        loopback = "0" if self._host.startswith("127.") else "1"
        extra = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": loopback, "PYTHONPATH": settings.python_path(PACKAGE)}
        if settings.get("RAY_AUTH_MODE") is None and settings.ray_address() is None:
            settings.make_ray_token()
            extra["RAY_AUTH_MODE"] = "token"
        return settings.child_environment(**extra)

    # ---- Prefect's settings file ----

    def _write_settings(self) -> None:
        """So that `prefect` in this directory finds the server without a variable."""
        if SERVER not in self._record.parts:
            return  # the user's own setting, wherever it stands, names it already
        if self._settings_file.is_file() and not self._ours():
            print(f"{self._settings_file} is not ours and stays: `export PREFECT_API_URL={self.api_url}` before prefect's commands")
            return
        self._settings_file.write_text(f'{_SETTINGS_HEAD}[api]\nurl = "{self.api_url}"\n')

    def _remove_settings(self) -> None:
        with suppress(FileNotFoundError):
            if self._ours():
                self._settings_file.unlink()

    def _ours(self) -> bool:
        return self._settings_file.read_text().startswith(_SETTINGS_HEAD)


def worker_command(pool: str, name: str) -> list[str]:
    """The command of a worker that runs flows as processes of this machine."""
    return [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", name]


def _ray_command(address: str, client_port: int, place: Path) -> list[str]:
    host, _, port = address.rpartition(":")
    cpus = max(settings.cpu_count(), _LEAST_CPUS)
    return [
        sys.executable, "-m", "flows.service.ray_head", str(place),
        "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false",
        f"--temp-dir={place / scratch.RAY}", f"--node-ip-address={host}", f"--port={port}", f"--num-cpus={cpus}",
        f"--ray-client-server-port={client_port}",
        # Any free port for the rest: Ray's fixed ones would keep a second cluster from starting on this machine.
        "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip


def up(home: Path, host: str = "127.0.0.1") -> str:
    """Start and deploy. Returns the lines for the person who typed it."""
    with Record.locked(home) as record:
        running = Up(record, home, host)
        running.start()
        prefect = Path(sys.executable).parent / "prefect"
        shown = prefect.relative_to(PACKAGE) if prefect.is_relative_to(PACKAGE) else prefect
        asks = settings.get("PREFECT_SERVER_API_AUTH_STRING") is not None
        password = (
            ['password     export PREFECT_API_AUTH_STRING="$PREFECT_SERVER_API_AUTH_STRING"   # for prefect\'s own commands']
            if asks
            else []
        )
        return "\n".join(
            (
                f"Prefect UI   {running.api_url.removesuffix('/api')}",
                f"Ray          {running.ray_address}",
                f"logs         {record.directory}",
                *password,
                f"next         {shown} deployment run grpo/async --watch",
                f"stop         {'make' if is_checkout() else 'grpo-flows'} down",
            )
        )


def down(home: Path) -> str:
    """Stop what `up` started. Returns a line that names it."""
    with Record.locked(home) as record:
        stopped = Up(record, home).stop()
    return f"stopped: {', '.join(stopped)}" if stopped else "nothing was running"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a part does not start or answer, 130 interrupted."""
    options = parse("up", arguments)
    home = options.home or default_home()
    return _said(lambda: down(home) if options.down else up(home, options.host))


def stop(arguments: list[str] | None = None) -> int:
    """`grpo-flows down`. Returns the exit code, as `main`."""
    home = parse("down", arguments).home or default_home()
    return _said(lambda: down(home))


def _said(work: Callable[[], str]) -> int:
    try:
        print(work())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
