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

from actors import names
from actors.data_plane import transfer_queue as queue
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.environments.actor import SCORING_THREADS, EnvironmentActor
from actors.generation.engine import engine_actor_class
from actors.policy.group import PolicyGroup
from actors.preflight import longest_sample
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
from configs.policy import OptimizerConfig, PolicyConfig
from configs.rewards import JudgeReward, gathered_of
from configs.run import BaseRunConfig, RunConfig, ScoredConfig
from configs.secrets import resolve
from configs.sft import SftConfig
from tasks.call import STAGE
from tasks.handles import EvaluationActors, RunActors
from tasks.placement import place
from tasks.standing import end, keep_standing, wait_until_gone


def planned_actors(config: RunConfig) -> list[tuple[str, str]]:
    """(name, what it does) of every actor that `launch` would start."""
    engine = f"vLLM, {config.generation.executor}, {config.generation.dtype}"
    rules = config.ledger
    groups = rules.capacity(config.rollout.prompts_per_step)
    return [
        ("placement", _planned_placement(config)),
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
        _planned_data_plane(config),
        (names.COLLECTOR, f"{config.batch_size} samples a step of {source}"),
        *_planned_policy(config.policy),
    ]


def planned_engines(config: EvaluateConfig) -> list[tuple[str, str]]:
    """(name, what it does) of every actor that `launch_engines` would start."""
    count, how = config.generation.num_engines, f"vLLM, {config.generation.executor}, {config.generation.dtype}"
    engines = [(name, f"{how}: {path}") for label, path in config.models.items() for name in names.engines(count, label)]
    return [*engines, _planned_rewards(config)]


def _planned_rewards(config: ScoredConfig) -> tuple[str, str]:
    return names.ENVIRONMENT, "rewards: " + ", ".join(f"{reward.weight:g} x {reward.label}" for reward in config.paid)


def _planned_placement(config: RunConfig) -> str:
    try:
        return place(config, torch.cuda.device_count()).describe()
    except ConfigError as error:
        return f"not on this machine: {error}"


def _planned_data_plane(config: BaseRunConfig) -> tuple[str, str]:
    return "data plane", f"TransferQueue: a controller and {config.data_plane.num_storage_units} storage unit(s)"


def _planned_policy(policy: PolicyConfig) -> list[tuple[str, str]]:
    parallel = policy.parallel
    layout = f"DP{parallel.data} TP{parallel.tensor} PP{parallel.pipeline} CP{parallel.context}"
    workers = [(f"policy-worker-{rank}", f"Megatron-Core, {policy.dtype}") for rank in range(parallel.world_size)]
    return [(names.POLICY, f"owns the workers ({layout})"), *workers]


def logical_cpus(config: BaseRunConfig | EvaluateConfig) -> int:
    """CPUs of a cluster of the run's own: one for each engine and policy worker and one to spare; and for flows that have work for Ray's
    workers (flows/shards.py) as many as the machine has."""
    if isinstance(config, EvaluateConfig):
        return max(len(config.models) * config.generation.num_engines + 1, settings.cpu_count())
    if isinstance(config, RunConfig):
        return config.generation.num_engines + config.policy.parallel.world_size + 1
    return max(config.policy.parallel.world_size + 1, settings.cpu_count())


def logical_gpus(config: BaseRunConfig | EvaluateConfig) -> int | None:
    """GPUs of a cluster of the run's own; None: all that Ray finds (flows without a placement see every GPU).

    Raises:
        ConfigError: this machine's do not allow the placement.
    """
    joins = config.ray.address or settings.ray_address() or ray.is_initialized()
    return None if joins or not isinstance(config, RunConfig) else place(config, torch.cuda.device_count()).gpus


_POLICY_THREADS = 8  # calls that the policy group takes at once: four stages of a step, and what is asked meanwhile

# The handles keep the actors alive; they belong to this process, and so end with it.
_handles: dict[str, dict[str, Any]] = {}


