"""The model that all runs of a table start from: a recipe's warm start and its export, without a step of GRPO.

.venv/bin/python -m benchmarks.learning.start --recipe arithmetic-cpu output_dir=DIR
"""

from __future__ import annotations

import argparse
from typing import Any

from prefect import flow

from configs.loader import load
from flows.grpo import warm_start
from flows.grpo_session import GrpoSession
from flows.service.server import prefect_server
from flows.session import run_name


@flow(name="warm-start", flow_run_name=run_name, validate_parameters=False)
def start(recipe: str = "arithmetic-cpu", overrides: list[str] | None = None) -> dict[str, Any]:
    """Supervised steps, as the recipe says. Returns the summary.

    Args:
        recipe, overrides: as of `flows.grpo`.
    """
    with GrpoSession(load(recipe, overrides or []), recipe) as run:
        warm_start(run)
        run.validate(step=0)
        run.export()
    return run.summary()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic-cpu")
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_intermixed_args()
    with prefect_server():
        start(recipe=options.recipe, overrides=options.overrides)
