"""Ray's worker processes, forked from one that has imported torch, Megatron and vLLM already.

An engine computes for 11 s and a policy worker for 4 s before its first own line, all of it imports, in dozens of processes. Here
that is paid once per session of tests; the processes, and what runs in them, are otherwise those of a run. Ray is not imported
before the fork: its C++ part reads the environment when it is loaded.

    raylet ──► `launch` (Ray's `py_executable`) ── arguments, environment, directory, stdout, stderr ──► `serve` ── fork ──► worker
                   └─ waits for the connection's end; when it is killed itself, the worker is too
"""

import os
import socket
import sys

PRELOADED = ("torch", "tensordict", "transformers", "megatron.core.models.gpt", "vllm.engine.arg_utils", "vllm.v1.worker.cpu_model_runner")

# `launch` runs in a bare interpreter and must be quick: everything else is imported where it is needed.


def launch(address: str) -> None:
    """Have this command's Python script run in a fork, as if it ran here, and wait for its end."""
    import json

    request = json.dumps([sys.argv[3:], dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [1, 2])
        connection.sendall(request)
        connection.recv(1)


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

    gc.freeze()  # what is here already is not looked at, and so not copied, by the forks' collections
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        os.write(ready, b"ready\n")
        os.close(ready)
        ends: dict[
            int, tuple[int, socket.socket]
        ] = {}  # by file descriptor, both of the process and of the connection: its pid, its connection
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    request, outputs = _receive(connection)
                    pid = os.fork()
                    if pid == 0:
                        break
                    for fd in outputs:
                        os.close(fd)
                    for fd in (os.pidfd_open(pid), connection.fileno()):
                        ends[fd] = pid, connection
                        selector.register(fd, selectors.EVENT_READ)
                elif key.fd in ends:
                    pid, connection = ends[key.fd]
                    if key.fd == connection.fileno():
                        os.kill(pid, signal.SIGKILL)  # its launcher is gone
                    os.waitpid(pid, 0)
                    for fd in [fd for fd, (owner, _) in ends.items() if owner == pid]:
                        del ends[fd]
                        selector.unregister(fd)
                        if fd != connection.fileno():
                            os.close(fd)
                    connection.close()
            else:
                continue
            break  # the fork
        for fd in {connection.fileno(), *ends}:
            os.close(fd)
    _become(request, outputs)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    header, outputs, _, _ = socket.recv_fds(connection, 8, 2)
    request = b""
    while len(request) < int.from_bytes(header, "big"):
        request += connection.recv(2**16)
    return request, outputs


def _become(request: bytes, outputs: list[int]) -> None:
    import json
    import runpy

    arguments, environment, directory = json.loads(request)
    for fd, output in enumerate(outputs, start=1):
        os.dup2(output, fd)
        os.close(output)
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
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    {"launch": launch, "serve": serve}[sys.argv[1]](sys.argv[2])
