"""Every command of the documentation, and the test that runs it, or why none does.

A command is a line in a block that is marked `sh`, of README.md and docs/*.md. test_commands.py sees that each has its line here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT


@dataclass(frozen=True)
class By:
    """A test that runs it. `proof`: what stands in the test's file."""

    test: str
    proof: str


@dataclass(frozen=True)
class Not:
    """Nothing runs it."""

    why: str


# The first pattern that the whole line matches. Of a flow's own commands the settings are read as well, whatever stands here.
COMMANDS: list[tuple[str, By | Not]] = [
    (r"make test", Not("it would run itself")),
    (
        r"make setup REQUIREMENTS=\S+",
        Not("it installs what needs a GPU; requirements/gpu.txt is tried by benchmarks.gpu_check on such a machine"),
    ),
    (r"make (run|sft)( ARGS=.*)?", By("tests/e2e/commands.py", "start_command")),
    (r"make up", By("tests/e2e/conftest.py", "After `make up`")),
    (r"make down", By("tests/e2e/conftest.py", 'machine.up("--down")')),
    (r"make doctor", By("tests/flows/service/test_doctor.py", "table")),
    (r"make doctor ARGS=.*", By("tests/flows/service/test_cluster_doctor.py", "RAY_ADDRESS")),
    (r"python -m flows\.\w+ .*--dry-run.*", By("tests/flows/test_cli.py", "--dry-run")),
    (r"python -m flows\.grpo .*resume=.*", By("tests/e2e/test_resume.py", "resume=")),
    (r"python -m flows\.grpo .*-1gpu.*", Not("it needs a GPU: docs/gpu.md says what was run")),
    (r"python -m flows\.grpo .*async.*", By("tests/e2e/test_async.py", "arithmetic-cpu-async")),
    (r"python -m flows\.grpo .*environment\.path=.*", By("tests/flows/test_other_layouts.py", "GrpoSession.prepare")),
    (r"python -m flows\.grpo .*doubles.*", By("tests/docs/test_tutorial.py", "GrpoSession.prepare")),
    (r"python -m flows\.grpo .*", By("tests/e2e/test_grpo_flow.py", "arithmetic-cpu")),
    (r"python -m flows\.sft .*", By("tests/e2e/test_sft_flow.py", "sft")),
    (r"python -m flows\.retrain", By("tests/e2e/test_retrain_flow.py", "from flows.retrain import retrain")),
    (r"python -m flows\.evaluate .*", By("tests/e2e/test_shards.py", "from flows.evaluate import evaluate")),
    (r"python -m flows\.audit .*", By("tests/flows/test_audit_cli.py", "from flows.audit import main")),
    (r"python -m flows\.fork .*", By("tests/e2e/test_resume.py", "fork")),
    (r"python -m flows\.replay .*", By("tests/flows/test_replay.py", "from flows.replay import")),
    (r"python -m actors\.environments\.export .*", By("tests/flows/test_retrain_cli.py", "from actors.environments.export import main")),
    (r"python -m benchmarks\.memory --refusals", By("tests/actors/models/test_memory_benchmark.py", "refusals")),
    (r"python -m benchmarks\.memory .*", Not("it measures GPUs: docs/gpu.md has the results")),
    (r"python -m benchmarks\.learning.*", By("tests/benchmarks/test_learning.py", "benchmarks.learning")),
    (r"python -m benchmarks\.peers --table .*", By("tests/benchmarks/test_peers.py", "benchmarks.peers")),
    (r"python -m benchmarks\.peers.*|pip install trl==\S+", Not("it trains with TRL on a GPU")),
    (r"grpo-flows new .*s3://.*", Not("its data is in a store that is not there; tests/flows/test_console.py runs it with a file")),
    (r"grpo-flows new .*", By("tests/flows/test_console.py", '"new"')),
    (r"grpo-flows run .*--check", By("tests/flows/test_checks.py", "--check")),
    (r"grpo-flows run .*async", By("tests/e2e/test_async.py", "arithmetic-cpu-async")),
    (r"(env/bin/)?grpo-flows run .*", By("tests/flows/test_wheel.py", '"run", "arithmetic-cpu"')),
    (r"grpo-flows sft .*", By("tests/flows/test_console.py", '"sft"')),
    (r'eval "\$\(grpo-flows completion bash\)"', By("tests/flows/test_console.py", 'subprocess.run(["bash"')),
    (r"grpo-flows completion fish .*", Not("the script is click's own, and fish is not here")),
    (r"make wheel", By("tests/flows/test_wheel.py", "wheel")),
    (
        r"(python3\.12 -m venv env|env/bin/uv pip install) .*",
        Not("it installs everything anew, 7 GB; tests/flows/test_wheel.py installs the wheel alone"),
    ),
    (r"python make_data\.py", By("tests/docs/test_tutorial.py", "make_data")),
    (r"python -c .*registry/current\.json.*", Not("it prints a value of a file whose form tests/tasks/retraining/test_registry.py checks")),
    (r"prefect deployment run \S+ .*--watch.*", By("tests/e2e/conftest.py", '"deployment", "run", DEPLOYMENT, "--watch"')),
    (r"prefect deployment run .*", By("tests/e2e/conftest.py", '"deployment", "run", DEPLOYMENT')),
    (r"prefect --no-prompt deploy --all", By("flows/service/deploying.py", "deploy --all")),
    (
        r"prefect automation create --from-file .*cancel-stalled.*",
        By("tests/e2e/test_monitoring.py", '"automation", "create", "--from-file"'),
    ),
    (r"prefect automation create .*", By("tests/flows/test_deployments_file.py", "resume-crashed.yaml")),
    (r"prefect work-pool create .*kubernetes.*", By("tests/e2e/test_deployments.py", "base-job-template.json")),
    (
        r"prefect (work-pool|flow-run|deployment schedule) .*",
        Not("they are Prefect's own; tests/e2e/test_deployments.py does the same by its client"),
    ),
    (r"prefect worker start .*kubernetes", Not("it needs a Kubernetes cluster")),
    (r"docker .*", Not("there is no container runtime where this project is tested")),
    (r"(.* )?ray start .*", By("tests/chaos/nodes.py", "HEALTH")),
    (r"export \w*AUTH_STRING=.*", By("tests/flows/service/test_password.py", "PREFECT_SERVER_API_AUTH_STRING")),
    (r"export (PREFECT_API_URL|RAY_ADDRESS)=.*", By("tests/e2e/deployed.py", "PREFECT_API_URL")),
    (r"(mkdir|cat) .*", Not("a command of the shell")),
]


@dataclass(frozen=True)
class Command:
    """A line. `text`: without comment and `.venv/bin/`."""

    page: str
    text: str


def pages() -> list[Path]:
    """Of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[Command]:
    """Every one, in order."""
    found = []
    for path in pages():
        for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                text = re.split(r"(^|\s)#", line)[0].strip().replace(".venv/bin/", "")
                if text:
                    found.append(Command(path.name, text))
    return found


def rule(command: Command) -> tuple[str, By | Not] | None:
    """What runs it."""
    return next(((pattern, how) for pattern, how in COMMANDS if re.fullmatch(pattern, command.text)), None)
