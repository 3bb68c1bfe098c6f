"""The stages of one GRPO step, each one Prefect task; `train` is that of every flow.

rollout ─► logprob ─► ref_logprob ─► advantage ─► train ─► refit ─► clear
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prefect.futures import PrefectFuture

from actors.data_plane.meta import KVBatchMeta
from flows.step import Metrics, Step
from tasks import events
from tasks.advantage import advantage
from tasks.call import quoted
from tasks.logprob import POLICY_LOGPROBS, REFERENCE_LOGPROBS, logprob, ref_logprob
from tasks.refit import refit
from tasks.rollout import rollout, settle

if TYPE_CHECKING:
    from flows.grpo_session import GrpoSession


class GrpoStep(Step):
    """Stages in the order of the algorithm."""

    def __init__(self, run: GrpoSession, number: int) -> None:
        super().__init__(run, number)
        self._run: GrpoSession = run
        self._config = run.config
        self.objective = run.config.policy.loss.objective
        self._uids: tuple[str, ...] = ()  # of the groups that the step has taken

    def submit_rollout(self) -> None:
        """Take the step's groups from the ledger: as they are answered, or of those that were answered during earlier steps."""
        config = self._config
        groups, replaces = config.rollout.prompts_per_step, config.mode == "async" and config.rollout.dynamic_sampling
        self._futures["rollout"] = rollout.submit(self._run.namespace, self.number, groups, config.ledger, replaces)

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
        self._run.show_samples(self.number, "train", result.samples, result.slowest)
        meta: KVBatchMeta = result.meta
        return meta

    def submit_logprob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The policy's own log-probabilities of the samples (the `old` of the ratio); `train` comes after them."""
        return self._log_probabilities("logprob", logprob, batch, POLICY_LOGPROBS, self._config.policy.why_no_logprob())

    def submit_ref_logprob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The reference's log-probabilities, for the KL term; `train` comes after them."""
        return self._log_probabilities("ref_logprob", ref_logprob, batch, REFERENCE_LOGPROBS, self._config.policy.why_no_ref_logprob())

    def wait_for_advantage(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Rewards against their group's mean; returns the rows to train on."""
        config = self._config
        divides = config.policy.parallel.data * config.policy.updates_per_step if config.rollout.dynamic_sampling else None
        address, loss = self._run.actors.address, config.policy.loss
        with self._run.time("advantage") as timer:
            result = advantage(address, self.number, quoted(batch), loss, divides, config.data_plane.timeout_s)
        self.metrics |= result.metrics | {"time/advantage": timer.seconds}
        return result.meta

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

    def wait_for_refit(self) -> None:
        """The engines have the new weights when this returns."""
        result = self._wait_for("refit")
        self._run.weight_version = int(result["weight_version"])
        self.metrics |= {"refit_bytes": result["bytes"], "refit_pause_s": result["pause_s"]}
        events.refit_completed(self.number, result)

    def _log_probabilities(self, stage: str, task: Any, batch: KVBatchMeta, column: str, why_not: str | None) -> KVBatchMeta:
        self._futures[stage] = task.submit(self._run.namespace, self.number, quoted(batch), self._config.deadlines.policy_stage, why_not)
        if why_not:
            return batch
        self._sent += (stage,)
        return batch.with_fields(column)  # it will be there when it is the next stage's turn

    def _clear(self) -> PrefectFuture[Metrics] | None:
        """The groups' rows leave the data plane; groups that were not trained on go back into the ledger."""
        if not self._uids:
            return None
        return settle.submit(self._run.namespace, self.number, self._uids, self.trained, self._config.deadlines.clear)
