"""The stages of one GRPO step, each one Prefect task; `train` and `clear` are those of every flow.

GrpoStep       rollout ─► logprob ─► ref_logprob ─► advantage ─► train ─► refit ─► clear
AsyncGrpoStep  claim   ─► ..............................................           beside a rollout task that never pauses
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from prefect.utilities.annotations import quote

from actors.data_plane.meta import KVBatchMeta
from flows.step import Step
from tasks import events
from tasks.advantage import advantage
from tasks.call import submit_and_note, submit_and_send
from tasks.coming import Batch, Coming
from tasks.logprob import logprob, ref_logprob
from tasks.refit import refit
from tasks.replay import claim, set_version, settle
from tasks.rollout import rollout

if TYPE_CHECKING:
    from flows.grpo_session import GrpoSession


class GrpoStep(Step):
    """Stages in the order of the algorithm."""

    def __init__(self, run: GrpoSession, number: int) -> None:
        super().__init__(run, number)
        self._run: GrpoSession = run
        self._config = run.config
        self._batch = Batch()
        self._weights: Coming[int] | None = None  # that this step makes, if a rollout waits for them

    def rollout(self) -> Batch:
        """Sample responses, score them, store them. Does not wait for them."""
        self._time_first("rollout")
        if self._first is None:
            self._first = submit_and_send(rollout, *self._rollout_arguments(self._run.weight_version))
        return self._batch

    def rollout_after(self, weights: Coming[int]) -> None:
        """Submit the rollout before the step begins."""
        self._first = submit_and_note(weights.sent(), rollout, *self._rollout_arguments(quote(weights)))

    def logprob(self, batch: Batch) -> Batch:
        """The policy's own log-probabilities of the samples (the `old` of the ratio); `train` comes after them."""
        return self._log_probabilities("logprob", logprob, batch, "policy_logprobs", self._config.policy.why_no_logprob())

    def ref_logprob(self, batch: Batch) -> Batch:
        """The reference's log-probabilities, for the KL term; `train` comes after them."""
        return self._log_probabilities("ref_logprob", ref_logprob, batch, "reference_logprobs", self._config.policy.why_no_ref_logprob())

    def advantage(self, batch: Batch) -> KVBatchMeta:
        """Rewards against their group's mean; returns the rows to train on."""
        config = self._config
        self._take()
        divides = config.policy.parallel.data * config.policy.updates_per_step if config.rollout.dynamic_sampling else None
        with self._timed("advantage"):
            result = advantage(
                self._run.actors.address,
                self.number,
                quote(batch.meta()),
                config.policy.loss.normalize_advantages,
                divides,
                config.data_plane.timeout_s,
            )
        self.metrics |= result.metrics
        return result.meta

    def refit(self) -> None:
        """The new weights into the engines, when training is done."""
        run, timeout_s, turn = self._run, self._config.deadlines.policy_stage, self._turn("refit")
        self._weights = Coming("weights") if run.goes_straight_on(self.number) else None
        arguments = run.namespace, str(self.number), run.actors.engines, run.weight_updates, timeout_s, turn, quote(self._weights)
        refitting = refit.submit(*arguments)
        if self._weights:
            run.begin_rollout(self.number + 1, self._weights)
        self.wait_for_training()
        with self._timed("refit"):
            result = refitting.result()
        run.weight_version = int(result["weight_version"])
        self.metrics |= {"refit_bytes": result["bytes"], "refit_pause_s": result["pause_s"]}
        events.refit_completed(self.number, result)

    def withdraw(self) -> None:
        """What waits for the step's samples or weights does not begin any more, either."""
        self._batch.samples.give_up()
        if self._weights:
            self._weights.give_up()
        super().withdraw()

    def _take(self) -> None:
        """Wait for the samples, and show some."""
        result = self._result_of_first()
        self._written = result.meta
        self.metrics |= result.metrics
        self._run.show_samples(self.number, "train", result.samples, result.slowest)

    def _log_probabilities(self, stage: str, task: Any, batch: Batch, column: str, why_not: str | None) -> Batch:
        arguments = self._run.namespace, self.number, quote(batch), self._config.deadlines.policy_stage, why_not
        if why_not:
            self._before_train[stage] = task.submit(*arguments)
            return batch
        sent = threading.Event() if batch.sent else batch.samples.sent()
        self._before_train[stage] = submit_and_note(sent, task, *arguments)
        self._sent += (stage,)
        return batch.with_field(column, sent)

    def _rollout_arguments(self, weight_version: Any) -> tuple[Any, ...]:
        return self._run.namespace, self.number, weight_version, self._config.deadlines.rollout, quote(self._batch.samples)


class AsyncGrpoStep(GrpoStep):
    """A step whose groups were generated while earlier steps trained."""

    def __init__(self, run: GrpoSession, number: int) -> None:
        super().__init__(run, number)
        self._uids: tuple[str, ...] = ()

    def claim(self) -> Batch:
        """Take groups that are young enough. Does not wait for them."""
        config = self._config
        groups, replace = config.rollout.prompts_per_step, config.rollout.dynamic_sampling
        arguments = self._run.namespace, self.number, groups, config.asynchronous, replace, quote(self._batch.samples)
        self._time_first("claim")
        self._first = submit_and_send(claim, *arguments)
        return self._batch

    def _take(self) -> None:
        result = self._result_of_first()
        self._uids = result.uids
        self.metrics |= result.metrics | {"idle/trainer_s": self.metrics["time/claim"]}
        self._run.show_samples(self.number, "train", result.samples, result.slowest)

    def refit(self) -> None:
        """The new weights into the engines, beside what they generate; the next step trains them."""
        super().refit()
        set_version(self._run.namespace, self._run.weight_version)

    def _begin_clear(self) -> None:
        """The groups' rows leave the data plane; groups that were not trained on go back into the buffer."""
        if self._clearing is None and self._uids:
            self._clearing = settle.submit(self._run.namespace, self.number, self._uids, self._trained, self._config.deadlines.clear)
