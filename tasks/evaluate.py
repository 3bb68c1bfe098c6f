"""validate, evaluate: answers to the held-out problems, during a training and of a finished model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import task

from actors import names
from actors.environments import Problem, build
from actors.environments.actor import EnvironmentActor
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.generation.pool import EnginePool
from actors.models.hf import check_model_dir
from actors.rollout.collector import Collector
from actors.rollout.prompts import PromptEncoder
from actors.rollout.samples import SLOWEST, Validation
from actors.rollout.validation import OWN_SET, Validator
from configs.evaluate import EvaluateConfig
from tasks.call import RETRIED, STAGE, ask
from tasks.reporting.jsonl import LinesWriter


@task(name="validate", task_run_name="validate-{step}", **RETRIED)
def validate(namespace: str, step: str, weight_version: int, timeout_s: float, name: str = OWN_SET) -> Validation:
    """What the engines' present weights achieve on a validation set. `step` is a number or a label such as warm-start-20."""
    return ask(namespace, names.COLLECTOR, timeout_s, Collector.validate, weight_version, name)


@task(name="evaluate", task_run_name="evaluate-{step}", **STAGE)
def evaluate_model(
    namespace: str, config: EvaluateConfig, step: str, model_path: str, engines: list[str], answers: str, name: str = OWN_SET
) -> Validation:
    """Every problem of a validation set is answered by the model's engines. All answers go to the file `answers`, a few come back.

    Args:
        step: the model's label, and the set's where it is not the run's own: it names the task run. name: of the set.
    """
    source, sampling = config.sources[name], config.sampling

    def score(problems: Sequence[Problem], responses: Sequence[Response]) -> list[Verdict]:
        return ask(namespace, names.ENVIRONMENT, config.deadlines.score, EnvironmentActor.score, problems, responses)

    validator = Validator(
        build(source, config.seed),
        PromptEncoder(model_path, source.system_prompt, source.chat_template_kwargs),
        EnginePool(namespace, engines, timeout_s=config.generation.timeout_s),
        score,
        config.seed,
        sampling.max_new_tokens,
        sampling.temperature,
        sampling.top_p,
        config.validation.samples_per_prompt,
        config.prompt_room(int(check_model_dir(model_path).max_position_embeddings)),
        source.on_too_long,
    )
    samples = validator.answers(0)
    with LinesWriter(Path(answers)) as file:
        for sample in (one for group in samples for one in group):
            file.append(sample.model_dump(exclude={"weight_version"}))
    return Validation.of(samples, config.validation, shown=config.logged_samples, slow=SLOWEST)
