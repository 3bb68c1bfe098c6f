"""A process that imports torch, Megatron and vLLM once; a run's workers are forks of it.

On two cores the imports cost an engine 9 s of CPU time, a policy worker 5 s, and most other processes of a run 2 s (docs/architecture.md,
"From the command to the first step"). The server does them while Prefect and Ray start. Its forks are otherwise what Ray's workers are.

    running ── stdin ──► serve: import, then fork for each connection; when stdin closes, kill the forks and end
                             ▲                                 │
    raylet ──► client.py ────┘ arguments, environment,         └── fork ──► default_worker.py
                               directory, stdout, stderr

A GPU's engine has its core in a further process, which multiprocessing starts: that is a fork as well (`fork_children`).

A fork is killed when its client is. Two things must not happen before a fork: an import of Ray, whose C++ part reads the environment when
it is loaded, and the start of CUDA, which a fork cannot use. A server that finds either ends. Then Ray starts the workers itself, as it
does without a server, and the run says so (`trouble`).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from actors.forks import client
from actors.forks.client import ADDRESS
from configs import settings

_ALL = ("torch", "tensordict", "transformers", "vllm.engine.arg_utils", "megatron.core.models.gpt")
_CPU, _GPU = ("vllm.v1.worker.cpu_model_runner",), ("vllm.v1.worker.gpu_worker",)
_COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "actors.forks.server")  # -P: the current directory may have anything
_SOCKET, _LOG, _PYTHON = "forks", "forks.log", "python"
_MOST_FDS = 64
_END_S = 10.0
_NOT_BEGUN = 3  # CUDA_ERROR_NOT_INITIALIZED, cuda.h


@contextmanager
def running(place: Path) -> Iterator[None]:
    """Inside the block workers of this process's Ray, and of its children's, are forks. A server that runs already is used.

    Args:
        place: directory for the server's socket and log.
    """
    if settings.get(ADDRESS):
        yield
        return
    environment = settings.child_environment(
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="passive",
        JE_ARROW_MALLOC_CONF="background_thread:false",  # no thread may live before the fork
        PYTORCH_NVML_BASED_CUDA_CHECK="1",  # whether there are GPUs, without CUDA
        VLLM_LOGGING_LEVEL=settings.get("VLLM_LOGGING_LEVEL") or "WARNING",
    )
    address, python = place / _SOCKET, place / _PYTHON
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(client.__file__)} --python "$@"\n')
    python.chmod(0o700)
    with (
        (place / _LOG).open("wb") as log,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(str(address))  # at once: clients wait until the imports are done
        listener.listen(64)
        server = subprocess.Popen(
            [*_COMMAND, str(listener.fileno())],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, pass_fds=(listener.fileno(),),
            process_group=0,  # a terminal's Ctrl-C is for the run; of its session, by which `make up` finds all that its Ray has started
        )  # fmt: skip
    try:
        with settings.variables(**{ADDRESS: str(address)}):
            yield
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.terminate()  # if it still imports
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        address.unlink(missing_ok=True)
        python.unlink(missing_ok=True)


def trouble() -> str | None:
    """Why workers are not forks although a server was started for them. None: they are, or there is none."""
    if (address := _address()) is None:
        return None
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(address))
        except ConnectionRefusedError:
            said = address.with_name(_LOG).read_text(errors="replace").splitlines()
            return said[-1] if said else "the process is gone"
    return None


def fork_children() -> None:
    """Processes that multiprocessing spawns in this process from now on are forks, where there is a server."""
    if (address := _address()) is not None:
        multiprocessing.set_executable(str(address.with_name(_PYTHON)))


def _address() -> Path | None:
    """The server's socket, where there is a server."""
    address = Path(settings.get(ADDRESS) or "off")
    return address if address.is_socket() else None


