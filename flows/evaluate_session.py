"""An `evaluate` run: engines with a model (and a baseline beside it), the problems, and what was answered. No policy, no data plane."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from actors.preflight import check_evaluation, with_local_models
from actors.rollout.samples import SLOWEST, Validation
from actors.rollout.validation import OWN_SET
from configs.evaluate import EvaluateConfig
from flows.prepared import Prepared
from flows.session import Session
from flows.shards import in_lanes, room
from tasks.evaluate import Answers, Shard, evaluate_shard
from tasks.handles import EvaluationActors
from tasks.launch import launch_engines, planned_engines
from tasks.reporting.jsonl import LinesWriter
from tasks.reporting.samples import Phase
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
        super().__init__(with_local_models(config), recipe)
        self._answers: dict[tuple[str, str], list[Answers]] = defaultdict(list)  # by model and set
        self._found: dict[str, dict[str, Validation]] = {}

    @staticmethod
    def prepare(config: EvaluateConfig, scratch: Path) -> Prepared:
        config = with_local_models(config)
        check_evaluation(config)
        return Prepared(config.model, 1)

    def _launch(self, prepared: Prepared) -> EvaluationActors:
        self.slowest = self._stack.enter_context(SlowestWriter(self.directory))
        actors = launch_engines(self.config, self.namespace)
        wanted, there = self.config.generation.num_engines, len(actors.engines["model"])
        if there < wanted:
            self.progress.note(f"{there} engine(s) of each model in place of {wanted}: the GPUs have no room for more")
        return actors

    def evaluate(self) -> None:
        """All models answer all problems of all sets, side by side where the cluster has room for that, else one after the other.
        answers-<label>.jsonl holds every answer and its reward."""
        config, side_by_side = self.config, room() > 1
        arguments = self.namespace, config, config.gathered()
        lanes = [lane for label in self.config.models for lane in self._lanes(label, side_by_side)]
        for turn in [lanes] if side_by_side else [[lane] for lane in lanes]:
            with self.time("validate"):
                in_lanes(turn, self._keep, config.ray, config.deadlines.validation, evaluate_shard, *arguments)
            for label in dict.fromkeys(shard.model for lane in turn for shard in lane):
                self._conclude(label)

    def _lanes(self, label: str, side_by_side: bool) -> list[list[Shard]]:
        # An engine takes one call at a time: its shards are one lane.
        engines = self.actors.engines[label]
        lanes = [(name,) for name in engines] if side_by_side else [tuple(engines)]
        return [[Shard(label, name, lane, part, len(lanes)) for name in self.config.sources] for part, lane in enumerate(lanes)]

    def _keep(self, answers: Answers) -> None:
        """The last part of a set completes its file."""
        shard = answers.shard
        parts = self._answers[shard.model, shard.name]
        parts.append(answers)
        if len(parts) == shard.parts:
            parts.sort(key=lambda one: one.shard.part)
            with LinesWriter(answers_file(self.directory.root, shard.model, shard.name)) as file:
                for group in (group for part in parts for group in part.samples):
                    for sample in group:
                        file.append(sample.model_dump(exclude={"weight_version"}))

    def _conclude(self, label: str) -> None:
        """A model has answered all sets."""
        step = int(label == "model")
        phase: Phase = "after" if self._found else "before"
        found: dict[str, Validation] = {}
        seconds = 0.0
        for name in self.config.sources:
            parts = self._answers.pop((label, name))
            samples = [group for part in parts for group in part.samples]
            found[name] = Validation.of(samples, self.config.validation, shown=self.config.logged_samples, slow=SLOWEST)
            seconds += max(part.seconds for part in parts)
            self.slowest.write(step, phase, found[name].slowest)
        self._found[label] = found
        self.trackers.samples(step, phase, found[OWN_SET].samples)
        values = {"time/validate": seconds}
        for name, of_set in found.items():
            values |= of_set.metrics(name)
        self.record(step, values)
        self.progress.step(step, values)
        for name, of_set in found.items():
            which = label if name == OWN_SET else f"{label}, {name}"
            self.progress.note(f"{which}: accuracy {estimate(of_set.accuracy, of_set.low, of_set.high)}, reward {of_set.reward:.3f}")

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
