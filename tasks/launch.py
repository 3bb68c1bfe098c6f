"""Starts a run's actors, all at once, and ends them.

    grpo       flow process ── owns ──► data plane, engines, environment, ledger, collector, policy group ── owns ──► policy workers
    sft        flow process ── owns ──► data plane, collector, policy group ── owns ──► policy workers
    evaluate   flow process ── owns ──► engines of each model, environment
    replay     flow process ── owns ──► data plane, policy group ── owns ──► policy workers

Ray ends what a driver owns when the driver ends, however it ends: return, failure, cancellation or SIGKILL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import ray
import torch
from prefect import task

from actors import names, node
from actors.data_plane import transfer_queue as queue
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.environments.actor import SCORING_THREADS, EnvironmentActor, keys_and_secrets
from actors.files import READERS, Files, FileServer
from actors.generation.engine import engine_actor_class
from actors.models.hf import teacher_field
from actors.models.memory_plan import gpu_capacity
from actors.models.source import local_model
from actors.policy.group import PolicyGroup
from actors.preflight import engine_bytes, longest_sample
from actors.preflight_sft import SupervisedData
from actors.refit.transport import RefitPlan
from actors.rollout.collector import Collector
from actors.rollout.journal import Opening
from actors.rollout.ledger_actor import ledger_actor_class
from actors.rollout.prompts import end_token_ids
from actors.rollout.supervised import SupervisedCollector
from actors.waiting import look_for, wait_all
from configs import settings
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from configs.evaluate import EvaluateConfig
from configs.loss import PREFERENCE
from configs.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from configs.run import BaseRunConfig, RunConfig, ScoredConfig
from configs.sft import SftConfig
from tasks import nodes
from tasks.call import STAGE
from tasks.handles import EvaluationActors, RunActors
from tasks.placement import EnginePlacement, Placement, PolicyPlacement, place, place_engines, place_policy
from tasks.standing import end, keep_standing, wait_until_gone


def planned_actors(config: RunConfig) -> list[tuple[str, str]]:
    """(name, what it does) of every actor that `launch` would start."""
    engine = f"vLLM, {config.generation.executor}, {config.generation.dtype}"
    rules = config.ledger
    groups = rules.capacity(config.rollout.prompts_per_step)
    return [
        _planned_placement(config),
        _planned_data_plane(config),
        *((name, engine) for name in names.engines(config.generation.num_engines)),
        _planned_rewards(config),
        (names.LEDGER, f"{groups} groups at most, {rules.sampler}, at most {rules.max_trajectory_age_steps} steps old when trained"),
        (names.COLLECTOR, f"{config.rollout.prompts_per_step} prompts x {config.rollout.responses_per_prompt} responses a step"),
        *_planned_policy(config.policy),
    ]


def planned_sft_actors(config: SftConfig) -> list[tuple[str, str]]:
    """(name, what it does) of every actor that `launch_sft` would start."""
    environment = config.data.environment
    source = config.data.train if environment is None else f"environment {environment.kind}"
    return [
        _planned_placement(config),
        _planned_data_plane(config),
        (names.COLLECTOR, f"{config.batch_size} samples a step of {source}"),
        *_planned_policy(config.policy),
    ]


def planned_engines(config: EvaluateConfig) -> list[tuple[str, str]]:
    """(name, what it does) of every actor that `launch_engines` would start."""
    count, how = config.generation.num_engines, f"vLLM, {config.generation.executor}, {config.generation.dtype}"
    engines = [(name, f"{how}: {path}") for label, path in config.models.items() for name in names.engines(count, label)]
    return [_planned_placement(config), *engines, _planned_rewards(config)]


def _planned_rewards(config: ScoredConfig) -> tuple[str, str]:
    return names.ENVIRONMENT, "rewards: " + ", ".join(f"{reward.weight:g} x {reward.label}" for reward in config.paid)


def _planned_placement(config: BaseRunConfig | EvaluateConfig) -> tuple[str, str]:
    try:
        return "placement", placement_here(config).describe()
    except ConfigError as error:
        return "placement", f"not on this machine: {error}"


def placement_here(config: BaseRunConfig | EvaluateConfig) -> Placement | PolicyPlacement | EnginePlacement:
    """On this machine's GPUs.

    Raises:
        ConfigError: they do not allow it.
    """
    return _placement(config, torch.cuda.device_count())


def _placement(config: BaseRunConfig | EvaluateConfig, gpus: int) -> Placement | PolicyPlacement | EnginePlacement:
    if isinstance(config, EvaluateConfig):
        return _engines_placement(config, gpus)
    return place(config, gpus) if isinstance(config, RunConfig) else place_policy(config, gpus)


def _engines_placement(config: EvaluateConfig, gpus: int) -> EnginePlacement:
    return place_engines(config, gpus, engine_bytes(config), gpu_capacity()) if gpus else place_engines(config, 0)


def _planned_data_plane(config: BaseRunConfig) -> tuple[str, str]:
    return "data plane", f"TransferQueue: a controller and {config.data_plane.num_storage_units} storage unit(s)"


def _planned_policy(policy: PolicyConfig) -> list[tuple[str, str]]:
    parallel = policy.parallel
    layout = f"DP{parallel.data} TP{parallel.tensor} PP{parallel.pipeline} CP{parallel.context}"
    workers = [(name, f"Megatron-Core, {policy.dtype}") for name in names.workers(parallel.world_size)]
    return [(names.POLICY, f"owns the workers ({layout})"), *workers]


def logical_cpus(config: BaseRunConfig | EvaluateConfig) -> int:
    """CPUs of a cluster of the run's own: one for each engine and policy worker and one to spare; and for flows that have work for Ray's
    workers (flows/shards.py) as many as the machine has."""
    if isinstance(config, EvaluateConfig):
        return max(len(config.models) * config.generation.num_engines + 1, settings.cpu_count())
    if isinstance(config, RunConfig):
        return config.generation.num_engines + config.policy.parallel.world_size + 1
    return max(config.policy.parallel.world_size + 1, settings.cpu_count())


def logical_gpus(*configs: BaseRunConfig | EvaluateConfig) -> int | None:
    """GPUs of a cluster of a run's own, in which these run one after the other; None: it joins one that has its own.

    Raises:
        ConfigError: this machine's do not allow the placement.
    """
    if configs[0].ray.joined or ray.is_initialized():
        return None
    return max(placement_here(config).gpus for config in configs)


def _gpus() -> int:
    resources: Any = ray.cluster_resources()  # untyped in Ray
    return int(resources.get("GPU", 0))


_POLICY_THREADS = 8  # calls that the policy group takes at once: four stages of a step, and what is asked meanwhile

# The handles keep the actors alive; they belong to this process, and so end with it.
_handles: dict[str, dict[str, Any]] = {}


@task(name="launch", task_run_name="launch-actors", **STAGE)
def launch(
    config: RunConfig,
    model_path: str,
    namespace: str,
    journal: Opening | None = None,
    before: RunActors | None = None,
) -> RunActors:
    """Start every actor of a GRPO run at once, and wait until all can work.

    Args:
        journal: where the ledger writes down what it does; None: nowhere.
        before: the run's actors so far, of which some are lost. Those that can go on stay (tasks/standing.py).

    Raises:
        ActorGoneError, ActorTimeoutError: one died or was not ready in time; the message names it. What did start is ended.
        NoRoomError, ConfigError: as `nodes.reserve`.
    """
    standing = keep_standing(namespace, _handles.get(namespace, {}), before) if before else {}
    placement = place(config, _gpus())
    config = config.model_copy(update={"generation": config.generation.model_copy(update={"refit": placement.refit.transport})})
    with _starting(namespace, config, standing, engines_sleep=placement.refit.engines_sleep) as start:
        # The engine takes longest, so it goes first.
        engines = names.engines(config.generation.num_engines)
        engine = _computing(_side_by_side(config, config.generation.num_engines), placement.engine)
        if config.mode == "async":  # a synchronous run goes back to its checkpoint
            engine |= {"max_restarts": config.recovery.engine_restarts}
        worker = _computing(_side_by_side(config, config.policy.parallel.world_size), placement.worker)
        start.on_nodes(engine, worker, engines=len(engines), together=placement.kind == "colocated")
        start.files(model_path, *_taught_by(config).values())
        start.engines(engines, model_path)
        start.environment(config.environment, config.rollout.max_new_tokens)
        address = start.data_plane()
        start.policy(model_path, config.optimizer, config.rollout.temperature, longest_sample(config, model_path), placement.refit)
        start.ledger(address, journal)
        start.actor(
            names.COLLECTOR, Collector, config, model_path, namespace, engines, names.ENVIRONMENT, address, config.gathered(), threads=4
        )
    return RunActors(namespace, address, engines, start.ready)


@task(name="launch", task_run_name="launch-actors", **STAGE)
def launch_sft(config: SftConfig, model_path: str, namespace: str, data: SupervisedData, before: RunActors | None = None) -> RunActors:
    """Start every actor of an `sft` run at once, and wait until all can work. Raises and `before`: as `launch`."""
    standing = keep_standing(namespace, _handles.get(namespace, {}), before) if before else {}
    placement = place_policy(config, _gpus())
    with _starting(namespace, config, standing) as start:
        start.on_nodes({}, _computing(config.policy.parallel.world_size, placement.worker))
        start.files(model_path, *_taught_by(config).values())
        address = start.data_plane()
        start.policy(model_path, config.policy.optimizer.over(data.steps(config)), 1.0, data.longest, RefitPlan())
        start.actor(names.COLLECTOR, SupervisedCollector, config, model_path, address, data.allowed, config.data.gathered())
    return RunActors(namespace, address, [], start.ready)


@task(name="launch", task_run_name="launch-actors", **STAGE)
def launch_policy(config: RunConfig, model_path: str, namespace: str) -> RunActors:
    """Start the data plane and the policy of a GRPO run, with as many threads as there. Raises: as `launch`."""
    placement = place_policy(config, _gpus())
    with _starting(namespace, config) as start:
        start.on_nodes({}, _computing(_side_by_side(config, config.policy.parallel.world_size), placement.worker))
        start.files(model_path, *_taught_by(config).values())
        address = start.data_plane()
        start.policy(model_path, config.optimizer, config.rollout.temperature, longest_sample(config, model_path), RefitPlan())
    return RunActors(namespace, address, [], start.ready)


@task(name="launch", task_run_name="launch-engines", **STAGE)
def launch_engines(config: EvaluateConfig, namespace: str) -> EvaluationActors:
    """Start the engines of all models at once (starting takes longest), and wait until all can work. Raises: as `launch`."""
    placement = _engines_placement(config, _gpus())
    with _starting(namespace, config) as start:
        count = len(config.models) * placement.engines
        start.on_nodes(_computing(count, placement.engine), {}, engines=count)
        start.files(*config.models.values())
        found = {label: names.engines(placement.engines, label) for label in config.models}
        for label, path in config.models.items():
            start.engines(found[label], path)
        start.environment(config.source, config.sampling.max_new_tokens)
    return EvaluationActors(found, start.ready)


class _Starting:
    """The actors of one run while they start."""

    def __init__(self, namespace: str, config: Any, standing: Mapping[str, Any]) -> None:
        self._namespace, self._config = namespace, config
        self.standing, self.handles = set(standing), dict(standing)
        self.address: DataPlaneAddress | None = None
        self.ready: dict[str, str] = {}
        self._here = nodes.beside_driver()
        self._models: dict[str, Files] = {}  # by their directories, where other nodes may not see those
        self._engines: Iterator[nodes.Options] = iter(())
        self.colocated: tuple[list[str], list[str]] | None = None  # engines and policy workers
        self._workers: list[nodes.Options] = []

    def actor(self, name: str, cls: Callable[..., Any], *arguments: Any, threads: int = 1) -> None:
        self._add(name, ray.remote(cls), *arguments, num_cpus=0, max_concurrency=threads, **self._here)

    def on_nodes(self, engine: nodes.Options, worker: nodes.Options, *, engines: int = 0, together: bool = False) -> None:
        """Before engines and policy: places for so many engines, and for the policy's workers if `worker` has options."""
        parallel = self._config.policy.parallel if worker else ParallelConfig()
        workers = parallel.world_size if worker else 0
        strategy = self._config.ray.strategy
        found = nodes.reserve(self._namespace, strategy, engines, engine, workers, worker, parallel.tensor, together=together)
        self._engines, self._workers = iter(found[0]), found[1]
        if together:
            self.colocated = names.engines(engines), names.workers(workers)

    def files(self, *directories: str) -> None:
        """Before engines and policy: these models reach other nodes."""
        if self._here:
            self.actor(names.FILES, FileServer, *directories, threads=READERS)
            home = node.own_id()
            self._models = {directory: Files(directory, home, self._namespace) for directory in directories}

    def engines(self, engines: list[str], model_path: str) -> None:
        engine, ends, config = engine_actor_class(), end_token_ids(model_path), self._config
        model = self._models.get(model_path, model_path)
        for index, name in enumerate(engines):
            self._add(name, engine, config.generation, model, config.seed + index, ends, **next(self._engines))

    def environment(self, source: EnvironmentConfig, max_new_tokens: int) -> None:
        config = self._config
        self.actor(
            names.ENVIRONMENT, EnvironmentActor,
            source, config.paid, config.scoring, max_new_tokens, *keys_and_secrets(config, source),
            threads=SCORING_THREADS,
        )  # fmt: skip

    def ledger(self, address: DataPlaneAddress, journal: Opening | None) -> None:
        config = self._config
        self._add(
            names.LEDGER, ledger_actor_class(),
            config.ledger, config.rollout.prompts_per_step, 0, "train",
            partial(connect, address, timeout_s=config.data_plane.timeout_s), partial(look_for, names.COLLECTOR, self._namespace), journal,
            num_cpus=0, **self._here,
        )  # fmt: skip

    def data_plane(self) -> DataPlaneAddress:
        self.address = queue.start(self._namespace, self._config.data_plane)
        return self.address

    def policy(self, model_path: str, optimizer: OptimizerConfig, temperature: float, longest: int, refit: RefitPlan) -> None:
        config = self._config
        policy = config.policy.model_copy(update={"optimizer": optimizer})
        # Pairs are judged against the model that the run began with: it may be read again, and is in no checkpoint.
        judged_by = {"": model_path} if policy.loss.objective == PREFERENCE else {}
        directories = _taught_by(config) or judged_by
        teachers = {source: self._models.get(path, path) for source, path in directories.items()}
        self.actor(
            names.POLICY, PolicyGroup,
            policy, self._models.get(model_path, model_path), self._namespace, self.address, config.data_plane.timeout_s, config.seed,
            temperature, self._workers, longest, refit, teachers,
            threads=_POLICY_THREADS,
        )  # fmt: skip

    def warm_up(self) -> None:
        """While the engines sleep; the first request or refit wakes them."""
        deadlines = self._config.deadlines
        engines = {name: handle for name, handle in self.handles.items() if name in names.engines(self._config.generation.num_engines)}
        sleeping = {name: engine.sleep.remote(keep_weights=True) for name, engine in engines.items()}
        wait_all(sleeping, what="sleep", timeout_s=deadlines.engine_call)
        done = wait_all({names.POLICY: self.handles[names.POLICY].warm_up.remote()}, what="warm up", timeout_s=deadlines.warm_up)
        self.ready[names.POLICY] += f"; {done[names.POLICY]}"

    def _add(self, name: str, remote_class: Any, *arguments: Any, **options: Any) -> None:
        if name in self.standing:
            return
        self.handles[name] = remote_class.options(name=name, namespace=self._namespace, **options).remote(*arguments)