@task(name="launch", task_run_name="launch-actors", **STAGE)
def launch(
    config: RunConfig, model_path: str, namespace: str, journal: Opening | None = None, before: RunActors | None = None
) -> RunActors:
    """Start every actor of a GRPO run at once, and wait until all can work.

    Args:
        journal: where the ledger writes down what it does; None: nowhere.
        before: the run's actors so far, of which some are lost. Those that can go on stay (tasks/standing.py).

    Raises:
        ActorGoneError, ActorTimeoutError: one died or was not ready in time; the message names it. What did start is ended.
    """
    standing = keep_standing(namespace, _handles.get(namespace, {}), before) if before else {}
    resources: Any = ray.cluster_resources  # untyped in Ray
    placement = place(config, int(resources().get("GPU", 0)))
    config = config.model_copy(update={"generation": config.generation.model_copy(update={"refit": placement.refit.transport})})
    with _starting(namespace, config, standing) as start:
        # The engine takes longest, so it goes first.
        engines = names.engines(config.generation.num_engines)
        options = _computing(_side_by_side(config, config.generation.num_engines), placement.engine)
        if config.mode == "async":  # a synchronous run goes back to its checkpoint
            options |= {"max_restarts": config.recovery.engine_restarts}
        start.engines(engines, model_path, options)
        start.environment(config.environment, config.rollout.max_new_tokens)
        address = start.data_plane()
        options = _computing(_side_by_side(config, config.policy.parallel.world_size), placement.worker)
        start.policy(model_path, config.optimizer, config.rollout.temperature, longest_sample(config, model_path), options, placement.refit)
        start.ledger(address, journal)
        start.actor(
            names.COLLECTOR, Collector, config, model_path, namespace, engines, names.ENVIRONMENT, address, config.gathered(), threads=4
        )
    return RunActors(namespace, address, engines, start.ready)


@task(name="launch", task_run_name="launch-actors", **STAGE)
def launch_sft(config: SftConfig, model_path: str, namespace: str, data: SupervisedData, before: RunActors | None = None) -> RunActors:
    """Start every actor of an `sft` run at once, and wait until all can work. Raises, and `before`: as `launch`."""
    standing = keep_standing(namespace, _handles.get(namespace, {}), before) if before else {}
    with _starting(namespace, config, standing) as start:
        address = start.data_plane()
        options = _computing(config.policy.parallel.world_size)
        start.policy(model_path, config.policy.optimizer.over(data.steps(config)), 1.0, data.longest, options, RefitPlan())
        start.actor(names.COLLECTOR, SupervisedCollector, config, model_path, address, data.allowed, config.data.gathered())
    return RunActors(namespace, address, [], start.ready)


@task(name="launch", task_run_name="launch-actors", **STAGE)
def launch_policy(config: RunConfig, model_path: str, namespace: str) -> RunActors:
    """Start the data plane and the policy of a GRPO run, with as many threads as there. Raises: as `launch`."""
    with _starting(namespace, config) as start:
        address = start.data_plane()
        options = _computing(_side_by_side(config, config.policy.parallel.world_size))
        start.policy(model_path, config.optimizer, config.rollout.temperature, longest_sample(config, model_path), options, RefitPlan())
    return RunActors(namespace, address, [], start.ready)


@task(name="launch", task_run_name="launch-engines", **STAGE)
def launch_engines(config: EvaluateConfig, namespace: str) -> EvaluationActors:
    """Start the engines of all models at once (starting takes longest), and wait until all can work. Raises: as `launch`."""
    with _starting(namespace, config) as start:
        options = _computing(len(config.models) * config.generation.num_engines)
        found = {label: names.engines(config.generation.num_engines, label) for label in config.models}
        for label, path in config.models.items():
            start.engines(found[label], path, options)
        start.environment(config.source, config.sampling.max_new_tokens)
    return EvaluationActors(found, start.ready)


