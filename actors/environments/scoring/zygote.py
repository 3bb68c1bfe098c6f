"""The process that scoring processes are forked from: it has imported the verifiers, so that a fork is ready in milliseconds.

    pool ── start: what to import ──► zygote ── {"ready": isolation} ──► pool
         ── a worker's two lines ───► fork keeper ── fork worker        (again and again, whenever one was killed)

It runs no verifier itself. It ends when the pool closes its line.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from actors.environments.registry import imported_here
from actors.environments.rewards.base import GoldCheck, Reward
from actors.environments.rewards.build import build_rewards, import_rewards
from actors.environments.scoring import confine, worker
from actors.environments.scoring.wire import message
from actors.heap import freeze_heap
from configs.environment import EnvironmentConfig
from configs.rewards import AnyReward, PythonReward, ScoringConfig
from configs.secrets import resolve

SPAWN = b"w"


@dataclass(frozen=True)
class Start:
    """What a zygote is told.

    Attributes:
        path: `sys.path` of the pool's process, so that both import the same. rewards: those to compute.
        environment: what a reward of the kind `environment` is made of; None: there is no such reward.
        golds: check the problems' own answers instead of scoring responses.
    """

    path: tuple[str, ...]
    rewards: tuple[AnyReward, ...]
    environment: EnvironmentConfig | None
    max_new_tokens: int
    config: ScoringConfig
    golds: bool = False

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the environment variables that the processes are given."""
        return (*self.config.environment_variables, *(self.environment.environment_variables if self.environment else ()))

    def resolved(self) -> Start:
        """With its secrets looked up in this process, and without those of an environment that no reward asks."""
        rewards = tuple(
            reward.model_copy(update={"options": resolve(reward.options, f"rewards.{reward.label}.options")})
            if isinstance(reward, PythonReward)
            else reward
            for reward in self.rewards
        )
        asked, source = any(reward.kind == "environment" for reward in rewards), self.environment
        if not asked or source is None or source.kind != "python":
            return replace(self, rewards=rewards, environment=None)
        source = source.model_copy(update={"options": resolve(source.options, "environment.options")})
        return replace(self, rewards=rewards, environment=source)


def main() -> None:
    """Serve the pool at the socket that is file descriptor number `argv[1]`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with control.makefile("rb") as incoming:
        start: Start = pickle.load(incoming)
    sys.path[:] = start.path
    try:
        import_rewards(start.rewards)
    except BaseException as error:  # noqa: BLE001  (a user's module may raise anything)
        control.sendall(message(ready=False, error=f"{type(error).__name__}: {error}"[:2000]))
        return
    control.sendall(message(ready=True, namespaces=confine.kernel_allows_namespaces()))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    freeze_heap()
    number = 0
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 2)
        if data != SPAWN:
            return
        number = (number + 1) % 2**16
        line, leash = (socket.socket(fileno=fd) for fd in fds)
        if os.fork() == 0:
            control.close()
            _keep(start, number, line, leash)
        line.close()
        leash.close()


def _build(start: Start) -> Mapping[str, Reward]:
    environment = None if start.environment is None else imported_here(start.environment)
    rewards = build_rewards(start.rewards, max_new_tokens=start.max_new_tokens, environment=environment)
    if not start.golds:
        return rewards
    return {label: GoldCheck(reward, start.config.success_threshold) for label, reward in rewards.items()}


def _keep(start: Start, number: int, line: socket.socket, leash: socket.socket) -> None:
    """The keeper: fork the worker, end it when the leash is dropped, and then all that it started. Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        confine.adopt_orphans()
        confine.enter_namespaces(network=any(reward.kind in ("python", "environment") for reward in start.rewards))  # a user's may want it
        child = os.fork()
        if child == 0:
            leash.close()
            os.closerange(3, line.fileno())
            os.closerange(line.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            confine.limit(start.config.memory_mib, start.config.max_processes, number)
            confine.adopt_orphans()
            worker.serve(line, lambda: _build(start))
            return  # to the end of the process, whatever threads or exit handlers there are
        line.close()
        with_child = os.pidfd_open(child)
        select.select([with_child, leash.fileno()], [], [])
        signal.pidfd_send_signal(with_child, signal.SIGKILL)
        confine.sweep()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
