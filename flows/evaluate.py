"""Evaluation of a finished model as a Prefect flow: its answers to an environment's validation set, or to a frozen set.

engines of baseline and model start ─► evaluate-baseline ─► evaluate-model ─► accuracy, reward, every answer
                                       └─ side by side, each engine its part of each set, where the cluster has CPUs for that

python -m flows.evaluate model=runs/latest/hf
python -m flows.evaluate model=runs/mine/hf baseline=models/Qwen2.5-0.5B problems=data/frozen.jsonl sampling.max_new_tokens=256
"""

from typing import Any

from configs.evaluate import EvaluateConfig
from configs.loader import load
from flows.evaluate_session import EvaluateSession
from flows.served import flow
from flows.session import run_name


@flow(name="evaluate", flow_run_name=run_name, validate_parameters=False)
def evaluate(recipe: str = "evaluate-cpu", overrides: list[str] | None = None) -> dict[str, Any]:
    """Measure a language model, alone or beside a baseline. Returns the run's summary.

    Args:
        recipe: a name under configs/recipes, or a path that ends in .yaml.
        overrides: dotted.field=value, each on top of the recipe: model=runs/latest/hf.
    """
    config = load(recipe, overrides or (), EvaluateConfig)
    with EvaluateSession(config, recipe) as run:
        run.evaluate()
    return run.summary()


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    from flows import cli

    return cli.main(evaluate, EvaluateSession, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