class _Starting:
    """The actors of one run while they start."""

    def __init__(self, namespace: str, config: Any, standing: Mapping[str, Any]) -> None:
        self._namespace, self._config = namespace, config
        self.standing, self.handles = set(standing), dict(standing)
        self.address: DataPlaneAddress | None = None
        self.ready: dict[str, str] = {}

    def actor(self, name: str, cls: Callable[..., Any], *arguments: Any, threads: int = 1) -> None:
        self._add(name, ray.remote(cls), *arguments, num_cpus=0, max_concurrency=threads)

    def engines(self, engines: list[str], model_path: str, options: dict[str, Any]) -> None:
        engine, ends, config = engine_actor_class(), end_token_ids(model_path), self._config
        for index, name in enumerate(engines):
            self._add(name, engine, config.generation, model_path, config.seed + index, ends, **options)

    def environment(self, source: EnvironmentConfig, max_new_tokens: int) -> None:
        """Secrets are looked up here, in the flow's process: actors may be elsewhere."""
        config = self._config
        keys = {
            reward.label: resolve(reward.api_key, f"rewards.{reward.label}.api_key")
            for reward in config.paid
            if isinstance(reward, JudgeReward) and reward.api_key is not None
        }
        secrets = source.gathered("environment") | gathered_of(config.paid)
        self.actor(
            names.ENVIRONMENT, EnvironmentActor,
            source, config.paid, config.scoring, max_new_tokens, keys, secrets,
            threads=SCORING_THREADS,
        )  # fmt: skip

    def ledger(self, address: DataPlaneAddress, journal: Opening | None) -> None:
        config = self._config
        self._add(
            names.LEDGER, ledger_actor_class(),
            config.ledger, config.rollout.prompts_per_step, 0, "train",
            partial(connect, address, timeout_s=config.data_plane.timeout_s), partial(look_for, names.COLLECTOR, self._namespace), journal,
            num_cpus=0,
        )  # fmt: skip

    def data_plane(self) -> DataPlaneAddress:
        self.address = queue.start(self._namespace, self._config.data_plane)
        return self.address

    def policy(
        self, model_path: str, optimizer: OptimizerConfig, temperature: float, longest: int, options: dict[str, Any], refit: RefitPlan
    ) -> None:
        config = self._config
        policy = config.policy.model_copy(update={"optimizer": optimizer})
        self.actor(
            names.POLICY, PolicyGroup,
            policy, model_path, self._namespace, self.address, config.data_plane.timeout_s, config.seed, temperature,
            options, longest, refit,
            threads=_POLICY_THREADS,
        )  # fmt: skip

    def _add(self, name: str, remote_class: Any, *arguments: Any, **options: Any) -> None:
        if name in self.standing:
            return
        self.handles[name] = remote_class.options(name=name, namespace=self._namespace, **options).remote(*arguments)


@contextmanager
def _starting(
    namespace: str, config: BaseRunConfig | EvaluateConfig, standing: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[_Starting]:
    """Start actors inside the block, beside those that stand; at its end all of them are ready, or, after any failure, gone."""
    starting = _Starting(namespace, config, standing)
    _handles[namespace] = starting.handles
    try:
        wait_until_gone(namespace, standing)
        yield starting
        pending = {name: handle.ready.remote() for name, handle in starting.handles.items() if name not in starting.standing}
        starting.ready = wait_all(pending, what="start", timeout_s=config.deadlines.start)
        if isinstance(config, BaseRunConfig) and config.checkpoint.every_steps is not None:
            # Allocating and pinning takes seconds: now, and not while the first checkpoint lets training stand still.
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


def _side_by_side(config: RunConfig, own: int) -> int:
    """Actors that compute at the same time: `own`, which are of one kind, or engines and policy workers together."""
    return config.generation.num_engines + config.policy.parallel.world_size if config.mode == "async" else own


def _computing(processes: int, gpus: float = 0.0) -> dict[str, Any]:
    """Ray options of actors that compute: one logical CPU each, and the given GPUs; threads share the machine's cores evenly."""
    threads = str(max(1, settings.cpu_count() // processes))
    # Passive: engines and workers take turns on the same cores, and a thread that spins at a barrier takes the other's turn.
    return {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}}}
