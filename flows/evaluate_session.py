"""An `evaluate` run: engines with a model (and a baseline beside it), the problems, and what was answered. No policy, no data plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.preflight_evaluate import check_evaluation
from actors.rollout.samples import Validation
from actors.rollout.validation import OWN_SET
from configs.evaluate import EvaluateConfig
from flows.session import Prepared, Session
from tasks.evaluate import evaluate_model
from tasks.launch import EvaluationActors, launch_engines, planned_engines
from tasks.reporting.samples import SamplesWriter
from tasks.reporting.slowest import SlowestWriter
from tasks.reporting.summary import SetAccuracy
from tasks.reporting.text import estimate


class EvaluateSession(Session[EvaluateConfig]):
    """Use as a context manager. A model is a step: the baseline is 0 where there is one."""

    flow = "evaluate"
    config_type = EvaluateConfig
    parts = "vLLM"
    makes_model = False
    planned_actors = staticmethod(planned_engines)

    def __init__(self, config: EvaluateConfig, recipe: str) -> None:
        # Links such as runs/latest may move while the run goes.
        super().__init__(config.model_copy(update={name: str(Path(path).resolve()) for name, path in config.models.items()}), recipe)
        self._found: dict[str, Validation] = {}

    @staticmethod
    def prepare(config: EvaluateConfig, scratch: Path) -> Prepared:
        check_evaluation(config)
        return Prepared(config.model, 1)

    def _launch(self, prepared: Prepared) -> EvaluationActors:
        self.samples = self._stack.enter_context(SamplesWriter(self.directory))
        self.slowest = self._stack.enter_context(SlowestWriter(self.directory))
        return launch_engines(self.config, self.namespace)

    def evaluate(self, label: str) -> None:
        """All problems, answered by the model of that name; answers-<label>.jsonl holds every answer and its reward."""
        step, first = int(label == "model"), not self._found
        with self.time("validate") as timer:
            path = str(answers_file(self.directory.root, label))
            found = evaluate_model(self.namespace, self.config, label, self.config.models[label], self.actors.engines[label], path)
        self._found[label] = found
        self.samples.write(step, "before" if first else "after", found.samples)
        self.slowest.write(step, "before" if first else "after", found.slowest)
        values = found.metrics() | {"time/validate": timer.seconds}
        self.record(step, values)
        self.progress.step(step, values)
        self.progress.note(f"{label}: accuracy {estimate(found.accuracy, found.low, found.high)}, reward {found.reward:.3f}")

    def _facts(self) -> dict[str, Any]:
        model, baseline = self._found.get("model"), self._found.get("baseline")
        return {
            "sets": {OWN_SET: SetAccuracy.of(baseline, model)},
            "accuracy_before": baseline.accuracy if baseline else None,
            "reward_before": baseline.reward if baseline else None,
            "accuracy_after": model.accuracy if model else None,
            "reward_after": model.reward if model else None,
        }


def answers_file(directory: Path, label: str) -> Path:
    """Where a run keeps every answer of `model` or `baseline`: {prompt, response, answer, reward} lines."""
    return directory / f"answers-{label}.jsonl"
