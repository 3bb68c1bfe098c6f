"""Asks the fork server for a process, and ends with it. It does so in the place of two programs:

    client.py ARGUMENTS ...             Ray's setup_worker.py, which becomes a worker
    client.py --python ARGUMENTS ...    Python, as multiprocessing starts it (`set_executable`)

Where no server answers, and where the process cannot be a fork, that program runs as it would have without this one. Each worker begins
with this file, so it must be quick: it imports nothing of this project or of Ray, and most modules only in the function that needs them.
"""

import os
import signal
import sys
from collections.abc import Sequence

ADDRESS = "GRPO_FLOWS_FORKS"  # variable with the path of the server's socket; anything else, say "off": no forks


def main(arguments: list[str]) -> int:
    """The exit code of the fork; if there is none, of the program itself."""
    if arguments[:1] == ["--python"]:
        return _python(arguments[1:])
    return _setup_worker(arguments)


def _setup_worker(arguments: list[str]) -> int:
    import argparse
    import json
    import runpy
    from importlib.util import find_spec

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, program = parser.parse_known_args(arguments)
    context = json.loads(known.serialized_runtime_env_context)
    plain = known.language == "PYTHON" and not context.get("command_prefix") and context.get("py_executable") in (None, sys.executable)
    if plain and os.path.basename(program[0]) == "default_worker.py":  # Ray Client's server is started by this file, too
        variables = {name: os.path.expandvars(value) for name, value in context.get("env_vars", {}).items()}
        code = fork(program, os.environ | variables, (1, 2), group=0)  # the raylet kills the process group of a worker that has ended
        if code is not None:
            return code
    ray = find_spec("ray")  # does not import it
    assert ray is not None
    assert ray.origin is not None
    sys.path[0] = os.path.join(os.path.dirname(ray.origin), "_private", "workers")
    sys.argv[0] = os.path.join(sys.path[0], "setup_worker.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def _python(arguments: list[str]) -> int:
    if "--multiprocessing-fork" in arguments:
        fds = [int(fd) for fd in os.listdir("/proc/self/fd") if fd != "0" and os.path.exists(f"/proc/self/fd/{fd}")]
        code = fork(arguments[arguments.index("-c") :], dict(os.environ), fds, group=os.getpgrp())
        if code is not None:
            return code
    os.execv(sys.executable, [sys.executable, *arguments])


def fork(program: Sequence[str], environment: dict[str, str], fds: Sequence[int], group: int) -> int | None:
    """Run a program as a fork that has these open files under the same numbers. Returns its exit code, or None when no server answers.

    SIGTERM is passed on. When this process is killed the fork is.

    Args:
        program: a file and its arguments, or "-c" and code.
        group: process group of the fork; 0: one of its own.
    """
    import json
    import socket

    if not environment.get(ADDRESS):
        return None
    with open("/proc/self/oom_score_adj") as file:  # Ray marks its workers as the first to be killed
        oom_score = file.read()
    request = json.dumps([program, environment, os.getcwd(), fds, group, oom_score]).encode()
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as answers:
        try:
            connection.connect(environment[ADDRESS])
            socket.send_fds(connection, [len(request).to_bytes(8, "big")], fds)
            connection.sendall(request)
            pid = answers.readline()  # comes when the server has imported
        except OSError:
            return None
        if not pid:
            return None
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(int(pid), number))
        status = answers.readline()
    return int(status) if status else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
