"""Scheduled retraining as a Prefect flow: new prompts make a new model, which takes the old one's place only if it is better.

new prompts? ─no─► Skipped
     │ yes
     ▼
train from the promoted model ─► old and new on the frozen set ─► better by the margin? ─no─► Kept
                                                                   │ yes  (and a person says yes, where one is asked)
                                                                   ▼
                                                                 Promoted

python -m flows.retrain --recipe retrain-cpu
"""

from typing import Any

from prefect.client.schemas import State

from configs.loader import load
from configs.retrain import RetrainConfig
from flows.night import Night, ended
from flows.served import flow
from flows.session import run_name
from tasks.lease import BusyError


@flow(name="retrain", flow_run_name=run_name, validate_parameters=False)
def retrain(recipe: str = "retrain-cpu", overrides: list[str] | None = None) -> State[dict[str, Any]]:
    """Train on what is new since the promoted model, and promote the result if it is better. Returns the outcome and why.

    Args:
        recipe: a name under configs/recipes, or a path that ends in .yaml.
        overrides: dotted.field=value, each on top of the recipe.
    """
    config = load(recipe, overrides or (), RetrainConfig)
    try:
        with Night(config, recipe) as night:
            if reason := night.nothing_to_do():
                return ended("Skipped", reason)
            with night.ray():
                night.train()
                verdict = night.evaluate()
            if not verdict.promote:
                return night.keep()
            if config.approval.required and (end := night.ask()) is not None:
                return end
            return night.promote()
    except BusyError as busy:
        return ended("Skipped", str(busy))


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    from flows import cli

    return cli.main(retrain, Night, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