@contextmanager
def _starting(
    namespace: str,
    config: BaseRunConfig | EvaluateConfig,
    standing: Mapping[str, Any] = MappingProxyType({}),
    *,
    engines_sleep: bool = False,
) -> Iterator[_Starting]:
    """Start actors inside the block, beside those that stand; at its end all of them are ready, or, after any failure, gone.

    Args:
        engines_sleep: engines that share their GPU sleep before the policy warms up.
    """
    starting = _Starting(namespace, config, standing)
    _handles[namespace] = starting.handles
    try:
        wait_until_gone(namespace, standing)
        yield starting
        pending = {name: handle.ready.remote() for name, handle in starting.handles.items() if name not in starting.standing}
        starting.ready = wait_all(pending, what="start", timeout_s=config.deadlines.start)
        if starting.colocated:
            nodes.require_shared_gpus(namespace, *starting.colocated, timeout_s=config.deadlines.start)
        if engines_sleep and names.POLICY in pending:
            starting.warm_up()
        if isinstance(config, BaseRunConfig) and config.checkpoint.every_steps is not None:
            # Their memory takes seconds: begun now, and not while the first checkpoint lets training stand still.
            timeout_s = config.checkpoint.timeout_s
            wait_all({names.POLICY: starting.handles[names.POLICY].prepare_saves.remote(timeout_s)}, what="start", timeout_s=timeout_s)
    except BaseException:
        stop(namespace, starting.address)
        raise


def stop(namespace: str, address: DataPlaneAddress | None = None) -> None:
    """End the run's actors, the newest first. Idempotent; touches nothing else in the cluster."""
    handles = _handles.pop(namespace, {})
    if not ray.is_initialized():
        return
    end(handles)
    if address is not None:
        queue.stop(address)
    nodes.release(namespace)


def _taught_by(config: BaseRunConfig) -> dict[str, str]:
    """The directories of the policy's teachers, by source; the preflight has fetched them."""
    teacher = config.policy.teacher
    return {} if teacher is None else {source: local_model(name, teacher_field(source)) for source, name in teacher.models.items()}


def _side_by_side(config: RunConfig, own: int) -> int:
    """Actors that compute at the same time: `own`, which are of one kind, or engines and policy workers together."""
    return config.generation.num_engines + config.policy.parallel.world_size if config.mode == "async" else own


def _computing(processes: int, gpus: float = 0.0) -> dict[str, Any]:
    """Ray options of actors that compute: one logical CPU each, and the given GPUs; threads share the machine's cores evenly."""
    threads = str(max(1, settings.cpu_count() // processes))
    # Passive: engines and workers take turns on the same cores, and a thread that spins at a barrier takes the other's turn.
    return {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}}}
