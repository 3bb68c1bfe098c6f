"""The names under which a run's actors are found in its Ray namespace."""

from __future__ import annotations

POLICY = "policy"
COLLECTOR = "collector"
LEDGER = "ledger"
ENVIRONMENT = "environment"
FILES = "files"


def engines(count: int, of: str = "") -> list[str]:
    """Names of the engine actors; where several models run, `of` says whose."""
    return [f"{of}-engine-{index}" if of else f"engine-{index}" for index in range(count)]


def workers(count: int) -> list[str]:
    """Names of the policy's workers, by rank."""
    return [f"policy-worker-{rank}" for rank in range(count)]


def namespace(run_id: str) -> str:
    """The Ray namespace of one flow run."""
    return f"grpo-{run_id}"
