"""export, checkpoint: the policy as a Hugging Face directory, at the end and on the way."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from actors import names
from actors.policy.group import PolicyGroup
from tasks.call import RETRIED, ask


@task(name="export-hf", task_run_name="export-hf", **RETRIED)
def export_hf(namespace: str, path: str, timeout_s: float) -> str:
    """Write `path` so that transformers and vLLM load it."""
    ask(namespace, names.POLICY, timeout_s, PolicyGroup.save_hf, path)
    return path


@task(name="checkpoint", task_run_name="checkpoint-{step}", **RETRIED)
def checkpoint(namespace: str, step: int, directory: str, timeout_s: float) -> str:
    """Write `directory`, which is there as a whole or not at all. Returns it."""
    target = Path(directory)
    partial = target.with_name(f".{target.name}.partial")
    ask(namespace, names.POLICY, timeout_s, PolicyGroup.save_hf, str(partial))
    partial.replace(target)
    return directory
