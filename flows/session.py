"""A run around a flow's loop: start-up and tear-down, timing, metrics, and what a person sees. The loops are in grpo.py, sft.py and so on.

Session.__enter__   run directory ─► model files ─► preflight ─► Ray ─► actors
Session.running     one step: stages are timed, the step's keys cleared (also when a stage raised); its metrics are written beside
                    the next step's first stage
Session.__exit__    summary and report; every actor of the run ends

TrainingSession (training_session.py) saves and resumes. GrpoSession (grpo_session.py), SftSession (sft_session.py) and EvaluateSession
(evaluate_session.py) add what is their flow's own, and so do their steps.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from prefect import runtime
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from pydantic import PositiveInt

from actors import names
from actors.data_plane.meta import KVBatchMeta
from actors.forks import server as forks
from actors.policy.limits import Limits
from actors.policy.turns import Turn
from configs.continuity import flat
from configs.evaluate import EvaluateConfig
from configs.loader import dump
from configs.redaction import redacted
from configs.run import BaseConfig, BaseRunConfig
from flows.prepared import Prepared, taken
from tasks import events
from tasks.actor_logs import ActorLogs
from tasks.call import quoted
from tasks.cluster import cluster, keep_logs
from tasks.handles import EvaluationActors, RunActors
from tasks.launch import logical_cpus, logical_gpus, stop
from tasks.publish import Publisher
from tasks.quiet import quiet_console
from tasks.reporting.html import write_report
from tasks.reporting.memory import MemoryUse
from tasks.reporting.notebook import progress, shell
from tasks.reporting.run_dir import RunDirectory, point_latest
from tasks.reporting.summary import Summary, render_summary_text
from tasks.reporting.trackers.base import About
from tasks.reporting.trackers.run_trackers import RunTrackers
from tasks.reporting.views import VIEWS, FlowName
from tasks.scratch import scratch
from tasks.train import train, withdraw

type Metrics = dict[str, float]
Steps = PositiveInt | None  # a field of the form that the UI shows before a run


def run_name() -> str:
    """<flow>-<recipe>-<date and time>, for the person who reads the list of runs."""
    run = runtime.flow_run
    return f"{run.flow_name}-{Path(run.parameters['recipe']).stem}-{run.scheduled_start_time:%Y-%m-%d-%H%M%S}"


def with_steps(overrides: Sequence[str] | None, steps: Steps, *instead_of: str) -> list[str]:
    """The overrides, and this number of steps; `instead_of` are overrides that unset what would contradict it."""
    given = list(overrides or ())
    return given if steps is None else [*given, *instead_of, f"steps={steps}"]


class Session[C: BaseRunConfig | EvaluateConfig, A: RunActors | EvaluationActors](ABC):
    """One run's lifetime. Use as a context manager.

    Attributes:
        steps: of the whole run, known inside the block.
    """

    flow: ClassVar[FlowName]
    config_type: ClassVar[type[BaseConfig]]
    parts: ClassVar[str]  # what starts, for the person who waits for it
    makes_model: ClassVar[bool] = True

    def __init__(self, config: C, recipe: str) -> None:
        self.config, self.recipe = config, recipe
        self.flow_run = str(runtime.flow_run.id or uuid.uuid4())
        self.namespace = names.namespace(self.flow_run)
        self.steps = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self._tokens = 0.0
        self._steps_done = 0
        self._unfinished: tuple[Step, float] | None = None
        self._status: Literal["completed", "failed", "cancelled"] = "failed"
        self._error: str | None = None
        self._started = time.monotonic()
        self._stack = ExitStack()

    # ---- what each flow has of its own ----

    @staticmethod
    @abstractmethod
    def planned_actors(config: Any) -> list[tuple[str, str]]:
        """(name, what it does) of every actor that a run would start."""

    @staticmethod
    @abstractmethod
    def prepare(config: Any, scratch: Path) -> Prepared:
        """See that everything fits, before anything starts; a model that the recipe makes up is written to `scratch`.

        Raises:
            ConfigError: what does not fit, and what to change.
        """

    @abstractmethod
    def _launch(self, prepared: Any) -> A:
        """Start the actors."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Fields of the summary that are the flow's own."""

    def _memory(self) -> dict[str, MemoryUse]:
        """Planned and measured memory of a GPU by stage; none where nothing was measured."""
        return {}

    # ---- lifetime ----

    def __enter__(self) -> Self:
        if shell() is not None:
            quiet_console()  # the notebook's output shows the run
        self.publisher = Publisher(self.flow)
        with ExitStack() as opening:
            opening.push(self._stack)  # closed when something fails here
            self._stack.enter_context(scratch())
            self.directory = self._choose_directory()
            self.directory.config.write_text(dump(self.config))
            if self.makes_model:
                point_latest(self.directory)
            self.progress = self._stack.enter_context(progress(VIEWS[self.flow].line))
            self._files = self._stack.enter_context(ExitStack())
            self._open_files()
            opening.pop_all()
        try:
            self._open()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _open(self) -> None:
        with self.progress.phase("writing and checking the model"):
            prepared = self._prepare()
        self.steps = prepared.steps
        self.publisher.begin(self.steps, self.directory, self._summarise("running"))
        self.progress.begin(self.steps)
        with self.progress.phase("starting Ray"):
            self._stack.enter_context(cluster(self.config.ray, self.namespace, logical_cpus(self.config), logical_gpus(self.config)))
        self._stack.enter_context(ActorLogs())
        self._stack.callback(self._stop_actors)
        self._start_actors(prepared)

    def _prepare(self) -> Prepared:
        target = self.directory.root / "model"
        return taken(self.config, target) or self.prepare(self.config, target)

    def _start_actors(self, prepared: Any) -> None:
        with self.progress.phase(f"starting the actors: {self.parts}"), self.time("launch"):
            self.actors: A = self._launch(prepared)
        for name, line in self.actors.ready.items():
            self.progress.note(f"{name}: {line}")
        if why := forks.trouble():
            self.progress.note(f"the start took longer: workers could not be forks ({why})")

    def _stop_actors(self) -> None:
        actors = getattr(self, "actors", None)  # none: their start failed, and has ended them itself
        stop(self.namespace, actors.address if actors else None)

    def _choose_directory(self) -> RunDirectory:
        """Where the run's files go."""
        return RunDirectory.create(self.config.output_dir, self.config.name)

    def _open_files(self) -> None:
        """Open the files that the run adds lines to, and the trackers."""
        config = flat(self.config.model_dump(mode="json"))
        about = About(self.directory.root, self.directory.root.name, self.flow, self.recipe, self.flow_run, config)
        self.trackers = self._files.enter_context(RunTrackers(self.directory, self.config.trackers, about, self.say))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._status = "completed"
        else:
            self._error = redacted(f"{kind.__name__}: {error}")
            if not issubclass(kind, Exception):
                self._status = "cancelled"
        with self._stack:  # the actors end even when the report cannot be written
            try:
                self.close_step_before()
            except Exception:
                if kind is None:
                    raise
                get_run_logger().warning("the last complete step could not be closed", exc_info=True)
            summary = self._summarise()
            self.publisher.stop()
            summary.write(self.directory)
            write_report(self.directory)
            self.publisher.finish(self.directory, summary)
            self.trackers.close(self._status)
            self.progress.note(render_summary_text(summary))
            self.progress.report(self.directory.report)
            if self._status == "failed":
                keep_logs(self.directory.ray_logs)

    # ---- inside the loop ----

    @contextmanager
    def running[S: Step](self, step: S) -> Iterator[S]:
        """The stages of one step. Its keys are cleared even when a stage raised; `close_step_before` does the rest."""
        started = time.monotonic()
        try:
            yield step
        except BaseException:
            for what, clean_up in (
                ("its stages could not be withdrawn", step.withdraw),
                ("its keys could not be cleared", step.submit_clear),
                ("its keys could not be cleared", step.wait_for_clear),
            ):
                try:
                    clean_up()
                except Exception:  # noqa: BLE001  (the stage's own error is the one to raise)
                    get_run_logger().warning("step %d: %s", step.number, what, exc_info=True)
            raise
        self._unfinished = step, time.monotonic() - started

    def close_step_before(self) -> None:
        """Wait until the keys of the step before are gone, and write its metrics. Call beside the next stage, whichever that is."""
        if self._unfinished is None:
            return
        (step, seconds), self._unfinished = self._unfinished, None
        step.wait_for_clear()
        step.metrics |= {"time/step": seconds, "tokens_per_s": step.metrics["tokens"] / seconds}
        self._tokens += step.metrics["tokens"]
        self._steps_done = step.number
        self.record(step.number, step.metrics)
        self.progress.step(step.number, step.metrics)
        events.step_completed(self.flow, step.number, step.metrics)

    @contextmanager
    def time(self, stage: str) -> Iterator[Timer]:
        """Add the block's seconds to the stage."""
        timer, started = Timer(), time.monotonic()
        try:
            yield timer
        finally:
            timer.seconds = time.monotonic() - started
            self.seconds[stage] += timer.seconds

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a step into the run directory and the Prefect UI."""
        self.trackers.metrics(step, metrics)
        self.publisher.update(step, metrics)
        if self.publisher.page_due:
            self.publisher.page(self._summarise("running"))

    def say(self, line: str) -> None:
        """A warning, into the flow's log and to the terminal. Also for threads that have this one's context."""
        get_run_logger().warning(line)
        self.progress.note(line)

    def summary(self) -> dict[str, Any]:
        """What the flow returns: the summary, and the run's directory."""
        return self._summarise().model_dump() | {"directory": str(self.directory.root)}

    def _summarise(self, status: Literal["running"] | None = None) -> Summary:
        return Summary(
            flow=self.flow,
            name=self.directory.root.name,
            recipe=self.recipe,
            seed=self.config.seed,
            status=status or self._status,
            error=self._error,
            steps=self._steps_done,
            seconds=time.monotonic() - self._started,
            tokens=int(self._tokens),
            seconds_per_stage=dict(self.seconds),
            memory=self._memory(),
            **self._facts(),
        )


