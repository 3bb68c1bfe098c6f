"""Supervised fine-tuning as a Prefect flow: the loss is on response tokens only.

 ┌► batch ─► train ─┐ ─► every few steps: validation loss ─► checkpoint ─► enough? ─► export of the best
 └─── step 1 .. N ◄─┘

When a part of the run is lost, it goes on from the newest checkpoint.

python -m flows.sft --recipe sft-cpu data.train=data/train.parquet data.split=0.05 steps=200
"""

from typing import Any

from configs.loader import load
from configs.sft import SftConfig
from flows.served import flow
from flows.session import Steps, run_name, with_steps
from flows.sft_session import SftSession, SftStep


@flow(name="sft", flow_run_name=run_name, validate_parameters=False)
def sft(recipe: str = "sft-cpu", overrides: list[str] | None = None, steps: Steps = None) -> dict[str, Any]:
    """Teach a language model to answer prompts with given responses. Returns the run's summary.

    Args:
        recipe: a name under configs/recipes, or a path that ends in .yaml.
        overrides: dotted.field=value, each on top of the recipe.
        steps: how many to train; default: what the recipe says.
    """
    config = load(recipe, with_steps(overrides, steps, "epochs=null"), SftConfig)
    with SftSession(config, recipe) as run:
        while not run.finished:
            with run.surviving():
                if not run.resume():
                    run.validate(step=0)
                with run.ending_between_steps():
                    for step in run.steps_left():
                        with run.step(step) as stage:
                            learn(run, stage)
                        run.validate_now_and_then(step)
                        run.save_now_and_then(step)
                run.export()
    return run.summary()


def learn(run: SftSession, stage: SftStep) -> None:
    """From samples to new weights."""
    stage.submit_batch()
    run.close_step_before()
    batch = stage.wait_for_batch()
    stage.submit_train(batch)
    stage.wait_for_train()
    stage.submit_clear()


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    from flows import cli

    return cli.main(sft, SftSession, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
