"""Workers are forks of the process that has imported the libraries: what they inherit, what they do not, and how both ends end."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.forks import client, server
from configs import settings
from tests.patience import WAIT_S

PROGRAM = """
import json, os, sys
print(json.dumps([sys.argv, os.environ.get("A"), os.getcwd(), os.getppid(), "torch" in sys.modules]), flush=True)
print("and an error", file=sys.stderr, flush=True)
{}
"""


@pytest.fixture(scope="module")
def address(forks: None) -> str:
    return settings.get(client.ADDRESS) or ""


def start(program: Path, *arguments: str, oom_score: int | None = None, **variables: str) -> subprocess.Popen[str]:
    """The program as Ray starts a worker."""
    context = json.dumps({"env_vars": {"A": "${B}b", **variables}})
    command = [
        sys.executable,
        client.__file__,
        str(program),
        *arguments,
        f"--serialized-runtime-env-context={context}",
        "--language=PYTHON",
    ]
    if oom_score is not None:
        command = ["sh", "-c", f'echo {oom_score} > /proc/self/oom_score_adj; exec "$@"', "sh", *command]
    environment = settings.child_environment(B="a")
    return subprocess.Popen(command, env=environment, cwd=program.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def written(place: Path, end: str) -> Path:
    program = place / "default_worker.py"
    program.write_text(PROGRAM.format(end))
    return program


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("raise ValueError('why')", 1)])
def test_a_fork_is_the_program_that_was_asked_for(address: str, tmp_path: Path, end: str, code: int) -> None:
    program = written(tmp_path, end)
    with start(program, "x", "y z") as process:
        said, errors = process.communicate(timeout=WAIT_S)
    arguments, variable, directory, parent, imported = json.loads(said)
    assert process.returncode == code
    assert (arguments, variable, directory) == ([str(program), "x", "y z"], "ab", str(tmp_path))
    assert imported
    assert "actors.forks.server" in psutil.Process(parent).cmdline()
    assert errors.startswith("and an error\n")
    assert ("why" in errors) is ("why" in end)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_ends_with_its_client(address: str, tmp_path: Path, end: signal.Signals) -> None:
    """SIGTERM reaches it, so that it may clear up."""
    program = written(
        tmp_path, "import signal, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    with start(program) as process:
        assert process.stdout is not None
        process.stdout.readline()
        fork = psutil.Process(int(process.stdout.readline()))
        process.send_signal(end)
        gone(fork)
        assert process.wait(WAIT_S) == (7 if end == signal.SIGTERM else -9)


def starts_it_itself(program: Path, **variables: str) -> None:
    """By the setup_worker.py of a Ray that lies beside the program."""
    workers = program.parent / "ray" / "_private" / "workers"
    workers.mkdir(parents=True)
    (program.parent / "ray" / "__init__.py").touch()
    (workers / "setup_worker.py").write_text("import sys; print(sys.argv[0], len(sys.argv), sys.path[0])")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(program.parent))
        with start(program, **variables) as process:
            said, errors = process.communicate(timeout=WAIT_S)
    assert said.split() == [str(workers / "setup_worker.py"), "4", str(workers)], errors


@pytest.mark.parametrize("value", ["off", "{place}/nobody"])
def test_without_a_server_ray_starts_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    starts_it_itself(written(tmp_path, ""), GRPO_FLOWS_FORKS=value.format(place=tmp_path))
    monkeypatch.setenv(client.ADDRESS, value.format(place=tmp_path))
    assert server.trouble() is None  # it was not wanted


@pytest.mark.parametrize(
    ("code", "said"), [("print('a first line\\na library has started CUDA')", "a library has started CUDA"), ("", "the process is gone")]
)
def test_a_server_that_has_ended_says_why_and_ray_starts_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setenv(client.ADDRESS, "")
    monkeypatch.setattr(server, "_COMMAND", (sys.executable, "-c", code))
    with server.running(tmp_path):
        deadline = time.monotonic() + WAIT_S
        while server.trouble() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert server.trouble() == said
        starts_it_itself(written(tmp_path, ""))


def test_what_is_no_worker_is_started_by_ray(address: str, tmp_path: Path) -> None:
    """Ray Client's server is a module, `-m ray.util.client.server`."""
    starts_it_itself(tmp_path / "another.py")


