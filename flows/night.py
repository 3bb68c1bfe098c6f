"""One night of retraining around the flow's few lines: where it writes, what it trains with, and how it ends.

runs/retrain-cpu/
├── config.yaml  new.jsonl  frozen.jsonl     what it was given
├── model/                                   what it was trained from, when that was no local directory yet
├── training.yaml ──► training/              the `grpo` run; training/hf is the candidate, and hf a link to it
├── evaluation.yaml ──► evaluation/          the `evaluate` run: baseline (old) and model (new)
└── comparison.md  outcome.json              why it was promoted or not
"""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefect import runtime
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas import State
from prefect.logging import get_run_logger
from prefect.states import Completed

from actors import names
from actors.preflight import prepare_model
from configs.environment import EnvironmentConfig
from configs.evaluate import EvaluateConfig, SamplingConfig
from configs.loader import dump, load
from configs.model import ModelConfig
from configs.policy import WarmStartConfig
from configs.retrain import RetrainConfig
from configs.run import BaseConfig, RunConfig
from flows.approval import ask_approval
from flows.evaluate import evaluate
from flows.evaluate_session import answers_file
from flows.grpo import grpo
from tasks.call import quoted
from tasks.cluster import cluster
from tasks.launch import logical_cpus, logical_gpus, planned_actors, planned_engines
from tasks.lease import Lease
from tasks.reporting.jsonl import read_lines
from tasks.reporting.run_dir import RunDirectory, point, point_latest
from tasks.retrain import Found, find_new_prompts, keep_old, promote
from tasks.retraining import prompts
from tasks.retraining.comparison import comparison_markdown
from tasks.retraining.decision import Scores, Verdict, decide
from tasks.retraining.registry import Attempt, Registry, why_skip

# Of the training recipe's environment; its source is replaced by the night's.
_DATA_SETTINGS = {"fields", "system_prompt", "chat_template_kwargs", "on_too_long"}


