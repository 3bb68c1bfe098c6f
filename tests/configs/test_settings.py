"""What a command sets for the libraries beneath it, before it imports them."""

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs import settings
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


def test_of_many_first_runs_at_once_all_have_the_same_token_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    token = tmp_path / ".ray/auth_token"

    def first_run(_: int) -> str:
        settings.make_ray_token()
        return token.read_text()

    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(first_run, range(64)))
    assert len(found) == 1
    assert len(found.pop()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    token.write_text("the user's own")
    settings.make_ray_token()
    assert token.read_text() == "the user's own"


def test_a_token_that_another_first_run_makes_meanwhile_leaves_the_mode_to_ray(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from configs import settings\n"
        "settings.apply_defaults()\n"
        "import ray\n"
        "settings.make_ray_token()\n"  # the other's
        "settings.apply_defaults()\n"
        "from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default\n"
        "from ray._raylet import AuthenticationMode, get_authentication_mode\n"
        "enable_token_auth_by_default()\n"  # as ray.init does for a cluster of its own
        "raise SystemExit(get_authentication_mode() != AuthenticationMode.TOKEN)"
    )
    environment = settings.child_environment(HOME=str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        environment.pop(name, None)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=WAIT_S)
