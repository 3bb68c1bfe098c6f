"""export, checkpoint: the policy as a Hugging Face directory, at the end and on the way."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from actors import names
from tasks.call import RETRIED, call


@task(name="export-hf", task_run_name="export-hf", **RETRIED)
def export_hf(namespace: str, path: str, timeout_s: float) -> str:
    """Write `path` so that transformers and vLLM load it."""
    call(namespace, names.POLICY, "save_hf", path, timeout_s=timeout_s)
    return path


@task(name="checkpoint", task_run_name="checkpoint-{step}", **RETRIED)
def checkpoint(namespace: str, step: int, directory: str, timeout_s: float) -> str:
    """Write `directory`, which is there as a whole or not at all. Returns it."""
    target = Path(directory)
    partial = target.with_name(f".{target.name}.partial")
    call(namespace, names.POLICY, "save_hf", str(partial), timeout_s=timeout_s)
    partial.replace(target)
    return directory
