"""Supervised fine-tuning as a Prefect flow: the loss is on response tokens only.

 ┌► batch ─► train ─┐ ─► every few steps: validation loss ─► checkpoint ─► best so far? early stop?
 └─── step 1 .. N ◄─┘

python -m flows.sft --recipe sft-cpu data.train=data/train.parquet data.split=0.05 steps=200
"""

from typing import Any

from prefect import flow

from configs.loader import load
from configs.sft import SftConfig
from flows.early_stopping import EarlyStopping
from flows.session import Steps, run_name, with_steps
from flows.sft_session import SftSession


@flow(name="sft", flow_run_name=run_name, validate_parameters=False)
def sft(recipe: str = "sft-cpu", overrides: list[str] | None = None, steps: Steps = None) -> dict[str, Any]:
    """Teach a language model to answer prompts with given responses. Returns the run's summary.

    Args:
        recipe: a name under configs/recipes, or a path that ends in .yaml.
        overrides: dotted.field=value, each on top of the recipe.
        steps: how many to train; default: what the recipe says.
    """
    config = load(recipe, with_steps(overrides, steps, "epochs=null"), SftConfig)
    stopping = EarlyStopping(config.patience)
    with SftSession(config, recipe) as run:
        stopping.see(run.validate(step=0))
        for step in range(1, run.steps + 1):
            with run.step(step) as stage:
                stage.submit_batch()
                run.close_step_before()
                batch = stage.wait_for_batch()
                stage.submit_train(batch)
                stage.wait_for_train()
                stage.submit_clear()
            last = step == run.steps
            if last or step % config.validate_every == 0:
                stopping.see(run.validate(step))
                last = last or stopping.exhausted
            if last or step % config.checkpoint_steps == 0:
                run.checkpoint(step)
            if last:
                break
        run.finish(stopped_early=stopping.exhausted)
    return run.summary()


if __name__ == "__main__":
    from flows.cli import main

    raise SystemExit(main(sft, SftSession))