class Step:
    """One step of any flow: its stages are Prefect tasks, which get their arguments here and are timed.

    A method that is called `submit_..` returns at once, one that is called `wait_for_..` waits; a flow's page is in the order of events:

        flow            rollout ─┬─► advantage ─┬─► train, refit are submitted ─► waits
        policy group             └► logprob ─► ref_logprob ─► train ─► refit

    Stages of the policy are sent ahead: the group begins each one when those of the step that were sent before it have ended well
    (turns.py). Metadata goes in as `quoted(meta)`.

    Attributes:
        objective: what `train` trains for. limits: of an update, beyond which it is not made.
        metrics: what each stage has reported so far, by name.
    """

    objective: str
    limits: Limits | None = None

    def __init__(self, run: Session[Any, Any], number: int) -> None:
        self._run, self.number = run, number
        self._sent: tuple[str, ...] = ()  # stages that are with the policy group, or were
        self._futures: dict[str, PrefectFuture[Any]] = {}  # by stage
        self.trained = False
        self.metrics: Metrics = {}

    def submit_train(self, batch: KVBatchMeta) -> None:
        """Optimizer steps on the batch, when the stages before it are done."""
        timeout_s = self._run.config.deadlines.policy_stage
        arguments = self._run.namespace, self.number, quoted(batch), self.objective, timeout_s
        self._futures["train"] = train.submit(*arguments, self._turn("train"), self.limits)

    def wait_for_train(self) -> None:
        """The weights have changed when this returns."""
        self.metrics |= self._wait_for("train")
        self.trained = True

    def submit_clear(self) -> None:
        """This step's keys leave the data plane; nothing when it has none."""
        if "clear" not in self._futures and (clearing := self._clear()) is not None:
            self._futures["clear"] = clearing

    def wait_for_clear(self) -> None:
        """They have left when this returns; `metrics` has what the data plane did for the run so far."""
        if "clear" in self._futures:
            self.metrics |= self._futures["clear"].result()

    def withdraw(self) -> None:
        """What was sent ahead does not begin any more."""
        if self._sent:
            withdraw(self._run.namespace, self.number)

    def _clear(self) -> PrefectFuture[Metrics] | None:
        raise NotImplementedError

    def _turn(self, stage: str) -> Turn:
        """The stage's turn is when those that were sent before it are done."""
        turn = Turn(self.number, stage, self._sent)
        self._sent += (stage,)
        return turn

    def _wait_for(self, stage: str) -> Any:
        """The result of a stage; what was still to wait for is its time."""
        with self._run.time(stage) as timer:
            result = self._futures[stage].result()
        self.metrics[f"time/{stage}"] = timer.seconds
        return result


@dataclass
class Timer:
    """What `Session.time` yields; `seconds` are known at the end of the block."""

    seconds: float = 0.0
