"""The collector: everything between a prompt and its rows in the data plane.

PromptStream ──prompts──► EnginePool ──responses──► EnvironmentActor ─verdicts──► DataPlane.put(columns), Ledger.commit

Training groups are answered by one loop in a thread (`loop`), between `begin_generating` and `stop_generating`. Validations and the warm
start's batches are calls of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray

from actors import names
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.usage import OperationUsage
from actors.environments import Problem, build
from actors.environments.dataset.problems import prompt_digest
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.generation.pool import EnginePool
from actors.generation.types import UpdateOptions
from actors.heap import freeze_heap
from actors.models.hf import check_model_dir
from actors.rollout.assemble import TRAIN_FIELDS
from actors.rollout.cut import ROWS, RolloutState, load_rollout, load_rows, save_rollout, stored_rows
from actors.rollout.inputs import StepInputs
from actors.rollout.loop import RolloutLoop
from actors.rollout.prompts import PromptEncoder, PromptStream
from actors.rollout.rows import write_rows
from actors.rollout.samples import SLOWEST, Progress, StepReport, Validation
from actors.rollout.scoring import Scoring
from actors.rollout.supervised import SampleReader, SupervisedBatches
from actors.rollout.validation import OWN_SET, Validator, held_out_problems
from actors.waiting import ActorTimeoutError, find, wait
from configs.deadlines import LEDGER_CALL_S
from configs.environment import EnvironmentConfig
from configs.run import RunConfig
from configs.secrets import know

_AHEAD = 16  # prompts that an asynchronous run asks places for at once


class Collector:
    """Wrapped by `ray.remote` where the run starts its actors. `progress`, `report` and `stop_generating` may overlap the other calls."""

    def __init__(
        self,
        config: RunConfig,
        model_path: str,
        namespace: str,
        engines: Sequence[str],
        environment: str,
        address: DataPlaneAddress,
        secrets: Mapping[str, str] = MappingProxyType({}),
        ledger: str = names.LEDGER,
    ) -> None:
        """
        Args:
            environment, ledger: names of the actors.
            secrets: what the references of the sources of problems refer to, where this process cannot look.
        """
        know(secrets)
        self._config, self._namespace, self._engines, self._ledger = config, namespace, engines, ledger
        # One for the thread that generates without pause: tokenizers raise "Already borrowed" when two threads encode.
        self._encoder, self._rollout_encoder = (_encoder(model_path, config.environment) for _ in range(2))
        self._environment = build(config.environment, config.seed)
        self._sets = {
            name: (build(source, config.seed), _encoder(model_path, source)) for name, source in config.validation.sets.items()
        } | {OWN_SET: (self._environment, self._encoder)}
        self._validating = threading.Lock()
        self._scorer = ray.get_actor(environment, namespace=namespace)
        self._room = config.prompt_room(int(check_model_dir(model_path).max_position_embeddings))
        on_too_long = config.environment.on_too_long
        self._stream = PromptStream(
            self._environment,
            config.seed,
            encoder=self._rollout_encoder,
            room=self._room,
            on_too_long="drop" if on_too_long == "refuse" else on_too_long,  # refused is what can be seen before the start
            curriculum=config.environment.curriculum,
            held_out={
                prompt_digest(one) for name, (source, _) in self._sets.items() if name != OWN_SET for one in held_out_problems(source)
            },
        )
        self._plane = connect(address, timeout_s=config.data_plane.timeout_s)
        self._pool = self._new_pool()
        self._partition = "train"
        self._plane.register_partition(self._partition, fields=TRAIN_FIELDS, capacity=config.data_plane.capacity_samples)
        # One stream: the first rollout draws the prompts that follow those of the warm start.
        self._reader = SampleReader(self._encoder, int(check_model_dir(model_path).max_position_embeddings), "error")
        self._warm_start = SupervisedBatches(self._plane, "warm_start")
        self._loop: RolloutLoop | None = None
        self._resumed: RolloutState | None = None

    def ready(self) -> str:
        """A line for the log, once the actor can work."""
        freeze_heap()
        return "streamed prompts" if self._stream.size is None else f"{self._stream.size} prompts an epoch"

    def validate(self, weight_version: int, name: str = OWN_SET) -> Validation:
        """Answer every problem of the validation set.

        Raises:
            EngineDiedError: an engine is gone or silent. ActorGoneError, ActorTimeoutError: the environment is, or a validation whose
            caller gave up is still running. ScoringError: too many responses have no reward.
        """
        config, rollout = self._config, self._config.rollout
        environment, encoder = self._sets[name]
        if not self._validating.acquire(timeout=config.deadlines.validation):
            raise ActorTimeoutError(f"validate: the validation before has not ended within {config.deadlines.validation:.0f} s")
        try:
            validator = Validator(
                environment, encoder, self._pool, self._verdicts, config.seed,
                rollout.max_new_tokens, rollout.validation_temperature,
                samples_per_prompt=config.validation.samples_per_prompt, room=self._room, on_too_long=config.environment.on_too_long,
            )  # fmt: skip
            return Validation.of(validator.answers(weight_version), config.validation, shown=config.logged_samples, slow=SLOWEST)
        finally:
            self._validating.release()

    # ---- training groups ----

    def begin_generating(self) -> None:
        """Start to answer what the ledger admits; goes on after this call.

        Raises:
            RuntimeError: it has begun already. ActorGoneError: there is no ledger.
        """
        if self._loop is not None:
            raise RuntimeError("generation has begun already")
        ahead = self._config.mode == "async"
        self._loop = RolloutLoop(
            stream=self._stream,
            rollout=self._config.rollout,
            seed=self._config.seed,
            pool=self._new_pool(),  # a pool belongs to one thread
            scoring=Scoring(
                self._scorer,
                self._rollout_encoder,
                self._plane,
                self._partition,
                self._config.deadlines.score,
                replaces=ahead,
                overlong_filtering=self._config.rollout.overlong_filtering,
            ),
            ledger=find(self._ledger, self._namespace),
            at_once=_AHEAD if ahead else self._config.rollout.prompts_per_step,
            ahead=ahead,
            shown=self._config.logged_samples,
            resumed=self._resumed,
        )

    def progress(self, wait_s: float) -> Progress:
        """`RolloutLoop.progress`."""
        return self._generating().progress(wait_s)

    def report(self) -> StepReport:
        """`RolloutLoop.report`."""
        return self._generating().report()

    def stop_generating(self) -> None:
        """`RolloutLoop.stop`; nothing when it never began."""
        if self._loop is not None:
            self._loop.stop()

    # ---- checkpoints ----

    def cut(self, directory: str, step: int) -> dict[str, float]:
        """Write what a resumed run needs of the rollout side into a local directory: `cut` says which files. Between two steps: nobody
        trains, so stored rows stay as they are; generation goes on.

        Args:
            step: that has just been done.

        Returns:
            Numbers of groups and prompts (stored, in_flight, scoring, drawn), and seconds.

        Raises:
            CheckpointError: a problem cannot be kept. RuntimeError: generation has not begun, or has ended. DataPlaneError.
        """
        began, folder = time.monotonic(), Path(directory)
        state = self._generating().cut(step, self._config.deadlines.turn)
        meta = stored_rows(state.ledger)
        columns = self._plane.get(meta, sorted(meta.fields)) if meta is not None else {}
        write_rows(folder / ROWS, meta.keys if meta is not None else (), columns)
        save_rollout(folder, state, self._stream, **self._rule())
        counts = {"in_flight": len(state.flying), "scoring": len(state.scoring), "drawn": len(state.drawn)}
        stored = sum(group["meta"] is not None for group in state.ledger["groups"])
        return {name: float(count) for name, count in {"stored": stored, **counts}.items()} | {"seconds": time.monotonic() - began}

    def restore(self, directory: str) -> None:
        """Go on from what `cut` wrote: rows go into the data plane, the ledger takes its state over, and `begin_generating` issues again
        what was in flight. Before it, and before the ledger hears of a weight version.

        Raises:
            CheckpointError: see `load_rollout`. ConfigError: as `PromptStream.restore`. RuntimeError: generation has begun.
            DataPlaneError, ActorGoneError, ActorTimeoutError.
        """
        if self._loop is not None:
            raise RuntimeError("restore: generation has begun already")
        folder = Path(directory)
        state = load_rollout(folder, self._stream, **self._rule())
        if (meta := stored_rows(state.ledger)) is not None:
            columns = load_rows(folder, meta)
            self._plane.clear(meta)
            self._plane.put(meta, columns)
        ledger: Any = find(self._ledger, self._namespace)
        given = ledger.restore.remote(state.ledger, state.kept())
        places = wait(given, who=names.LEDGER, what="restore", timeout_s=LEDGER_CALL_S)
        self._resumed = state.at(places)

    def keep_inputs(self, inputs: StepInputs, directory: str) -> float:
        """Write what a step was made from, while its rows are there. Returns seconds.

        Raises:
            CheckpointError: it cannot be written. DataPlaneError.
        """
        began = time.monotonic()
        inputs.write(Path(directory), self._plane.get(inputs.meta, sorted(inputs.meta.fields)))
        return time.monotonic() - began

    def _rule(self) -> dict[str, Any]:
        return {"sampler": self._config.ledger.sampler, "rows": self._config.rollout.responses_per_prompt}

    # ---- the rest ----

    def sleep_engines(self) -> None:
        """Let engines that may sleep (`generation.sleep_level`) do so until the next refit. No request may run.

        Raises:
            EngineDiedError: one is gone. RuntimeError: requests run.
        """
        if self._config.generation.sleep_level > 0:
            self._pool.sleep()

    def supervised(self, step: int) -> KVBatchMeta:
        """The next warm-start batch: prompts of the training stream with the environment's own answers."""
        samples = self._reader.draw(self._stream, self._config.warm_start.batch_size)
        return self._warm_start.put(samples, f"warm-start batch {step}")

    def clear(self, meta: KVBatchMeta) -> None:
        """Forget these samples."""
        self._plane.clear(meta)

    def data_plane_metrics(self, others: dict[str, OperationUsage]) -> dict[str, float]:
        """`DataPlane.metrics` of this actor's client and of the given ones."""
        return self._plane.metrics([others])

    def _verdicts(self, problems: Sequence[Problem], responses: Sequence[Response]) -> list[Verdict]:
        scores: Any = self._scorer.score.remote(list(problems), list(responses))
        verdicts: list[Verdict] = wait(scores, who=names.ENVIRONMENT, what="score", timeout_s=self._config.deadlines.score)
        return verdicts

    def _generating(self) -> RolloutLoop:
        if self._loop is None:
            raise RuntimeError("generation has not begun")
        return self._loop

    def _new_pool(self) -> EnginePool:
        timeout_s, deadlines = self._config.generation.timeout_s, self._config.deadlines
        if self._config.mode == "sync":
            return EnginePool(self._namespace, self._engines, timeout_s=timeout_s)
        return EnginePool(  # the run goes on with the engines that are left, and those that come back
            self._namespace, self._engines, timeout_s=timeout_s,
            recover=True, restart_s=deadlines.restart, return_s=deadlines.engine_return, refit=self._ask_for_weights,
        )  # fmt: skip

    def _ask_for_weights(self) -> Any:
        options = UpdateOptions.of_async(self._config.asynchronous)
        return find(names.POLICY, self._namespace).refit.remote(list(self._engines), options)


def _encoder(model_path: str, source: EnvironmentConfig) -> PromptEncoder:
    return PromptEncoder(model_path, source.system_prompt, source.chat_template_kwargs)
