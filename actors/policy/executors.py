"""How a stage's call reaches the policy workers: through a Ray compiled graph, or as plain actor calls. One interface.

    PolicyGroup ── run(requests) ──► Executor ─┬─ replica 0:  request ──► execute on worker 0, 1, ..  (TP x CP x PP ranks)
                   one per replica             └─ replica 1:  request ──► execute on worker 4, 5, ..
                                                  (replicas run side by side with different plans)

A request is metadata: the tensors it names come from the data plane. Ray runs one compiled graph per actor at a time, so the graph's
node is the generic `execute`, and the request names the method. Pipeline and tensor parallel traffic is Megatron's own.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import ray
from ray.dag import InputNode, MultiOutputNode
from ray.exceptions import RayActorError, RayChannelError, RayChannelTimeoutError, RayTaskError

from actors.policy import channels
from actors.waiting import ActorGoneError, ActorTimeoutError, cause, wait_all
from configs import settings
from configs.compiled_graph import CompiledGraphConfig

_PROBE_S = 5.0  # for each worker to say that it lives
_GRACE_S = 5.0  # for the other replicas, after one has failed
_TEARDOWN_S = 10.0

channels.wait_by(spinning=False)  # here, since owner and workers alike import this module: `Request` is theirs


@dataclass(frozen=True)
class Request:
    """One call of a worker's method, the same for every rank of a replica."""

    method: str
    arguments: tuple[Any, ...] = ()
    apart: bool = False  # no replica waits for another in it: one that fails leaves the others alone

    def pack(self) -> bytes:
        """The request as a worker's `execute` takes it. Ray passes bytes through; pickling by Ray itself takes three times as long."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def answer(packed: bytes, run: Callable[[Request], Any]) -> bytes:
        """What a worker's `execute` returns: the packed result of `run` on the unpacked request."""
        return pickle.dumps(run(pickle.loads(packed)), pickle.HIGHEST_PROTOCOL)


class PlainExecutor:
    """An actor call per worker.

    Args:
        replicas: worker actors by name, one mapping per data-parallel replica. An actor answers `execute(packed)` and `ping()`.
        timeout_s: longest wait for one call, or for one of several stages in it.
    """

    def __init__(self, replicas: Sequence[dict[str, Any]], timeout_s: float) -> None:
        self._replicas, self._timeout_s = replicas, timeout_s

    compiled = False

    def run(self, requests: Sequence[Request], stages: int = 1) -> list[list[Any]]:
        """Give request r to every worker of replica r, with `stages` times the timeout. Returns results: [replica][rank in it].

        Raises:
            ActorGoneError, ActorTimeoutError: a worker is lost or silent; the message names it. Or what a worker raised.
        """
        refs = {
            name: worker.execute.remote(packed)
            for packed, workers in zip([request.pack() for request in requests], self._replicas, strict=True)
            for name, worker in workers.items()
        }
        values = wait_all(refs, what=requests[0].method, timeout_s=self._timeout_s * stages)
        return [[pickle.loads(values[name]) for name in workers] for workers in self._replicas]

    def close(self) -> None:
        """Nothing to release."""


