"""GRPO (DeepSeekMath, arXiv 2402.03300) as a Prefect flow.

warm start ─► ┌► rollout ─► logprob ─► ref_logprob ─► advantage ─► train ─► refit ─┐ ─► export
              └────────────────────────── step 1 .. N ◄────────────────────────────┘
              validate every few steps

Every few steps the run is saved. When a part of it is lost, it goes on from the newest checkpoint.

Beside the steps one loop answers prompts and fills the ledger. When a version of the weights is announced, a synchronous run begins the
next step's groups; with `mode: async` they are begun ahead, and generation never pauses. A step begins by taking its groups.

python -m flows.grpo --recipe arithmetic-cpu steps=20 model.hidden_size=256
"""

from typing import Any

from configs.loader import load
from flows.grpo_session import GrpoSession, GrpoStep
from flows.served import flow
from flows.session import Steps, run_name, with_steps


@flow(name="grpo", flow_run_name=run_name, validate_parameters=False)
def grpo(recipe: str = "arithmetic-cpu", overrides: list[str] | None = None, steps: Steps = None) -> dict[str, Any]:
    """Train a language model by GRPO. Returns the run's summary.

    Args:
        recipe: a name under configs/recipes, or a path that ends in .yaml.
        overrides: dotted.field=value, each on top of the recipe.
        steps: how many to train; default: what the recipe says.
    """
    config = load(recipe, with_steps(overrides, steps))
    with GrpoSession(config, recipe) as run:
        while not run.finished:
            with run.surviving():
                if not run.resume():
                    begin(run)
                with run.generating():
                    for step in run.steps_left():
                        run.announce_weights()
                        with run.step(step) as stage:
                            improve_policy(run, stage)
                        run.validate_now_and_then(step)
                        run.save_now_and_then(step)
                run.export()
    return run.summary()


def begin(run: GrpoSession) -> None:
    """What comes before the first step."""
    warm_start(run)
    run.begin_grpo()
    run.validate(step=0)


def improve_policy(run: GrpoSession, stage: GrpoStep) -> None:
    """From responses to new weights in the engines."""
    stage.submit_rollout()
    run.close_step_before()
    batch = stage.wait_for_rollout()
    batch = stage.submit_logprob(batch)
    stage.show_samples()
    batch = stage.submit_ref_logprob(batch)
    batch = stage.wait_for_advantage(batch)
    stage.submit_train(batch)
    stage.submit_refit()
    stage.wait_for_train()
    stage.submit_clear()
    stage.wait_for_refit()


def warm_start(run: GrpoSession) -> None:
    """Supervised steps until the model sometimes succeeds; then the engines get the weights."""
    config = run.config.warm_start
    for first in range(1, config.steps + 1, config.check_every):
        run.warm_start(first, min(first + config.check_every - 1, config.steps))
        run.refit()
        if config.stop_at_accuracy is not None and run.check_accuracy(first + config.check_every - 1) >= config.stop_at_accuracy:
            break


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    from flows import cli

    return cli.main(grpo, GrpoSession, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