@pytest.fixture
def bare_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A server that imports nothing, for what it has imported is not what the test is about."""
    monkeypatch.setenv(client.ADDRESS, "")
    monkeypatch.setattr(server, "_COMMAND", (*server._COMMAND[:-2], "-c", BARE))
    return lambda: server.running(tmp_path)


def test_forks_end_with_their_server(tmp_path: Path, bare_server: Callable[[], AbstractContextManager[None]]) -> None:
    """The server's run ignores Ctrl-C, and Ray interrupts workers by it."""
    program = "import signal, time\nprint(os.getpid(), signal.getsignal(2).__name__, open('/proc/self/oom_score_adj').read(), flush=True)"
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with bare_server():
        assert server.trouble() is None
        signal.signal(signal.SIGINT, handler)
        process = start(written(tmp_path, f"{program}\ntime.sleep(600)"), oom_score=700)
        assert process.stdout is not None
        process.stdout.readline()
        pid, interrupt, oom_score = process.stdout.readline().split()
        fork = psutil.Process(int(pid))
    assert (interrupt, oom_score) == ("default_int_handler", "700")
    gone(fork)
    with process:
        process.communicate(timeout=WAIT_S)
    assert settings.get(client.ADDRESS) is None
    assert not (tmp_path / "python").exists()


@pytest.mark.parametrize("said", [b"", b"\0", (100).to_bytes(8, "big") + b"[["])
def test_a_client_that_goes_while_it_asks_is_forgotten(
    tmp_path: Path, bare_server: Callable[[], AbstractContextManager[None]], said: bytes
) -> None:
    with bare_server():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(settings.get(client.ADDRESS) or "")
            connection.sendall(said)
        with start(written(tmp_path, "sys.exit(5)")) as process:
            process.communicate(timeout=WAIT_S)
    assert process.returncode == 5


BARE = """
import socket, sys
from actors.forks import server
server._ALL = server._CPU = server._GPU = ()
server.serve(socket.socket(fileno=int(sys.argv[1])))
"""


def gone(process: psutil.Process) -> None:
    deadline = time.monotonic() + WAIT_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def say(queue: Any) -> None:
    queue.put((os.getppid(), "transformers" in sys.modules))


@pytest.fixture
def forked_children(address: str) -> Iterator[None]:
    before = multiprocessing.spawn.get_executable()
    server.fork_children()
    yield
    multiprocessing.set_executable(before)


def test_without_a_server_multiprocessing_spawns_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    before = multiprocessing.spawn.get_executable()
    monkeypatch.setenv(client.ADDRESS, "off")
    server.fork_children()
    assert multiprocessing.spawn.get_executable() == before


@pytest.mark.usefixtures("forked_children")
def test_what_multiprocessing_spawns_is_a_fork() -> None:
    """It shares pipes and semaphores with its parent."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=say, args=(queue,))
    child.start()
    parent, imported = queue.get(timeout=WAIT_S)
    child.join(WAIT_S)
    assert child.exitcode == 0
    assert imported
    assert "actors.forks.server" in psutil.Process(parent).cmdline()


class Worker:
    def process(self) -> tuple[int, int]:
        import torch

        return os.getppid(), torch.get_num_threads()


def test_rays_workers_are_forks_with_their_own_threads(ray_session: None) -> None:
    options: list[dict[str, Any]] = [{"env_vars": {"OMP_NUM_THREADS": str(threads)}} for threads in (1, 2)]
    workers = [ray.remote(Worker).options(num_cpus=0, runtime_env=one).remote() for one in options]
    found = ray.get([worker.process.remote() for worker in workers], timeout=WAIT_S)
    for worker in workers:
        ray.kill(worker)
    assert [threads for _, threads in found] == [1, 2]
    assert {"actors.forks.server" in psutil.Process(parent).cmdline() for parent, _ in found} == {True}