class CompiledExecutor:
    """A compiled graph per replica. Only the process that built it may call it. Arguments as of `PlainExecutor`.

    Raises:
        Exception: whatever Ray raised while compiling; what was compiled is torn down.
    """

    def __init__(self, replicas: Sequence[dict[str, Any]], timeout_s: float) -> None:
        self._replicas, self._timeout_s = replicas, timeout_s
        self._graphs: list[Any] = []
        self._why_closed = ""
        started = time.monotonic()
        self.spins = _may_spin(replicas)
        try:
            self.wait_by(spinning=self.spins)
            for workers in replicas:
                with InputNode() as request:
                    graph = MultiOutputNode([worker.execute.bind(request) for worker in workers.values()])
                self._graphs.append(graph.experimental_compile(_submit_timeout=timeout_s))
        except BaseException:
            self.close()
            raise
        self.compile_s = time.monotonic() - started
        # A thread per replica: Ray cannot wait for the first of several graphs, and one replica's failure must not wait for the others.
        self._threads = ThreadPoolExecutor(len(replicas), "replica") if len(replicas) > 1 else None

    compiled = True

    def wait_by(self, *, spinning: bool) -> None:
        """How owner and workers wait for each other (`channels`).

        Raises:
            ActorGoneError, ActorTimeoutError: a worker is lost or silent.
        """
        channels.wait_by(spinning=spinning)
        refs = {name: worker.__ray_call__.remote(_wait_by, spinning) for workers in self._replicas for name, worker in workers.items()}
        wait_all(refs, what="set how to wait", timeout_s=self._timeout_s)

    def run(self, requests: Sequence[Request], stages: int = 1) -> list[list[Any]]:
        """As `PlainExecutor.run`. When a failed call may still run on a worker, the graphs are torn down."""
        timeout_s = self._timeout_s * stages
        if not self._graphs:
            raise ActorGoneError(f"{requests[0].method}: the compiled graph was torn down ({self._why_closed})")
        try:
            if self._threads is None:
                return [self._one(0, requests[0], timeout_s)]
            return self._side_by_side(self._threads, requests, timeout_s)
        except RayTaskError as error:
            raise cause(error) from error
        except RayChannelTimeoutError as error:
            silent = ", ".join(name for workers in self._replicas for name in workers)
            message = f"{requests[0].method}: no answer from {silent} within {timeout_s:.0f} s"
            self._tear_down(message)
            raise ActorTimeoutError(message) from error
        except (RayChannelError, RayActorError) as error:
            message = f"{requests[0].method}: {self._dead()} died ({type(error).__name__})"
            self._tear_down(message)
            raise ActorGoneError(message) from error

    def close(self) -> None:
        """Tear the graphs down; the workers live on and take ordinary calls. Idempotent, silent, at most 10 s."""
        self._tear_down("closed")

    def _one(self, replica: int, request: Request, timeout_s: float) -> list[Any]:
        refs = self._graphs[replica].execute(request.pack())
        return [pickle.loads(ref.get(timeout=timeout_s)) for ref in refs]

    def _side_by_side(self, threads: ThreadPoolExecutor, requests: Sequence[Request], timeout_s: float) -> list[list[Any]]:
        futures = [threads.submit(self._one, replica, request, timeout_s) for replica, request in enumerate(requests)]
        done, running = wait(futures, return_when=FIRST_EXCEPTION)
        if failed := next((future for future in futures if future in done and future.exception()), None):
            # The others may have failed alike, or wait in a collective for the failed one. Where they do not, the graphs stay whole.
            if wait(running, timeout=timeout_s if requests[0].apart else _GRACE_S).not_done:
                self._tear_down(f"{type(failed.exception()).__name__}: {failed.exception()}")
            failed.result()
        return [future.result() for future in futures]

    def _dead(self) -> str:
        refs = {worker.ping.remote(): name for workers in self._replicas for name, worker in workers.items()}
        dead = []
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=_PROBE_S)[0]:
            try:
                ray.get(ref, timeout=_PROBE_S)
            except RayActorError:
                dead.append(refs[ref])
        return ", ".join(dead) or "a policy worker"

    def _tear_down(self, why: str) -> None:
        graphs, self._graphs = self._graphs, []
        self._why_closed = self._why_closed or why
        if graphs:
            # Ray logs every step of a tear-down, and waits without a deadline for a worker that is stuck in a collective.
            logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)
            threads = [threading.Thread(target=graph.teardown, daemon=True) for graph in graphs]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + _TEARDOWN_S
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0))


def build_executor(
    replicas: Sequence[dict[str, Any]], timeout_s: float, config: CompiledGraphConfig, *, one_node: bool = True
) -> tuple[PlainExecutor | CompiledExecutor, str]:
    """The executor that the configuration asks for and that works here, and a line that says which and why.

    Args:
        one_node: owner and workers are on one. Between nodes Ray itself looks after a channel in a loop that takes a core of the owner
            and of each worker, and that nothing makes sleep.
    """
    if not config.enabled:
        return PlainExecutor(replicas, timeout_s), "plain actor calls (policy.compiled_graph.enabled is false)"
    if not (one_node or _may_spin(replicas)):
        return PlainExecutor(replicas, timeout_s), (
            f"plain actor calls (between nodes a compiled graph takes a core per process, and there are {settings.cpu_count()})"
        )
    try:
        executor = CompiledExecutor(replicas, timeout_s)
    except Exception as error:  # noqa: BLE001  (whatever Ray says, plain calls still work)
        return PlainExecutor(
            replicas, timeout_s
        ), f"WARNING: plain actor calls, compiling the graph failed: {type(error).__name__}: {error}"
    cores = f"{settings.cpu_count()} core(s)"
    waits = f"waits spinning: {cores}, some idle" if executor.spins else f"waits sleeping: {cores}, none idle for spinning"
    return executor, f"compiled graph over {sum(map(len, replicas))} worker(s) in {executor.compile_s:.1f} s, {waits}"


def _may_spin(replicas: Sequence[dict[str, Any]]) -> bool:
    return channels.has_idle_cores(1 + sum(map(len, replicas)), settings.cpu_count())


def _wait_by(_: Any, spinning: bool) -> None:
    channels.wait_by(spinning=spinning)
