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
from tasks.reporting.samples import Phase, SamplesWriter
from tasks.reporting.slowest import SlowestWriter
from tasks.reporting.summary import SetAccuracy
from tasks.reporting.text import estimate


class EvaluateSession(Session[EvaluateConfig, EvaluationActors]):
    """Use as a context manager. A model is a step: the baseline is 0 where there is one."""

    flow = "evaluate"
    config_type = EvaluateConfig
    parts = "vLLM"
    makes_model = False
    planned_actors = staticmethod(planned_engines)

    def __init__(self, config: EvaluateConfig, recipe: str) -> None:
        # Links such as runs/latest may move while the run goes.
        super().__init__(config.model_copy(update={name: str(Path(path).resolve()) for name, path in config.models.items()}), recipe)
        self._found: dict[str, dict[str, Validation]] = {}

    @staticmethod
    def prepare(config: EvaluateConfig, scratch: Path) -> Prepared:
        check_evaluation(config)
        return Prepared(config.model, 1)

    def _launch(self, prepared: Prepared) -> EvaluationActors:
        self.samples = self._stack.enter_context(SamplesWriter(self.directory))
        self.slowest = self._stack.enter_context(SlowestWriter(self.directory))
        return launch_engines(self.config, self.namespace)

    def evaluate(self, label: str) -> None:
        """All problems of all sets, answered by the model of that name; answers-<label>.jsonl holds every answer and its reward."""
        step = int(label == "model")
        phase: Phase = "after" if self._found else "before"
        found: dict[str, Validation] = {}
        with self.time("validate") as timer:
            for name in self.config.sources:
                found[name] = self._answered(label, name)
                self.slowest.write(step, phase, found[name].slowest)
        self._found[label] = found
        self.samples.write(step, phase, found[OWN_SET].samples)
        values = {"time/validate": timer.seconds}
        for name, of_set in found.items():
            values |= of_set.metrics(name)
        self.record(step, values)
        self.progress.step(step, values)
        for name, of_set in found.items():
            which = label if name == OWN_SET else f"{label}, {name}"
            self.progress.note(f"{which}: accuracy {estimate(of_set.accuracy, of_set.low, of_set.high)}, reward {of_set.reward:.3f}")

    def _answered(self, label: str, name: str) -> Validation:
        step, path = (label if name == OWN_SET else f"{label}-{name}"), str(answers_file(self.directory.root, label, name))
        return evaluate_model(self.namespace, self.config, step, self.config.models[label], self.actors.engines[label], path, name)

    def _facts(self) -> dict[str, Any]:
        after, before = self._found.get("model", {}), self._found.get("baseline", {})
        model, baseline = after.get(OWN_SET), before.get(OWN_SET)
        return {
            "sets": {name: SetAccuracy.of(before.get(name), after.get(name)) for name in self.config.sources},
            "accuracy_before": baseline.accuracy if baseline else None,
            "reward_before": baseline.reward if baseline else None,
            "accuracy_after": model.accuracy if model else None,
            "reward_after": model.reward if model else None,
        }


def answers_file(directory: Path, label: str, name: str = OWN_SET) -> Path:
    """Where a run keeps every answer of `model` or `baseline` to a validation set: {prompt, response, answer, reward, ...} lines."""
    return directory / (f"answers-{label}.jsonl" if name == OWN_SET else f"answers-{label}-{name}.jsonl")