class Night:
    """Holds the registry's lease. Use as a context manager.

    Raises:
        BusyError: another run holds it. ConfigError: the recipe, or what it points to.
    """

    flow = "retrain"
    config_type = RetrainConfig

    def __init__(self, config: RetrainConfig, recipe: str) -> None:
        self.config, self.recipe = config, recipe
        self._training = training_config(config)
        self._registry = Registry(config.registry.url)
        run = runtime.flow_run
        self._run_id = str(run.id)
        self._lease = Lease(self._registry.lease_folder, f"flow run {run.name!r} is retraining into", config.registry.lease_s)

    # ---- for the command line ----

    @staticmethod
    def planned_actors(config: RetrainConfig) -> list[tuple[str, str]]:
        """(name, what it does) of every actor that a night would start: of the training, then of the evaluation."""
        training = training_config(config)
        return [*planned_actors(training), *planned_engines(evaluation_config(training, "the old model", "the new model"))]

    @staticmethod
    def prepare(config: RetrainConfig, scratch: Path) -> None:
        """See that everything can be reached, before anything starts.

        Raises:
            ConfigError: what cannot, and what to change.
        """
        find_new_prompts.fn(config, training_config(config).environment.fields)

    # ---- lifetime ----

    def __enter__(self) -> Self:
        self._registry.probe()  # the lease relies on it
        with ExitStack() as stack:
            stack.enter_context(self._lease.held())
            self._registry.repair()
            self._found: Found = find_new_prompts(self.config, self._training.environment.fields)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def ray(self) -> AbstractContextManager[str]:
        """One Ray cluster for training and evaluation."""
        training, evaluation = self._training, evaluation_config(self._training, "old", "new")
        cpus = max(logical_cpus(training), logical_cpus(evaluation))
        return cluster(training.ray, names.namespace(self._run_id), cpus, logical_gpus(training, evaluation))

    # ---- the steps ----

    def nothing_to_do(self) -> str | None:
        """Why this night needs no training, or None."""
        new, data = self._found.new, self.config.data
        tried = self._registry.rejected(self._found.number, prompts.digest(new.prompts), self._config_hash)
        return why_skip(len(new.prompts), data.min_prompts, data.url, self._found.number, tried)

    def train(self) -> None:
        """The `grpo` flow on the new prompts, from the promoted model; before there is one, from the training recipe's own."""
        parent = self._found.parent
        self.directory = RunDirectory.create(self.config.output_dir, self.config.name)
        root = self.directory.root
        self.directory.config.write_text(dump(self.config))
        (root / "new.jsonl").write_text(prompts.write(self._found.new.prompts), encoding="utf-8")
        (root / "frozen.jsonl").write_text(prompts.write(self._found.frozen), encoding="utf-8")
        point_latest(self.directory)
        data = self._training.environment.model_copy(
            update={
                "path": str(root / "new.jsonl"),
                "validation_path": str(root / "frozen.jsonl"),
                "validation_size": len(self._found.frozen),
            }
        )
        training = self._training.model_copy(update={"name": "training", "output_dir": str(root), "environment": data})
        if parent is None:
            self._old = prepare_model(training, root / "model")
        else:
            self._old = str(self._registry.fetch(parent, root / "model"))
            # The promoted model sometimes succeeds: that is what the warm start was for.
            training = training.model_copy(update={"warm_start": WarmStartConfig()})
        training = training.model_copy(update={"model": ModelConfig(path=self._old)})
        _say(f"{len(self._found.new.prompts):,} new prompts of {', '.join(self._found.new.files)}")
        grpo(recipe=self._recipe("training", training))
        point(self.directory.hf, root / "training" / "hf")

    def evaluate(self) -> Verdict:
        """Old and new model on the frozen set, and what follows from it."""
        root = self.directory.root
        evaluation = evaluation_config(
            self._training,
            self._old,
            str(self.directory.hf),
            output_dir=str(root),
            problems=str(root / "frozen.jsonl"),
            logged_samples=self.config.frozen_set.logged_samples,
        )
        summary = evaluate(recipe=self._recipe("evaluation", evaluation))
        old, new = (Scores(accuracy=summary[f"accuracy_{when}"], reward=summary[f"reward_{when}"]) for when in ("before", "after"))
        verdict = decide(old, new, self.config.promotion)
        self._attempt = Attempt(
            parent=self._found.number,
            run_id=self._run_id,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            prompts=len(self._found.new.prompts),
            data_hash=prompts.digest(self._found.new.prompts),
            config_hash=self._config_hash,
            frozen_hash=prompts.digest(self._found.frozen),
            metric=self.config.promotion.metric,
            old=old,
            new=new,
            reason=verdict.reason,
        )
        return verdict

    def ask(self) -> State | None:
        """Have a person decide; None: go on and promote. Otherwise how the night ends."""
        answer = ask_approval(self._publish("Promote the new model?"), self.config.approval)
        if answer is None:
            said = f"nobody approved it within {self.config.approval.timeout_s} s"
        else:
            said = f"{'approved' if answer.approve else 'declined'} by a person" + (f": {answer.note}" if answer.note else "")
        self._attempt = self._attempt.model_copy(update={"reason": f"{self._attempt.reason}; {said}"})
        if answer is None:
            return self._end("Kept", self._attempt.reason, None)  # not remembered as tried: the next night asks again
        return None if answer.approve else self.keep()

    def promote(self) -> State:
        """The new model takes the old one's place."""
        new = quoted(self._found.new.consumed)
        promotion = promote(self.config.registry, str(self.directory.hf), quoted(self._attempt), new, quoted(self._lease))
        return self._end("Promoted", f"model {promotion.number}: {promotion.reason}", promotion.number)

    def keep(self) -> State:
        """The old model stays."""
        keep_old(self.config.registry, quoted(self._attempt))
        return self._end("Kept", self._attempt.reason, None)

    # ---- inside ----

    @property
    def _config_hash(self) -> str:
        training = self._training.model_dump(mode="json", exclude={"name", "output_dir", "ray", "environment"})
        decides = [
            training,
            self._training.environment.model_dump(mode="json", include=_DATA_SETTINGS),
            prompts.digest(self._found.frozen),
            self.config.promotion.model_dump(mode="json"),
        ]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def _recipe(self, name: str, config: BaseConfig) -> str:
        path = self.directory.root / f"{name}.yaml"
        path.write_text(dump(config))
        return str(path)

    def _publish(self, heading: str) -> str:
        old, new = (read_lines(answers_file(self.directory.root / "evaluation", label)) for label in ("baseline", "model"))
        shown = self.config.frozen_set.logged_samples
        page = comparison_markdown(heading, self._attempt, self._found.new, old, new, shown)
        (self.directory.root / "comparison.md").write_text(page, encoding="utf-8")
        create_markdown_artifact(markdown=page, key="retrain-comparison", description=self._attempt.reason)
        return page

    def _end(self, name: str, message: str, number: int | None) -> State:
        self._publish("Kept the old model" if number is None else name)
        state = ended(name, message, promoted=number, **self._attempt.model_dump(mode="json"))
        (self.directory.root / "outcome.json").write_text(json.dumps(state.data, indent=2) + "\n", encoding="utf-8")
        return state


def ended(name: str, message: str, *, promoted: int | None = None, **attempt: Any) -> State:
    """The state in which a night ends; its result says the same, and what was attempted."""
    _say(f"{name}: {message}")
    return Completed(name=name, message=message, data={"outcome": name.lower(), "message": message, "promoted": promoted, **attempt})


def _say(text: str) -> None:
    get_run_logger().info(text)
    print(text, flush=True)


def training_config(config: RetrainConfig) -> RunConfig:
    """The `grpo` recipe that a night trains with, before copies of its data and its model are put in.

    Raises:
        ConfigError: it does not load.
    """
    training = load(config.training.recipe, config.training.overrides)
    data = EnvironmentConfig(
        kind="dataset",
        path=config.data.url,
        validation_path=config.frozen_set.url,
        **training.environment.model_dump(include=_DATA_SETTINGS),
    )
    return training.model_copy(update={"seed": config.seed, "environment": data})


def evaluation_config(training: RunConfig, old: str, new: str, **more: Any) -> EvaluateConfig:
    """Old and new model answer as in the training's own validation; `more` are further fields."""
    rollout = training.rollout
    return EvaluateConfig(
        name="evaluation",
        seed=training.seed,
        model=new,
        baseline=old,
        environment=EnvironmentConfig(**training.environment.model_dump(include=_DATA_SETTINGS)),
        rewards=training.rewards,
        scoring=training.scoring,
        validation=training.validation.model_copy(update={"sets": {}}),
        sampling=SamplingConfig(max_new_tokens=rollout.max_new_tokens, temperature=rollout.validation_temperature),
        generation=training.generation,
        ray=training.ray,
        **more,
    )
