"""A GRPO run around its loop: the stages of a step, the warm start, validation by answers, refits, and the export at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from actors.data_plane.meta import KVBatchMeta
from actors.generation.types import UpdateOptions
from actors.policy.limits import FLAG
from actors.preflight import check, prepare_model
from actors.rollout.inputs import StepInputs
from actors.rollout.ledger import GUARD
from actors.rollout.samples import Sample, SlowSample, Validation
from actors.rollout.validation import OWN_SET
from actors.waiting import ActorGoneError, ActorTimeoutError
from configs.policy import OptimizerConfig
from configs.run import RunConfig
from flows.prepared import Prepared
from flows.saving import RunState
from flows.session import Metrics, Step
from flows.training_session import TrainingSession
from tasks import events
from tasks.advantage import advantage
from tasks.audit import audit_run
from tasks.call import quoted
from tasks.evaluate import validate
from tasks.generate import generate, stop_generating
from tasks.guards import GuardError, Guards, GuardsState, RollBackError, Trip
from tasks.handles import RunActors
from tasks.launch import launch, planned_actors
from tasks.logprob import POLICY_LOGPROBS, logprob, ref_logprob, reference_columns
from tasks.refit import refit
from tasks.reporting.samples import Phase
from tasks.reporting.slowest import SlowestWriter
from tasks.reporting.summary import SetAccuracy
from tasks.reporting.text import estimate
from tasks.rollout import announce, close_ledger, report, rollout, settle
from tasks.train import begin_grpo, pass_over, place, scale_rate
from tasks.warm_start import begin_warm_start, warm_start

_LAST_WORD_S = 30.0  # for the rollout task to see that generation has ended


class GrpoStep(Step):
    """rollout ─► logprob ─► ref_logprob ─► advantage ─► train ─► refit ─► clear"""

    def __init__(self, run: GrpoSession, number: int) -> None:
        super().__init__(run, number)
        self._run: GrpoSession = run
        self._config = run.config
        self.objective, self.limits = run.config.policy.loss.objective, run.config.guards.limits
        self._dropped = ""  # why the step's groups are not trained
        self._taken: KVBatchMeta | None = None  # what the step has taken
        self._batch: KVBatchMeta | None = None  # to train on
        self._columns: dict[str, tuple[str, ...]] = {}  # by stage that was sent, what it writes
        self._inputs: StepInputs | None = None  # to be kept
        self._uids: tuple[str, ...] = ()  # of the groups that the step has taken

    def submit_rollout(self) -> None:
        """Take the step's groups from the ledger: as they are answered, or of those that were answered during earlier steps."""
        config = self._config
        sleep_s = config.deadlines.sleep if config.mode == "sync" and config.generation.sleep_level > 0 else None
        self._futures["rollout"] = rollout.submit(self._run.namespace, self.number, config.rollout, config.ledger, sleep_s)

    def wait_for_rollout(self) -> KVBatchMeta:
        """Responses, scored and stored."""
        waited = time.monotonic()
        result = self._futures["rollout"].result()
        now = time.monotonic()
        self._uids = result.uids
        # Its groups may have been begun when the weights were announced, before the step.
        seconds = now - self._run.announced_at
        self._run.seconds["rollout"] += seconds
        self.metrics |= result.metrics | {"time/rollout": seconds, "idle/trainer_s": now - waited}
        self._taken = result.meta
        return self._taken

    def show_samples(self) -> None:
        """What the model said, for the person who follows the run; and how the rollout went."""
        told = report(self._run.namespace)
        self.metrics |= told.metrics
        self._run.show_samples(self.number, "train", told.samples, told.slowest)

    def submit_logprob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The policy's own log-probabilities of the samples (the `old` of the ratio); `train` comes after them."""
        return self._log_probabilities("logprob", logprob, batch, (POLICY_LOGPROBS,), self._config.policy.why_no_logprob())

    def submit_ref_logprob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The reference's log-probabilities, for the KL penalty; what reads them comes after."""
        policy = self._config.policy
        return self._log_probabilities("ref_logprob", ref_logprob, batch, reference_columns(policy), policy.why_no_ref_logprob())

    def wait_for_advantage(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Rewards against their group's mean, less the KL to the reference where it is in them; returns the rows to train on."""
        config = self._config
        address, loss = self._run.actors.address, config.policy.loss
        for stage in ("logprob", "ref_logprob") if loss.kl_in_reward else ():
            self._wait_for(stage)
        with self._run.time("advantage") as timer:
            result = advantage(address, self.number, quoted(batch), loss, config.trained_multiple, config.data_plane.timeout_s)
        self.metrics |= result.metrics | {"time/advantage": timer.seconds}
        self._follow(self._run.guards.before_training(self.number, self.metrics))
        return result.meta

    def submit_train(self, batch: KVBatchMeta) -> None:
        """Optimizer steps on the batch, when the stages before it are done; none, when a guard has tripped."""
        self._batch, run = batch, self._run
        if self._taken is not None:
            version, rate, passed = run.weight_version, run.guards.state.rate, bool(self._dropped)
            self._inputs = run.saving.inputs(
                self.number, self._taken, batch, weight_version=version, rate=rate, passed_over=passed, place=run.place
            )
        if not self._dropped:
            super().submit_train(batch)
            return
        timeout_s = self._config.deadlines.policy_stage
        self._futures["train"] = pass_over.submit(self._run.namespace, self.number, timeout_s, self._turn("train"))

    def submit_refit(self) -> None:
        """The new weights into the engines, when training is done."""
        run, timeout_s = self._run, self._config.deadlines.policy_stage
        arguments = run.namespace, str(self.number), run.actors.engines, run.weight_updates, timeout_s
        self._futures["refit"] = refit.submit(*arguments, self._turn("refit"))

    def wait_for_train(self) -> None:
        """The weights have changed when this returns; so have the log-probabilities been written."""
        for stage in ("logprob", "ref_logprob"):
            result = dict(self._wait_for(stage) or {})  # None: skipped
            self.metrics |= result | {f"time/{stage}": result.pop("logprob_s", 0.0)}  # most of it ran beside other stages
        super().wait_for_train()
        if not self._dropped:
            self._follow(self._run.guards.see(self.number, self.metrics))

    def _follow(self, trip: Trip | None) -> None:
        """Do what a guard wants.

        Raises:
            RollBackError: it wants the newest checkpoint. GuardError: the end of the run.
        """
        if trip is None:
            return
        self._run.say(trip.line)
        events.guard_tripped(trip.line)
        self.metrics[f"{FLAG}{trip.guard}"] = 1.0
        self._dropped = f"{GUARD}{trip.guard}"
        if trip.action == "roll_back":
            raise RollBackError(trip.line)
        if trip.action == "stop":
            raise GuardError(trip.line)
        if trip.action == "lower_rate":
            rate = self._run.guards.lowered()
            scale_rate(self._run.namespace, self._config.guards.factor, self._config.deadlines.policy_stage)
            self._run.say(f"the learning rate is {rate:g} times the configured one from now on")

    def wait_for_refit(self) -> None:
        """The engines have the new weights when this returns."""
        result = self._wait_for("refit")
        self._run.weight_version = int(result["weight_version"])
        self.metrics |= {"refit_bytes": result["bytes"], "refit_pause_s": result["pause_s"]}
        events.refit_completed(self.number, result)

    def _log_probabilities(self, stage: str, task: Any, batch: KVBatchMeta, columns: tuple[str, ...], why_not: str | None) -> KVBatchMeta:
        self._futures[stage] = task.submit(
            self._run.namespace, self.number, quoted(batch), columns[0], self._config.deadlines.policy_stage, why_not
        )
        if why_not:
            return batch
        self._sent, self._columns[stage] = (*self._sent, stage), columns
        return batch.with_fields(*columns)  # they will be there when it is the next stage's turn

    def _clear(self) -> PrefectFuture[Metrics] | None:
        """The groups' rows leave the data plane; groups that were not trained on go back into the ledger."""
        if not self._uids:
            return None
        written = [name for stage, columns in self._columns.items() if self._futures[stage].state.is_completed() for name in columns]
        inputs = self._inputs.ended([*written, "advantages"], self.metrics) if self._inputs else None
        arguments = self._fates(), self._config.deadlines.clear, quoted(inputs), self._run.directory.inputs
        return settle.submit(self._run.namespace, self.number, *arguments)

    def _fates(self) -> dict[str, tuple[str, ...]]:
        if not self._dropped:
            return {"trained" if self.trained else "released": self._uids}
        # Of several updates the first ones may have been made.
        made = int(self.metrics.get("updates", 0)) * len(self._batch) // self._config.policy.updates_per_step if self._batch else 0
        used = {tag["prompt_uid"] for tag in self._batch.tags[:made]} if self._batch else set()
        fates = {"trained": [uid for uid in self._uids if uid in used], self._dropped: [uid for uid in self._uids if uid not in used]}
        return {fate: tuple(uids) for fate, uids in fates.items() if uids}


class GrpoState(RunState):
    """And what the summary is made of: one value a step, and the validations by step."""

    logprob_errors: list[float]
    not_scored: dict[str, list[float]]
    validations: dict[int, dict[str, Validation]]
    guards: GuardsState


class GrpoSession(TrainingSession[RunConfig]):
    """Use as a context manager.

    Attributes:
        weight_version: of the weights in the engines. announced_at: monotonic seconds, when the ledger heard of a version last.
        weight_updates: how new weights reach them. place: what computes the policy.
    """

    flow = "grpo"
    state_type = GrpoState
    config_type = RunConfig
    parts = "data plane, vLLM, Megatron, collector"
    planned_actors = staticmethod(planned_actors)

    def __init__(self, config: RunConfig, recipe: str) -> None:
        super().__init__(config, recipe)
        self._logprob_errors: list[float] = []
        self._not_scored: dict[str, list[float]] = {"timed_out": [], "failed": []}  # fractions of each step's responses
        self._validations: dict[int, dict[str, Validation]] = {}
        self.guards = Guards(config.guards)
        self.announced_at = 0.0
        self.weight_updates = UpdateOptions.of_async(config.asynchronous) if config.mode == "async" else UpdateOptions()

    @staticmethod
    def prepare(config: RunConfig, scratch: Path) -> Prepared:
        model_path = prepare_model(config, scratch)
        check(config, model_path)
        return Prepared(model_path, config.steps)

    def _open_files(self) -> None:
        super()._open_files()
        self.slowest = self._files.enter_context(SlowestWriter(self.directory))

    def _launch(self, prepared: Prepared) -> RunActors:
        before = getattr(self, "actors", None)  # of a run that has lost a part
        actors = launch(self.config, prepared.model_path, self.namespace, self.saving.opening(self.why_again), before)
        self.place = place(self.namespace, self.config.deadlines.policy_stage) if self.saving.keeps_inputs else ""
        return actors

    @property
    def _has_reference(self) -> bool:
        return self.config.policy.keeps_reference

    def _conclude(self) -> None:
        if not self.directory.journal.exists():
            return  # the ledger was started without one
        close_ledger(self.namespace)
        found = audit_run(str(self.directory.journal))
        self.progress.note(f"audit: {found.verdict}")
        if not found.clean:
            get_run_logger().error("audit: %s", found.verdict)

    def _state(self, step: int) -> GrpoState:
        return GrpoState(
            step=step, tokens=self._tokens, seconds=dict(self.seconds),
            logprob_errors=self._logprob_errors, not_scored=self._not_scored, validations=self._validations, guards=self.guards.state,
        )  # fmt: skip

    def _take_over(self, state: GrpoState) -> None:
        self._logprob_errors, self._not_scored, self._validations = state.logprob_errors, state.not_scored, state.validations
        self.guards.go_on_from(state.guards)
        if state.guards.rate != 1:
            scale_rate(self.namespace, state.guards.rate, self.config.deadlines.policy_stage)
        self._refit("resume")  # within the time of `resume`

    @property
    def _optimizer(self) -> OptimizerConfig:
        return self.config.optimizer

    def _score(self, step: int) -> float | None:
        return self._validations[step][OWN_SET].accuracy if step in self._validations else None

    def warm_start(self, first: int, last: int) -> None:
        """Supervised steps first..last."""
        config = self.config
        with self.time("warm_start"):
            if first == 1:
                optimizer = config.policy.optimizer.model_copy(
                    update={"lr": config.warm_start.lr, "warmup_steps": 0, "decay_steps": None, "decay_style": "constant"}
                )
                begin_warm_start(self.namespace, optimizer, config.deadlines.policy_stage)
            history = warm_start(self.namespace, first, last, config.deadlines.policy_stage)
        self.progress.note(f"warm start {last}/{config.warm_start.steps}: loss {history[-1]['loss']:.3f}")

    def check_accuracy(self, label: int) -> float:
        """Validation accuracy during the warm start."""
        with self.time("warm_start"):
            found = validate(self.namespace, f"warm-start-{label}", self.weight_version, self.config.deadlines.validation)
        self.progress.note(f"warm start {label}/{self.config.warm_start.steps}: validation accuracy {found.accuracy:.3f}")
        return found.accuracy

    def begin_grpo(self) -> None:
        """A fresh optimizer; the present weights become the reference when the loss has a KL term."""
        begin_grpo(self.namespace, self.config.optimizer, self._has_reference, self.config.deadlines.policy_stage)
        self.guards.go_on_from(GuardsState())
        # When the run begins again: its steps so far are void, and engines that stood through the loss may have later weights.
        self._logprob_errors, self._not_scored, self._validations = [], {"timed_out": [], "failed": []}, {}
        if self._losses:
            with self.time("restore"):
                self._refit("begin-again")

    def validate(self, step: int) -> None:
        """Validation accuracy and reward after `step` steps; the first one is "before"."""
        with self.time("validate") as timer:
            answers = validate.submit(self.namespace, str(step), self.weight_version, self.config.deadlines.validation)
            self.close_step_before()
            found = {OWN_SET: answers.result()}
            for name in self.config.validation.sets:
                found[name] = validate(self.namespace, f"{step}-{name}", self.weight_version, self.config.deadlines.validation, name)
        self._validations[step] = found
        own = found[OWN_SET]
        self.show_samples(step, "before" if step == 0 else "after" if step == self.config.steps else "validation", own.samples, own.slowest)
        values = {"time/validate": timer.seconds}
        for name, of_set in found.items():
            values |= of_set.metrics(name)
            accuracy = estimate(of_set.accuracy, of_set.low, of_set.high)
            self.progress.note(f"step {step}: {name} accuracy {accuracy}, reward {of_set.reward:.3f}")
            if name != OWN_SET:
                self.slowest.write(step, "validation", of_set.slowest)
        self.record(step, values)
        self.progress.step(step, values)

    def validate_now_and_then(self, step: int) -> None:
        """Every `validate_every` steps, and after the last."""
        if step % self.config.validate_every == 0 or step == self.steps:
            self.validate(step)

    def announce_weights(self) -> None:
        """The next step trains the weights that the engines have: the ledger may admit its groups."""
        self.announced_at = time.monotonic()
        announce(self.namespace, self.weight_version)

    def show_samples(self, step: int, phase: Phase, samples: Sequence[Sample], slowest: Sequence[SlowSample]) -> None:
        """What the model said, and which answers took longest to score, into the run directory and the Prefect UI."""
        self.trackers.samples(step, phase, samples)
        self.slowest.write(step, phase, slowest)
        self.publisher.samples(step, phase, samples, slowest)

    def refit(self) -> None:
        """The weights of the warm start into the engines."""
        with self.time("warm_start"):
            self._refit("warm-start")

    def _refit(self, when: str) -> None:
        """Weights into the engines, outside a step."""
        result = refit(self.namespace, when, self.actors.engines, self.weight_updates, self.config.deadlines.policy_stage)
        assert isinstance(result, dict)  # it was no stage of a step, which could be withdrawn
        self.weight_version = int(result["weight_version"])

    @contextmanager
    def step(self, number: int) -> Iterator[GrpoStep]:
        """One step, beside `generating`."""
        with self.running(GrpoStep(self, number)) as step:
            yield step
            step.metrics["weight_version"] = self.weight_version
        # Not every objective reports it, and not every step has a number.
        if math.isfinite(step.metrics.get("logprob_error/mean", math.nan)):
            self._logprob_errors.append(step.metrics["logprob_error/mean"])
        for name, values in self._not_scored.items():
            values.append(step.metrics.get(f"scoring/{name}", 0.0))

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Prompts are answered inside the block as the ledger admits them; the task run of it stays open as long.

        A first SIGTERM or Ctrl-C inside lets the present step end.
        """
        going = generate.submit(self.namespace, self.steps * self.config.rollout.prompts_per_step)
        try:
            with self.ending_between_steps():
                yield
        finally:
            with suppress(ActorGoneError, ActorTimeoutError):  # then the task's own state says so
                stop_generating(self.namespace)
            going.wait(timeout=_LAST_WORD_S)

    def _facts(self) -> dict[str, Any]:
        every = [self._validations[step] for step in sorted(self._validations)]
        first, last = every[0] if every else {}, every[-1] if len(every) > 1 else {}
        before, after = first.get(OWN_SET), last.get(OWN_SET)
        return {
            "sets": {name: SetAccuracy.of(found, last.get(name)) for name, found in first.items()},
            **{name: sum(values) / len(values) for name, values in self._not_scored.items() if values},
            "stopped_because": "steps" if 0 < self.steps == self._steps_done else None,
            "reward_before": before.reward if before else None,
            "reward_after": after.reward if after else None,
            "accuracy_before": before.accuracy if before else None,
            "accuracy_after": after.accuracy if after else None,
            "weight_version": self.weight_version,
            "guards": self.guards.state.tripped,
            "mean_logprob_error": sum(self._logprob_errors) / len(self._logprob_errors) if self._logprob_errors else None,
        }
