"""A run around the loop: start-up and tear-down, timing, metrics, and what a person sees. The loop itself is in grpo.py.

Session.__enter__   run directory ─► model files ─► preflight ─► Ray ─► actors
Session.step        one step: stages are timed, metrics written, the step's keys cleared (also when a stage raised)
Session.__exit__    summary and report; every actor of the run ends
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from prefect import runtime

from actors import names
from actors.preflight import check, prepare_model
from actors.rollout.collector import Validation
from configs.loader import dump
from configs.run import RunConfig
from flows.step import Step
from tasks.checkpoint import export_hf
from tasks.cluster import cluster
from tasks.evaluate import validate
from tasks.launch import launch, logical_cpus, stop
from tasks.publish import Publisher
from tasks.refit import refit
from tasks.reporting.html import write_report
from tasks.reporting.metrics import MetricsWriter
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.samples import SamplesWriter
from tasks.reporting.summary import Summary, render_summary_text
from tasks.reporting.terminal import Progress
from tasks.train import begin_grpo
from tasks.warm_start import begin_warm_start, warm_start


class Session:
    """One run's lifetime. Use as a context manager."""

    def __init__(self, config: RunConfig, recipe: str) -> None:
        self.config, self.recipe = config, recipe
        self.namespace = names.namespace(str(runtime.flow_run.id or uuid.uuid4()))
        self.weight_version = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self._tokens = 0.0
        self._logprob_errors: list[float] = []
        self._validations: dict[int, Validation] = {}
        self._steps_done = 0
        self._status: Literal["completed", "failed", "cancelled"] = "failed"
        self._error: str | None = None
        self._started = time.monotonic()
        self._stack = ExitStack()

    # ---- lifetime ----

    def __enter__(self) -> Self:
        self.publisher = Publisher(self.config.steps)
        self.directory = RunDirectory.create(self.config.output_dir, self.config.name)
        self.directory.config.write_text(dump(self.config))
        self.metrics = self._stack.enter_context(MetricsWriter(self.directory))
        self.samples = self._stack.enter_context(SamplesWriter(self.directory))
        self.progress = self._stack.enter_context(Progress(self.config.steps))
        try:
            self._open()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _open(self) -> None:
        config = self.config
        with self.progress.phase("writing and checking the model"):
            model_path = prepare_model(config, self.directory.root / "model")
            check(config, model_path)
        with self.progress.phase("starting Ray"):
            self._stack.enter_context(cluster(config.ray, self.namespace, logical_cpus(config)))
        with self.progress.phase("starting the actors: data plane, vLLM, Megatron, collector"), self.time("launch"):
            self.actors = launch(config, model_path, self.namespace)
            self._stack.callback(stop, self.namespace, self.actors.address)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._status = "completed"
        else:
            self._error = f"{kind.__name__}: {error}"
            if not issubclass(kind, Exception):
                self._status = "cancelled"
        with self._stack:  # the actors end even when the report cannot be written
            summary = self._summarise()
            summary.write(self.directory)
            write_report(self.directory)
            self.publisher.finish(self.directory, summary)
            self.progress.note(f"{render_summary_text(summary)}\nreport: {self.directory.report}")

    # ---- the parts of a run around its steps ----

    def warm_start(self, first: int, last: int) -> None:
        """Supervised steps first..last."""
        config = self.config
        with self.time("warm_start"):
            if first == 1:
                optimizer = config.policy.optimizer.model_copy(
                    update={"lr": config.warm_start.lr, "warmup_steps": 0, "decay_steps": None, "decay_style": "constant"}
                )
                begin_warm_start(self.namespace, optimizer, config.policy.timeout_s)
            history = warm_start(self.namespace, first, last, config.policy.timeout_s)
        self.progress.note(f"warm start {last}/{config.warm_start.steps}: loss {history[-1]['loss']:.3f}")

    def check_accuracy(self, label: int) -> float:
        """Validation accuracy during the warm start."""
        with self.time("warm_start"):
            found = validate(self.namespace, f"warm-start-{label}", self.weight_version, self.config.generation.timeout_s)
        self.progress.note(f"warm start {label}/{self.config.warm_start.steps}: validation accuracy {found.accuracy:.3f}")
        return found.accuracy

    def begin_grpo(self) -> None:
        """A fresh optimizer; the present weights become the reference when the loss has a KL term."""
        policy = self.config.policy
        begin_grpo(self.namespace, policy.optimizer, policy.loss.kl_coef > 0, policy.timeout_s)

    def validate(self, step: int) -> None:
        """Validation accuracy and reward after `step` steps; the first one is "before"."""
        with self.time("validate") as timer:
            found = validate(self.namespace, str(step), self.weight_version, self.config.generation.timeout_s)
        self._validations[step] = found
        self.samples.write(step, "before" if step == 0 else "after" if step == self.config.steps else "validation", found.samples)
        values = {"accuracy/validation": found.accuracy, "reward/validation": found.reward, "time/validate": timer.seconds}
        self.record(step, values)
        self.progress.step(step, values)
        self.progress.note(f"step {step}: validation accuracy {found.accuracy:.3f}, reward {found.reward:.3f}")

    def refit(self) -> None:
        """Weights into the engines, outside a step."""
        with self.time("warm_start"):
            result = refit(self.namespace, "warm-start", self.actors.engines, self.config.policy.timeout_s)
        self.weight_version = int(result["weight_version"])

    @contextmanager
    def step(self, number: int) -> Iterator[Step]:
        """One step. Its metrics are written at the end; its keys are cleared even when a stage raised."""
        step = Step(self, number)
        started = time.monotonic()
        try:
            yield step
        finally:
            step.clear()
        seconds = time.monotonic() - started
        step.metrics |= {"time/step": seconds, "tokens_per_s": step.metrics["tokens"] / seconds, "weight_version": self.weight_version}
        self._tokens += step.metrics["tokens"]
        self._logprob_errors.append(step.metrics["logprob_error/mean"])
        self._steps_done = number
        self.record(number, step.metrics)
        self.progress.step(number, step.metrics)

    def export(self) -> None:
        """The trained policy as a Hugging Face directory."""
        with self.time("export"), self.progress.phase("writing the trained model"):
            export_hf(self.namespace, str(self.directory.hf), self.config.policy.timeout_s)

    def summary(self) -> dict[str, Any]:
        """What the flow returns."""
        return self._summarise().model_dump()

    # ---- bookkeeping ----

    @contextmanager
    def time(self, stage: str) -> Iterator[Timer]:
        """Add the block's seconds to the stage."""
        timer = Timer()
        try:
            yield timer
        finally:
            timer.stop()
            self.seconds[stage] += timer.seconds

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a step into the run directory and the Prefect UI."""
        self.metrics.write(step, metrics)
        self.publisher.update(step, metrics)

    def _summarise(self) -> Summary:
        done = sorted(self._validations)
        before = self._validations[done[0]] if done else None
        after = self._validations[done[-1]] if len(done) > 1 else None
        return Summary(
            name=self.directory.root.name,
            recipe=self.recipe,
            seed=self.config.seed,
            status=self._status,
            error=self._error,
            reward_before=before.reward if before else None,
            reward_after=after.reward if after else None,
            accuracy_before=before.accuracy if before else None,
            accuracy_after=after.accuracy if after else None,
            steps=self._steps_done,
            seconds=time.monotonic() - self._started,
            tokens=int(self._tokens),
            seconds_per_stage=dict(self.seconds),
            weight_version=self.weight_version,
            mean_logprob_error=sum(self._logprob_errors) / len(self._logprob_errors) if self._logprob_errors else None,
        )


class Timer:
    """Seconds from construction to `stop`."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.seconds = 0.0

    def stop(self) -> None:
        self.seconds = time.monotonic() - self._started
