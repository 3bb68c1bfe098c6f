"""An `sft` run around its loop: steps, validation loss, checkpoints, and why the training ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect.futures import PrefectFuture

from actors.data_plane.meta import KVBatchMeta
from actors.preflight import prepare_model
from actors.preflight_sft import PART, Lengths, SupervisedData, check_sft, data_of, measure, sample_parts
from configs.sft import SftConfig
from flows.session import Metrics, Prepared, Session, Step
from flows.shards import in_lanes, room
from tasks.call import quoted
from tasks.checkpoint import hf_checkpoint
from tasks.clear import clear
from tasks.cluster import cluster
from tasks.handles import RunActors
from tasks.launch import launch_sft, logical_cpus, logical_gpus, planned_sft_actors
from tasks.reporting.checkpoints import Checkpoints
from tasks.reporting.run_dir import point
from tasks.supervised import measure_samples, supervised_batch, validation_loss

_MEASURE_S = 600.0  # for one part of the data


class SftStep(Step):
    """The stages of one supervised step; `train` is that of every flow."""

    objective = "sft"

    def __init__(self, run: SftSession, number: int) -> None:
        super().__init__(run, number)
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


class SftSession(Session[SftConfig, RunActors]):
    """Use as a context manager."""

    flow = "sft"
    config_type = SftConfig
    parts = "data plane, Megatron, collector"
    planned_actors = staticmethod(planned_sft_actors)

    def __init__(self, config: SftConfig, recipe: str) -> None:
        super().__init__(config, recipe)
        self._losses: dict[int, float] = {}
        self._tflops: list[float] = []
        self._checkpoints: Checkpoints | None = None
        self._stopped_because: Literal["steps", "epochs", "early_stop"] | None = None

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
        data = prepared.data
        dropped = f"; {data.dropped} were too long (above {data.allowed} tokens) and left out" if data.dropped else ""
        self.progress.note(f"{data.train:,} training and {data.validation:,} validation samples{dropped}; {self.steps} steps")
        self._checkpoints = Checkpoints(self.directory.checkpoints, self.config.keep_checkpoints)
        return launch_sft(self.config, prepared.model_path, self.namespace, data)

    @contextmanager
    def step(self, number: int) -> Iterator[SftStep]:
        """One step."""
        with self.running(SftStep(self, number)) as step:
            yield step
        self._tflops.append(step.metrics["tflops_per_worker"])

    def validate(self, step: int) -> float:
        """The loss on the held-out samples after `step` steps."""
        with self.time("validate") as timer:
            answer = validation_loss.submit(self.namespace, step, self.config.deadlines.policy_stage)
            self.close_step_before()
            loss = answer.result()
        self._losses[step] = loss
        values = {"loss/validation": loss, "time/validate": timer.seconds}
        self.record(step, values)
        self.progress.step(step, values)
        self.progress.note(f"step {step}: validation loss {loss:.4f}")
        return loss

    def checkpoint(self, step: int) -> None:
        """The weights after `step` steps, which were just validated, as a Hugging Face directory; `hf` points to the best so far."""
        assert self._checkpoints is not None
        with self.time("checkpoint") as timer:
            hf_checkpoint(self.namespace, step, str(self._checkpoints.path(step)), self.config.deadlines.policy_stage)
            self._checkpoints.add(step, self._losses[step])
            point(self.directory.hf, self.directory.checkpoints / "best")
        self.record(step, {"time/checkpoint": timer.seconds})

    def finish(self, *, stopped_early: bool) -> None:
        """The training ended: by early stopping, or because all its steps are done."""
        self._stopped_because = "early_stop" if stopped_early else "steps" if self.config.epochs is None else "epochs"

    def _facts(self) -> dict[str, Any]:
        losses = [self._losses[step] for step in sorted(self._losses)]
        best = self._checkpoints.best if self._checkpoints else None
        return {
            "stopped_because": self._stopped_because,
            "validation_loss_before": losses[0] if losses else None,
            "validation_loss_after": losses[-1] if len(losses) > 1 else None,
            "validation_loss_best": best[1] if best else None,
            "best_step": best[0] if best else None,
            "mean_tflops_per_worker": sum(self._tflops) / len(self._tflops) if self._tflops else None,
        }
