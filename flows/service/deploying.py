"""The work pool of `make up`, and all deployments of prefect.yaml in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from configs import settings
from configs.base import ConfigError
from flows.service.parts import PACKAGE, default_home

POOL = "grpo"
_DEPLOYMENTS = Path(__file__).parent / "prefect.yaml"  # in a checkout a link to the one at its top
_ATTEMPTS = 3
_TIMEOUT_S = 900.0  # each of its requests is repeated for a minute while the server is busy
_BUSY = "503 Service Unavailable"  # of a server whose SQLite had another's commit between what a request read and what it writes


def create_pool(client: SyncPrefectClient) -> None:
    """A pool in which one flow run is at work at a time: the deployments share the same GPUs.

    Raises:
        ConfigError: there is one of that name for another kind of worker.
    """
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template, concurrency_limit=1))
        return
    if pool.type != "process":
        raise ConfigError(
            f"the server has a work pool {POOL!r} of type {pool.type}, this command starts process workers: start a {pool.type} "
            "worker where it belongs and deploy with `prefect --no-prompt deploy --all` (docs/deployment.md)"
        )


def deploy_all(client: SyncPrefectClient, api_url: str) -> None:
    """Deploy everything. Schedules that a person turned on or off stay so: deploying would put back what prefect.yaml says.

    Raises:
        ConfigError: Prefect's command fails, or takes too long.
    """
    switched = {key: active for key, (_, _, active) in _schedules(client).items()}
    _prefect_deploy(api_url)
    for key, (deployment, schedule, active) in _schedules(client).items():
        if switched.get(key, active) != active:
            client.update_deployment_schedule(deployment, schedule, active=switched[key])


def _prefect_deploy(api_url: str) -> None:
    """Run the command, again if the server's database was busy: the command repeats a request for a minute, which may not be enough."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            done = subprocess.run(
                [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(_DEPLOYMENTS)],
                cwd=default_home(),
                env=settings.child_environment(PREFECT_API_URL=api_url, PYTHONPATH=settings.python_path(PACKAGE)),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"`prefect --no-prompt deploy --all` was not done within {_TIMEOUT_S:.0f} s") from None
        if not done.returncode:
            return
        output = done.stdout + done.stderr
        if attempt == _ATTEMPTS or _BUSY not in output:
            raise ConfigError(f"`prefect --no-prompt deploy --all` failed:\n{output}")
        print("deploying: the server's database was busy; deploying again")


def _schedules(client: SyncPrefectClient) -> dict[tuple[str, str], tuple[UUID, UUID, bool]]:
    """(deployment, slug) -> deployment id, schedule id, active."""
    return {
        (str(deployment.id), schedule.slug): (deployment.id, schedule.id, schedule.active)
        for deployment in client.read_deployments()
        for schedule in deployment.schedules
        if schedule.slug is not None
    }
