"""An `sft` run around its loop: steps, validation loss, the best weights, and why the training ended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.futures import PrefectFuture

from actors.data_plane.meta import KVBatchMeta
from actors.preflight import prepare_model
from actors.preflight_sft import PART, Lengths, SupervisedData, check_sft, data_of, measure, sample_parts
from configs.policy import OptimizerConfig
from configs.sft import SftConfig
from flows.early_stopping import EarlyStopping
from flows.prepared import Prepared
from flows.saving import RunState
from flows.session import Metrics, Step
from flows.shards import in_lanes, room
from flows.training_session import TrainingSession
from tasks.call import quoted
from tasks.clear import clear
from tasks.cluster import cluster
from tasks.handles import RunActors
from tasks.launch import launch_sft, logical_cpus, logical_gpus, planned_sft_actors
from tasks.supervised import measure_samples, supervised_batch, validation_loss

_MEASURE_S = 600.0  # for one part of the data


class SftStep(Step):
    """The stages of one supervised step; `train` is that of every flow."""

    def __init__(self, run: SftSession, number: int) -> None:
        super().__init__(run, number)
        self.objective = run.config.objective
        self._written: KVBatchMeta | None = None

    def submit_batch(self) -> None:
        """The next samples are tokenised and stored."""
        self._futures["batch"] = supervised_batch.submit(self._run.namespace, self.number, self._run.config.deadlines.clear)

    def wait_for_batch(self) -> KVBatchMeta:
        """They are in the data plane when this returns."""
        result = self._wait_for("batch")
        self.metrics["dropped_samples"] = result.dropped
        self._written = result.meta
        return self._written

    def _clear(self) -> PrefectFuture[Metrics] | None:
        if self._written is None:
            return None
        return clear.submit(self._run.namespace, self.number, quoted(self._written), self._run.config.deadlines.clear)


@dataclass(frozen=True)
class PreparedSft(Prepared):
    """And what the data came to."""

    data: SupervisedData


class SftState(RunState):
    """And what the summary and early stopping are made of.

    Attributes:
        losses: validation loss by step. tflops: of a worker, by step. best: step and validation loss of the best checkpoint.
    """

    losses: dict[int, float]
    tflops: dict[int, float]
    best: tuple[int, float] | None


class SftSession(TrainingSession[SftConfig]):
    """Use as a context manager."""

    flow = "sft"
    state_type = SftState
    config_type = SftConfig
    parts = "data plane, Megatron, collector"
    planned_actors = staticmethod(planned_sft_actors)

    def __init__(self, config: SftConfig, recipe: str) -> None:
        super().__init__(config, recipe)
        self._validation_losses: dict[int, float] = {}
        self._tflops: dict[int, float] = {}
        self._best: tuple[int, float] | None = None

    @staticmethod
    def prepare(config: SftConfig, scratch: Path) -> PreparedSft:
        model_path = prepare_model(config, scratch)
        problems, allowed = check_sft(config, model_path)
        lengths: list[Lengths] = []
        lanes = min(room(), problems.size("train") // PART if config.data.environment is None else 1)
        if lanes > 1:
            rows = sample_parts(config, problems)  # each lane takes the next part
            in_lanes([rows] * lanes, lengths.append, config.ray, _MEASURE_S, measure_samples, config, model_path, allowed)
        else:
            lengths += [measure(part, config, model_path, allowed) for part in sample_parts(config, problems)]
        data = data_of(problems, lengths, allowed)
        return PreparedSft(model_path, data.steps(config), data)

    def _open(self) -> None:
        # Ray first: its workers measure large data.
        self._stack.enter_context(cluster(self.config.ray, self.namespace, logical_cpus(self.config), logical_gpus(self.config)))
        super()._open()

    def _launch(self, prepared: PreparedSft) -> RunActors:
        data, before = prepared.data, getattr(self, "actors", None)  # of a run that has lost a part
        if before is None:
            dropped = f"; {data.dropped} were too long (above {data.allowed} tokens) and left out" if data.dropped else ""
            self.progress.note(f"{data.train:,} training and {data.validation:,} validation samples{dropped}; {self.steps} steps")
        return launch_sft(self.config, prepared.model_path, self.namespace, data, before)

    # ---- checkpoints ----

    def _state(self, step: int) -> SftState:
        return SftState(
            step=step, tokens=self._tokens, seconds=dict(self.seconds),
            losses=self._validation_losses, tflops=self._tflops, best=self._best,
        )  # fmt: skip

    def _take_over(self, state: SftState) -> None:
        self._validation_losses, self._tflops, self._best = dict(state.losses), dict(state.tflops), state.best

    @property
    def _exports(self) -> int:
        return 1

    @property
    def _optimizer(self) -> OptimizerConfig:
        return self.config.policy.optimizer.over(self.steps)

    def _score(self, step: int) -> float | None:
        loss = self._validation_losses.get(step, math.nan)
        return -loss if math.isfinite(loss) else None

    def save(self, step: int) -> None:
        """One cut after this step."""
        score = self._score(step)
        if score is not None and (self._best is None or score > -self._best[1]):
            self._best = (step, -score)
        super().save(step)

    def export(self) -> None:
        """The best checkpoint as a Hugging Face directory: the last weights, where none was validated."""
        self.saving.wait()
        with self.time("export"), self.progress.phase("writing the trained model"):
            self._load_best()
            self._export(self.directory.hf)

    # ---- steps ----

    @contextmanager
    def step(self, number: int) -> Iterator[SftStep]:
        """One step."""
        with self.running(SftStep(self, number)) as step:
            yield step
        self._tflops[number] = step.metrics["tflops_per_worker"]

    def validate(self, step: int) -> None:
        """The loss on the held-out samples after `step` steps."""
        with self.time("validate") as timer:
            answer = validation_loss.submit(self.namespace, step, self.config.deadlines.policy_stage)
            self.close_step_before()
            loss = answer.result()
        self._validation_losses[step] = loss
        values = {"loss/validation": loss, "time/validate": timer.seconds}
        self.record(step, values)
        self.progress.step(step, values)
        self.progress.note(f"step {step}: validation loss {loss:.4f}")

    def validate_now_and_then(self, step: int) -> None:
        """Every `validate_every` steps, and after the last."""
        if step % self.config.validate_every == 0 or step == self.steps:
            self.validate(step)

    def is_last(self, step: int) -> bool:
        """Also when the validation loss no longer falls."""
        return super().is_last(step) or self._is_enough(step)

    def _is_enough(self, step: int) -> bool:
        if step == 0 or step not in self._validation_losses:
            return False
        stopping = EarlyStopping(self.config.patience)
        for validated in sorted(self._validation_losses):
            if validated <= step:
                stopping.see(self._validation_losses[validated])
        return stopping.exhausted

    def _facts(self) -> dict[str, Any]:
        losses = [self._validation_losses[step] for step in sorted(self._validation_losses)]
        best, done = self._best, self._steps_done
        all_done = "steps" if self.config.epochs is None else "epochs"
        return {
            "stopped_because": "early_stop" if self._is_enough(done) else all_done if 0 < done == self.steps else None,
            "validation_loss_before": losses[0] if losses else None,
            "validation_loss_after": losses[-1] if len(losses) > 1 else None,
            "validation_loss_best": best[1] if best else None,
            "best_step": best[0] if best else None,
            "mean_tflops_per_worker": sum(self._tflops.values()) / len(self._tflops) if self._tflops else None,
        }