def serve(listener: socket.socket) -> None:
    """Import, then fork for each connection until stdin closes."""
    gc.disable()  # of thousands of modules nothing is garbage, and to look for it takes a tenth of the time
    for name in (*_ALL, *(_CPU if settings.gpus_are_hidden() else _GPU)):
        with suppress(ImportError):  # whoever needs it says so
            importlib.import_module(name)
    if "ray" in sys.modules:
        print("a library has imported Ray", flush=True)
        return
    if _cuda_has_begun():
        print("a library has started CUDA", flush=True)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when stdin closes, and its forks before it
    gc.freeze()  # the forks' collections neither look at what is here already nor copy it
    gc.enable()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    forks: dict[int, tuple[socket.socket, int]] = {}  # by pid: the client's connection, the fork's pidfd
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid in forks:
                    os.kill(pid, signal.SIGKILL)
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                asked = _receive(connection)
                if asked is None:
                    continue
                request, fds = asked
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for held in (listener, connection, *(other for other, _ in forks.values())):
                        held.close()  # a client waits until nobody holds its connection
                    _become(request, fds)
                for fd in fds:
                    os.close(fd)
                forks[pid] = connection, os.pidfd_open(pid)
                for watched in (connection.fileno(), forks[pid][1]):
                    selector.register(watched, selectors.EVENT_READ, pid)
                _answer(connection, pid)
            elif key.data in forks:
                connection, pidfd = forks.pop(key.data)
                if key.fd != pidfd:  # the client is gone
                    os.kill(key.data, signal.SIGKILL)
                _, status = os.waitpid(key.data, 0)
                for watched in (connection.fileno(), pidfd):
                    selector.unregister(watched)
                _answer(connection, status >> 8 if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
                connection.close()
                os.close(pidfd)


def _answer(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # the client is gone
        connection.send(b"%d\n" % number)


def _cuda_has_begun() -> bool:
    """In this process. A library that only counts GPUs may begin it."""
    if settings.gpus_are_hidden():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU here
        return False
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _NOT_BEGUN)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """The request and its open files; None: the client went before it had said all, and its connection is closed."""
    fds: list[int] = []
    request = b""
    with suppress(OSError):
        header, fds, _, _ = socket.recv_fds(connection, 8, _MOST_FDS)
        size = int.from_bytes(header, "big")
        while len(request) < size and (more := connection.recv(2**16)):
            request += more
        if size and len(request) == size:
            return request, fds
    for fd in fds:
        os.close(fd)
    connection.close()
    return None


def _become(request: bytes, fds: Sequence[int]) -> NoReturn:
    """Run the program of the request, and end as it does."""
    program, environment, directory, numbers, group, oom_score = json.loads(request)
    with suppress(PermissionError):  # a group of another session, as that of a client that is no fork
        os.setpgid(0, group)
    with suppress(PermissionError):  # lower than ours
        Path("/proc/self/oom_score_adj").write_text(oom_score)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the run may ignore it, as what a shell starts in the background does
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in fds]  # none of them is in another's place then
    for fd in fds:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    settings.replace_all(environment)
    os.chdir(directory)
    _read_again(environment)
    code: object = 0
    try:
        _run(program, environment)
    except SystemExit as error:
        code = error.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (as the interpreter does)
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Ray's static destructors wait for ever: they join a thread that runs.
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run(program: Sequence[str], environment: Mapping[str, str]) -> None:
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [path for path in sys.path if path not in paths]
    if program[0] == "-c":
        sys.argv, sys.path[:] = ["-c", *program[2:]], ["", *paths, *kept]
        exec(program[1], {"__name__": "__main__"})
    else:
        sys.argv, sys.path[:] = list(program), [os.path.dirname(program[0]), *paths, *kept]
        runpy.run_path(program[0], run_name="__main__")


def _read_again(environment: Mapping[str, str]) -> None:
    """What the server's libraries have read or drawn at their import, and is each process's own."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or settings.cpu_count()))
        if environment.get("TORCH_COMPILE_DISABLE") == "1":
            torch.compiler.set_stance("force_eager")
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    tempfile.tempdir = None


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
