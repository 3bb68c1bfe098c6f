"""export: the trained policy as a Hugging Face directory."""

from __future__ import annotations

from prefect import task

from actors import names
from tasks.call import STAGE, call


@task(name="export-hf", task_run_name="export-hf", **STAGE)
def export_hf(namespace: str, path: str, timeout_s: float) -> str:
    """Write `path` so that transformers and vLLM load it."""
    call(namespace, names.POLICY, "save_hf", path, timeout_s=timeout_s)
    return path
