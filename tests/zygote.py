"""Ray's worker processes, forked from one that has imported torch, Megatron and vLLM already.

An engine computes for 11 s and a policy worker for 4 s before its first own line, all of it imports, in dozens of processes. Here
that is paid once per session of tests; the processes, and what runs in them, are otherwise those of a run. Ray is not imported
before the fork: its C++ part reads the environment when it is loaded.

    raylet ──► python setup_worker.py ──► startup/sitecustomize.py: `launch`
                                             │ arguments, environment, directory, stdout, stderr      ▲ closes when the worker ends
                                             ▼                                                        │
                                          `serve` ── fork ──► default_worker.py

When `launch` is killed the worker is, and all are when `serve` ends. An actor of which a test needs to be Ray's own child has
`OWN_PROCESS` as its runtime_env.
"""

import os
import socket
import sys
from collections.abc import Sequence

PRELOADED = ("torch", "tensordict", "transformers", "megatron.core.models.gpt", "vllm.engine.arg_utils", "vllm.v1.worker.cpu_model_runner")
OWN_PROCESS = {"env_vars": {"TESTS_ZYGOTE": ""}}
NAMESPACES = ("/proc/self/ns/net", "/proc/self/ns/mnt")  # of a node of tests/nodes.py

# `launch` must be quick: what it does not need is imported where it is needed.


def launch(arguments: Sequence[str], address: str) -> None:
    """Do as Ray's setup_worker.py with these arguments, but in a fork, and end with it. Returns when that is not wanted or not possible."""
    import argparse
    import json

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, program = parser.parse_known_args(arguments)
    context = json.loads(known.serialized_runtime_env_context)
    environment = {**os.environ, **{name: os.path.expandvars(value) for name, value in context.get("env_vars", {}).items()}}
    plain = not context.get("command_prefix") and context.get("py_executable") in (None, sys.executable)
    if known.language != "PYTHON" or not plain or not environment["TESTS_ZYGOTE"]:
        return
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address)
        except OSError:
            return  # the session of tests has ended
        request = json.dumps([program, environment, os.getcwd()]).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [1, 2, *(os.open(place, os.O_RDONLY) for place in NAMESPACES)])
        connection.sendall(request)
        connection.recv(1)
    os._exit(0)


def serve(address: str) -> None:
    """Import, then fork for each connection until stdin closes. A line on stdout says that it is ready."""
    import gc
    import importlib
    import selectors
    import signal

    ready = os.dup(1)
    os.dup2(2, 1)  # vLLM prints while it is imported
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.freeze()  # the forks' collections neither look at what is here already nor copy it
    selector, listener = selectors.DefaultSelector(), socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    os.write(ready, b"ready\n")
    os.close(ready)
    launchers: dict[int, tuple[socket.socket, int]] = {}  # by pid of the worker: its launcher's connection, its pidfd
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid in launchers:
                    os.kill(pid, signal.SIGKILL)
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, given = _receive(connection)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for held in (listener, connection, *(other for other, _ in launchers.values())):
                        held.close()  # a launcher waits until nobody holds its connection
                    return _become(request, given)
                for fd in given:
                    os.close(fd)
                launchers[pid] = connection, os.pidfd_open(pid)
                for fd in (connection.fileno(), launchers[pid][1]):
                    selector.register(fd, selectors.EVENT_READ, pid)
            elif key.data in launchers:
                connection, pidfd = launchers.pop(key.data)
                if key.fd != pidfd:  # the launcher is gone
                    os.kill(key.data, signal.SIGKILL)
                os.waitpid(key.data, 0)
                for fd in (connection.fileno(), pidfd):
                    selector.unregister(fd)
                connection.close()
                os.close(pidfd)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    header, given, _, _ = socket.recv_fds(connection, 8, 2 + len(NAMESPACES))
    request = b""
    while len(request) < int.from_bytes(header, "big"):
        request += connection.recv(2**16)
    return request, given


def _become(request: bytes, given: list[int]) -> None:
    import atexit
    import json
    import runpy

    os.setpgid(0, 0)  # the raylet kills the process group of a worker that has ended
    arguments, environment, directory = json.loads(request)
    for place, namespace in zip(NAMESPACES, given[2:], strict=True):
        if os.fstat(namespace).st_ino != os.stat(place).st_ino:
            os.setns(namespace)
    for fd, output in enumerate(given[:2], start=1):
        os.dup2(output, fd)
    for fd in given:
        os.close(fd)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = arguments
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(arguments[0]), *(path for path in paths if path), *(path for path in sys.path[1:] if path not in paths)]
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))  # OpenMP read its own variable when the zygote loaded it
    code: object = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code if isinstance(code, int) else int(code is not None)
    )  # Ray's static destructors wait for ever: they join a thread that runs


if __name__ == "__main__":
    serve(sys.argv[1])
