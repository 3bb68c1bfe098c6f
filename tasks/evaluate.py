"""validate, evaluate: answers to the held-out problems, during a training and of a finished model."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from actors import names
from actors.environments import build
from actors.generation.pool import EnginePool
from actors.rollout.prompts import PromptEncoder
from actors.rollout.samples import Validation
from actors.rollout.validation import Validator
from configs.evaluate import EvaluateConfig
from tasks.call import RETRIED, STAGE, call
from tasks.reporting.jsonl import append, open_lines


@task(name="validate", task_run_name="validate-{step}", **RETRIED)
def validate(namespace: str, step: str, weight_version: int, timeout_s: float) -> Validation:
    """Reward and accuracy of the engines' present weights. `step` is a number or a label such as warm-start-20."""
    result: Validation = call(namespace, names.COLLECTOR, "validate", weight_version, timeout_s=timeout_s)
    return result


@task(name="evaluate", task_run_name="evaluate-{label}", **STAGE)
def evaluate_model(namespace: str, config: EvaluateConfig, label: str, model_path: str, engines: list[str], answers: str) -> Validation:
    """Every validation problem is answered by the model's engines. All answers go to the file `answers`, a few come back."""
    environment = build(config.source, config.seed)
    sampling = config.sampling
    validator = Validator(
        environment,
        PromptEncoder(model_path, config.source.system_prompt),
        EnginePool(namespace, engines, timeout_s=config.generation.timeout_s),
        lambda problems, texts: [environment.score(problem, text) for problem, text in zip(problems, texts, strict=True)],
        config.seed,
        sampling.max_new_tokens,
        sampling.temperature,
        sampling.top_p,
    )
    samples = validator.answers(0)
    with open_lines(Path(answers)) as file:
        for sample in samples:
            append(file, sample.model_dump(exclude={"weight_version"}))
    return Validation.of(environment, samples, config.logged_samples)
