"""What a command sets for the libraries beneath it, before it imports them."""

import subprocess
import sys

from tests.conftest import ROOT
from tests.patience import WAIT_S


def test_a_call_to_ray_after_its_end_fails_at_once() -> None:
    """By itself Ray would look for another cluster, or start one: a run that was stopped waited for minutes at its end."""
    code = (
        "from configs import settings; settings.apply_defaults(); import ray\n"
        "try: ray.get_actor('policy', namespace='grpo-of-a-run-that-has-ended')\n"
        "except ray.exceptions.RaySystemError: pass\n"
        "raise SystemExit(ray.is_initialized())"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=WAIT_S)
