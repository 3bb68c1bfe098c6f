"""PolicyGroup: one actor that owns all Megatron workers of a run, and the only one that calls them.

    task ──train(meta)──► PolicyGroup ──Executor: a plan per replica──► worker 0 .. worker N-1   (one process per GPU)
                              └── plan_batch: metadata only                  └── columns: get/put ──► data plane

Stages go through the executor (a compiled graph or plain actor calls); start-up, export and optimizer resets are ordinary actor calls.
The group makes one call at a time, so none overlap on a worker. The stages of a step may be sent ahead: they are planned when they come,
and begin when it is their turn (turns.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray

from actors import names, node, rendezvous
from actors.checkpoints.errors import CheckpointError
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import BatchPlan, plan_batch
from actors.data_plane.usage import OperationUsage, merge
from actors.files import Files, at_this_node
from actors.generation.pool import EnginePool
from actors.generation.types import UpdateOptions
from actors.generation.weight_sync import WeightSync
from actors.heap import freeze_heap
from actors.lending import Lent, collect, deliver, lend, lending, take_back
from actors.models.flops import training_flops
from actors.policy.executors import CompiledExecutor, PlainExecutor, Request, build_executor
from actors.policy.limits import FLAG, SKIPPED, Limits, tripped
from actors.policy.turns import Turn, Turns
from actors.policy.warm_up import warm_up
from actors.policy.worker_actor import PolicyWorkerActor
from actors.refit.transport import RefitPlan
from actors.rendezvous import Place
from actors.waiting import ActorTimeoutError, wait, wait_all
from configs.deadlines import Deadlines
from configs.policy import OptimizerConfig, PolicyConfig

_POLL_S = 0.1  # between two questions whether a save is written
_MEMORY = "gpu_memory/"  # metrics of one worker; the largest of all is reported


class PolicyGroup:
    """Wrapped by `ray.remote` where the run starts its actors. Every method is one stage of a step."""

    def __init__(
        self,
        config: PolicyConfig,
        model: str | Files,
        namespace: str,
        address: DataPlaneAddress,
        timeout_s: float,
        seed: int,
        temperature: float,
        worker_options: Sequence[Mapping[str, Any]],
        longest: int,
        refit_plan: RefitPlan,
        teachers: Mapping[str, str | Files] | None = None,
    ) -> None:
        self._config, self._namespace, self._address = config, namespace, address
        self._version, self._model_path, self._timeout_s, self._longest = 0, at_this_node(model), timeout_s, longest
        self._deadlines = Deadlines(
            generation=refit_plan.engine_timeout_s, data_plane=timeout_s, policy=config.call_timeout_s, updates=config.updates_per_step
        )
        self._lock = threading.RLock()  # a worker does one thing at a time, however many threads this actor has
        self._save_lock = threading.Lock()
        self._saving: tuple[str, int, Lent] | None = None  # directory, weight version and places of the save that is being written
        self._executor: PlainExecutor | CompiledExecutor = PlainExecutor([], 0.0)  # until the workers are ready
        self._turns = Turns(self._deadlines.policy_stage)
        self._refit_plan = refit_plan
        self._weight_sync: WeightSync | None = None  # built at the first refit, when the engines are known
        remote = ray.remote(PolicyWorkerActor)
        self._workers = {}  # by name
        for rank, (name, options) in enumerate(zip(names.workers(len(worker_options)), worker_options, strict=True)):
            self._workers[name] = remote.options(name=name, namespace=namespace, **options).remote(
                config, model, rank, address, timeout_s, seed, temperature, refit_plan.transport, teachers or {}
            )

    def ready(self) -> str:
        """Build the model on every worker, and compile the graph; and warm up, unless engines must sleep first. A line for the log."""
        self._nodes = dict(zip(self._workers, self._on_all("node_id"), strict=True))
        nodes = {*self._nodes.values()}
        info = self._on_all("setup", self._meeting_place(nodes))[0]
        self._row_multiple = self._config.parallel.row_multiple(info["device"])
        named = list(self._workers.items())
        replicas = [dict(named[rank] for rank in ranks) for ranks in self._config.parallel.replicas]
        self._executor, how = build_executor(
            replicas, self._deadlines.workers, self._config.compiled_graph, one_node=nodes == {node.own_id()}
        )
        line = (
            f"{len(self._workers)} worker(s) on {info['device']}, {info['parameters']:,} parameters, {info['optimizer']}; {how}; "
            f"{info['cuda_graphs']}"
        )
        return line if self._refit_plan.engines_sleep else f"{line}; {self.warm_up()}"

    def warm_up(self) -> str:
        """Every stage over the largest batch, before step 1: what it takes is seen now. A line for the log."""
        plane = connect(self._address, timeout_s=self._timeout_s)
        warm = warm_up(
            self._config, plane, self._longest, lambda request, meta: self._run(request.method, self._plan(meta), *request.arguments)
        )
        plane.close()
        self._on_all("release_memory")
        self._on_all("ready")
        freeze_heap()
        return "warm-up: " + ", ".join(f"{stage} {value:.1f} s" for stage, value in warm.items())

    def _meeting_place(self, nodes: set[str]) -> Place:
        if len(nodes) > 1:
            return rendezvous.board()
        name = next(iter(self._workers))
        first: Any = self._workers[name]
        return wait(first.announce.remote(), who=name, what="announce where the ranks meet", timeout_s=self._config.timeout_s)

    def train(self, meta: KVBatchMeta, objective: str, turn: Turn | None = None, limits: Limits | None = None) -> dict[str, float]:
        """Optimizer steps over the batch.

        Args:
            objective: policy.loss.objective, of rollouts: `updates_per_step` steps, and a new weight version. Or "sft": one step.
            limits: as of `PolicyWorker.train`. Beyond one of them neither that update is made nor those after it. The weight version
                grows all the same.

        Returns:
            updates, the number of them that no guard stopped (skipped_steps of these overflowed); means over those that were computed
            (maxima of `/max` and `gpu_memory/`, sums of `cuda_graph/`, `guard/` and skipped_steps; where one was beyond a limit, its own
            values of what is limited); padding_waste (the part of the computed tokens that are no sequence's), tokens, FLOP rate.

        Raises:
            ValueError: a batch that does not divide. ActorGoneError, ActorTimeoutError: a worker is lost. WithdrawnError: not begun.
        """
        of_rollouts = objective == self._config.loss.objective
        updates = self._config.updates_per_step if of_rollouts else 1
        size = len(meta) // updates
        plans = [self._plan(meta.slice(update * size, (update + 1) * size)) for update in range(updates)]
        with self._in_turn(turn):
            started = time.monotonic()
            history = self._train(plans, objective, limits)
            self._version += of_rollouts
            seconds = time.monotonic() - started
        flops = training_flops(self._model_path, meta.sequence_lengths)
        return of_updates(history, limits or {}) | {
            "tokens": float(sum(meta.sequence_lengths)),
            "train_s": seconds,
            "tflops": flops / 1e12,
            "tflops_per_worker": flops / seconds / 1e12 / len(self._workers),
            "compiled_graph_active": float(self._executor.compiled),
        }

    def pass_over(self, turn: Turn) -> None:
        """A step that is not trained at all: the weight version grows, and the weights stay."""
        with self._in_turn(turn):
            self._version += 1

    def logprob(self, meta: KVBatchMeta, column: str, reference: bool = False, turn: Turn | None = None) -> dict[str, float]:
        """Write the log-probabilities of the current (or reference) weights as `column`. Returns logprob_s, and on CUDA gpu_memory/."""
        plan = self._plan(meta)
        with self._in_turn(turn):
            started = time.monotonic()
            metrics = self._run("logprob", plan, column, reference, apart=True)
            return {"logprob_s": time.monotonic() - started} | {name: metrics[name] for name in metrics if name.startswith(_MEMORY)}

    def place(self) -> str:
        """`PolicyWorker.place`, of all workers."""
        return "; ".join(dict.fromkeys(self._call("place")))

    def evaluate(self, meta: KVBatchMeta) -> dict[str, float]:
        """The supervised loss of the present weights over the batch, without an update. Returns loss, entropy, response_tokens."""
        return self._run("evaluate", self._plan(meta))

    def withdraw(self, step: int) -> None:
        """Stages of this step that were sent ahead do not begin."""
        self._turns.withdraw(step)

    def snapshot_reference(self) -> None:
        """Make the current weights the reference policy."""
        self._call("snapshot_reference")

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Fresh moments and schedule."""
        self._call("reset_optimizer", optimizer)

    def data_plane_usage(self) -> dict[str, OperationUsage]:
        """What the workers' data-plane clients did so far, together."""
        return merge(self._on_all("data_plane_usage"))

    def refit(self, engines: list[str], options: UpdateOptions, turn: Turn | None = None) -> dict[str, float]:
        """Give the current weights to the engines. Returns the weight version, seconds, bytes, and how long running requests stood still.

        Raises:
            ActorGoneError, ActorTimeoutError: a worker or an engine is lost; the message names it. NoEngineError: none is left.
            WithdrawnError: not begun.
        """
        with self._in_turn(turn):
            started = time.monotonic()
            if self._weight_sync is None:
                patience = self._config.timeout_s + self._refit_plan.engine_timeout_s  # the engines' own deadline is the inner one
                restart_s = self._deadlines.restart
                pool = EnginePool(
                    self._namespace, engines, timeout_s=patience, recover=options.recover, restart_s=restart_s, return_s=restart_s
                )
                self._weight_sync = WeightSync(self._refit_plan, self._workers, pool, self._config.timeout_s)
            if self._refit_plan.engines_sleep:  # they wake now, and want the memory that the passes have left
                self._on_all("release_memory")
            taken = self._weight_sync.send(self._version, options)
            return {
                "weight_version": self._version,
                "refit_s": time.monotonic() - started,
                "bytes": float(max(update.bytes for update in taken.values())),
                "pause_s": max(update.pause_s for update in taken.values()),
            }

    def prepare_saves(self, timeout_s: float) -> None:
        """Allocate the workers' host memory for saves: the first save then stands still no longer than others."""
        self._call("prepare_save", timeout_s=timeout_s)

    def begin_save(self, directory: str, timeout_s: float, turn: Turn | None = None) -> dict[str, float]:
        """Copy the policy's state, and begin to write it to a directory of this node. A save before this one is waited for.

        Args:
            timeout_s: longest wait for that save (as of `wait_for_save`).

        Returns:
            standstill_s: training could not go on; waited_s: for the save before.

        Raises:
            CheckpointError: the save before could not be written. ActorGoneError, ActorTimeoutError: a worker is lost.
            WithdrawnError: not begun.
        """
        with self._save_lock:
            started = time.monotonic()
            if self._saving is not None:
                self._end_save(timeout_s)
            waited = time.monotonic() - started
            lent = lend(Path(directory), self._nodes.values())
            try:
                with self._in_turn(turn):
                    started = time.monotonic()
                    self._call_in(lent, "begin_save", timeout_s=self._deadlines.policy_stage)
                    self._saving = (directory, self._version, lent)
                    return {"standstill_s": time.monotonic() - started, "waited_s": waited}
            except BaseException:
                take_back(lent, Path(directory))
                raise

    def wait_for_save(self, timeout_s: float) -> float:
        """Wait until the save that was begun is written. Stages go on meanwhile. Returns the seconds of writing, 0 if none was begun.

        Args:
            timeout_s: longest writing; the call may take three times `Deadlines.policy_stage` longer, where workers are busy or silent.

        Raises:
            CheckpointError: it could not be written. ActorGoneError, ActorTimeoutError: a worker is lost, or `timeout_s` was too short.
        """
        with self._save_lock:
            return self._end_save(timeout_s) if self._saving is not None else 0.0

    def load_state(self, directory: str, optimizer: OptimizerConfig | None, timeout_s: float) -> dict[str, Any]:
        """Go on from a saved state, also after further training. Arguments and result as of `PolicyWorker.load_state`.

        Raises:
            CheckpointError: it is damaged, or another model's. ActorGoneError, ActorTimeoutError: a worker is lost.
        """
        with self._lock:
            loaded: dict[str, Any] = self._load(directory, "load_state", optimizer, timeout_s=timeout_s)[0]
            self._version = loaded["weight_version"]
        return loaded

    def scale_rate(self, factor: float) -> None:
        """Multiply the learning rate of all further steps, the schedule's end included, by this factor."""
        self._call("scale_rate", factor)

    def save_reference(self, directory: str, timeout_s: float) -> None:
        """Write the reference weights. Raises CheckpointError."""
        self._save(directory, "save_reference", timeout_s=timeout_s)

    def load_reference(self, directory: str, timeout_s: float) -> None:
        """Make saved weights the reference policy. Raises CheckpointError."""
        self._load(directory, "load_reference", timeout_s=timeout_s)

    def save_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face directory."""
        self._save(path, "save_hf")

    def close(self) -> None:
        """Tear the compiled graph down, also beside a stage that runs. An actor that then exits by itself takes Ray's semaphores along."""
        self._executor.close()

    @contextmanager
    def _in_turn(self, turn: Turn | None) -> Iterator[None]:
        with self._turns.take(turn) if turn else nullcontext(), self._lock:
            yield

    def _plan(self, meta: KVBatchMeta) -> BatchPlan:
        parallel = self._config.parallel
        return plan_batch(
            meta,
            self._config.batching,
            data_parallel=parallel.data,
            align=self._row_multiple,
            sequence_align=parallel.sequence_multiple,
        )

    def _train(self, plans: list[BatchPlan], objective: str, limits: Limits | None) -> list[dict[str, float]]:
        replicas = zip(*(plan.shards for plan in plans), strict=True)
        requests = [Request("train_steps", (shards, objective, limits)) for shards in replicas]
        updates = zip(*self._execute(requests, stages=len(plans)), strict=True)
        return [_of_all(list(ranks)) | {"padding_waste": 1 - plan.token_efficiency} for ranks, plan in zip(updates, plans, strict=False)]

    def _run(self, method: str, plan: BatchPlan, *arguments: Any, apart: bool = False) -> dict[str, float]:
        requests = [Request(method, (shard, *arguments), apart) for shard in plan.shards]
        return _of_all([rank or {} for rank in self._execute(requests)])

    def _execute(self, requests: list[Request], stages: int = 1) -> list[Any]:
        with self._lock:
            results = self._executor.run(requests, stages)
        return [rank for replica in results for rank in replica]

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """A method of every `PolicyWorker`."""
        with self._lock:
            return self._on_all("call", method, *arguments, timeout_s=timeout_s)

    def _call_in(self, lent: Lent, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """The same; its first argument is the path that the worker's node has for a directory."""
        with self._lock:
            workers: dict[str, Any] = self._workers
            refs = {name: worker.call.remote(method, lent[self._nodes[name]], *arguments) for name, worker in workers.items()}
            return list(wait_all(refs, what=method, timeout_s=timeout_s or self._config.timeout_s).values())

    def _save(self, directory: str, method: str, timeout_s: float | None = None) -> None:
        with lending(Path(directory), self._nodes.values()) as lent:
            self._call_in(lent, method, timeout_s=timeout_s)
            collect(lent, Path(directory))

    def _load(self, directory: str, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        with lending(Path(directory), self._nodes.values()) as lent:
            deliver(Path(directory), lent)
            return self._call_in(lent, method, *arguments, timeout_s=timeout_s)

    def _end_save(self, timeout_s: float) -> float:
        # Questions go to the workers beside their stages, not as ones: training goes on meanwhile.
        assert self._saving is not None
        (directory, version, lent), deadline = self._saving, time.monotonic() + timeout_s
        self._saving = None  # also when it fails: the next one begins anew
        try:
            return self._finish_save(directory, version, lent, deadline, timeout_s)
        finally:
            take_back(lent, Path(directory))

    def _finish_save(self, directory: str, version: int, lent: Lent, deadline: float, timeout_s: float) -> float:
        patience = self._deadlines.policy_stage  # without a compiled graph a question waits for the stage that runs
        while any(writing := self._on_all("is_saving", timeout_s=patience)):
            if time.monotonic() > deadline:
                late = [name for name, one in zip(self._workers, writing, strict=True) if one]
                raise ActorTimeoutError(f"{directory}: {', '.join(late)} did not write their parts within {timeout_s:g} s")
            time.sleep(_POLL_S)
        found = self._on_all("save_results", timeout_s=patience)
        name = next(iter(self._workers))
        first: Any = self._workers[name]
        finished = first.finish_save.remote(lent[self._nodes[name]], [results for results, _ in found], version)
        wait(finished, who=name, what="finish_save", timeout_s=patience)
        try:
            collect(lent, Path(directory))
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error}") from error
        return max(float(seconds) for _, seconds in found)

    def _on_all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """A method of every worker's actor."""
        refs = {name: getattr(worker, method).remote(*arguments) for name, worker in self._workers.items()}
        what = str(arguments[0]) if method == "call" else method
        return list(wait_all(refs, what=what, timeout_s=timeout_s or self._config.timeout_s).values())


def _of_all(ranks: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of one call: equal on all ranks, but for the memory of each."""
    return ranks[0] | {name: max(rank[name] for rank in ranks) for name in ranks[0] if name.startswith(_MEMORY)}


def of_updates(history: Sequence[Mapping[str, float]], limits: Limits) -> dict[str, float]:
    """One report of the updates of a step: what `PolicyGroup.train` says of them."""
    names = dict.fromkeys(name for one in history for name in one)
    metrics = {name: _over_updates(name, [one[name] for one in history if name in one]) for name in names}
    if tripped(history[-1]):  # a mean over updates would not show what was beyond the limit
        metrics |= {name: history[-1][name] for name in limits if name in history[-1]}
    return metrics | {"updates": float(sum(not tripped(one) for one in history))}


def _over_updates(name: str, values: list[float]) -> float:
    if name.startswith(("cuda_graph/", FLAG, SKIPPED)):
        return sum(values)
    return max(values) if name.endswith("/max") or name.startswith(_MEMORY) else sum(values) / len(values)
