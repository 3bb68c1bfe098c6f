"""checkpoint, publish-checkpoint: one cut through the run, and its files made a checkpoint while the run goes on. restore: the way back.

checkpoint-N          policy: weights, optimizer, random states ─► host memory        training stands still
                      collector: ledger, prompts, stored rows   ─► files
publish-checkpoint-N  files written ─► digests ─► upload ─► manifest ─► what need not stay goes          beside the next steps
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from prefect import task

from actors import names
from actors.checkpoints.manifest import Manifest
from actors.checkpoints.store import CheckpointStore, Draft
from actors.policy.group import PolicyGroup
from actors.rollout.collector import Collector
from actors.rollout.inputs import remove
from actors.rollout.ledger_actor import LedgerActor
from actors.storage import Content
from configs.checkpoint import CheckpointConfig
from configs.policy import OptimizerConfig
from tasks.call import RETRIED, STAGE, ask

POLICY, JOURNAL = "policy", "journal/"
_GRACE_S = 60.0  # the group has bounds of its own


@dataclass(frozen=True)
class Cut:
    """What a checkpoint task gives back.

    Attributes:
        metrics: checkpoint/standstill_s, the time for which the workers could not train, and so on.
        line: number and hash of the journal's line of the cut. journal: the file in the store with the lines up to it.
    """

    metrics: dict[str, float]
    line: tuple[int, str] | None = None
    journal: dict[str, Content] = field(default_factory=dict)


@task(name="export-hf", task_run_name="export-hf", **RETRIED)
def export_hf(namespace: str, path: str, timeout_s: float) -> str:
    """Write `path` so that transformers and vLLM load it: whole, or as it was before."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        ask(namespace, names.POLICY, timeout_s + _GRACE_S, PolicyGroup.save_hf, str(partial))
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return path


@task(name="publish-hf", task_run_name="publish-{path.name}", **STAGE)
def publish_hf(store: CheckpointStore, path: Path) -> None:
    """As `CheckpointStore.mirror`, under the directory's own name."""
    store.mirror(path, path.name)


@task(name="checkpoint", task_run_name="checkpoint-{step}", **STAGE)
def checkpoint(
    namespace: str, step: int, directory: Path, store: CheckpointStore, journal_since: int | None, timeout_s: float, cut_s: float
) -> Cut:
    """One cut, between two steps. The policy's files are still being written when this returns.

    Args:
        directory: of the draft. store: keeps the journal's lines since the checkpoint before.
        journal_since: number of the journal's first line that is wanted; None: the run has no ledger.
        timeout_s: longest wait for the policy. cut_s: for the collector, `Deadlines.cut`.
    """
    saved = ask(namespace, names.POLICY, timeout_s + _GRACE_S, PolicyGroup.begin_save, str(directory / POLICY), timeout_s)
    metrics = {f"checkpoint/{name}": value for name, value in saved.items()}
    ask(namespace, names.COLLECTOR, cut_s, Collector.cut, str(directory), step)  # of sft: SupervisedCollector.cut
    if journal_since is None:
        return Cut(metrics)
    line = ask(namespace, names.LEDGER, timeout_s, LedgerActor.cut_line)
    if line is None:
        return Cut(metrics)
    segment = ask(namespace, names.LEDGER, timeout_s, LedgerActor.segment, journal_since)
    return Cut(metrics, line, store.keep_file(f"{JOURNAL}{journal_since:09d}-{line[1][:8]}.jsonl", segment))


@task(name="publish-checkpoint", task_run_name="publish-checkpoint-{step}", **STAGE)
def publish(
    namespace: str, step: int, store: CheckpointStore, draft: Draft, manifest: Manifest, rules: CheckpointConfig, inputs: Path
) -> Manifest:
    """Wait for the draft's files, and make it a checkpoint. Returns the whole manifest.

    Args:
        inputs: directory of the steps' inputs; those of which no checkpoint is left go.

    Raises:
        CheckpointError, ConfigError: it could not be written; what was published before stands.
    """
    try:
        ask(namespace, names.POLICY, 2 * rules.timeout_s, PolicyGroup.wait_for_save, rules.timeout_s)
        whole = store.publish(draft, manifest, rules)
    except BaseException:
        store.discard(draft)
        raise
    remove(inputs, after=0, until=store.steps()[0])
    return whole


@task(name="keep-reference", task_run_name="keep-reference", **STAGE)
def keep_reference(namespace: str, directory: Path, timeout_s: float) -> None:
    """The reference weights, as files in the directory."""
    ask(namespace, names.POLICY, timeout_s + _GRACE_S, PolicyGroup.save_reference, str(directory), timeout_s)


@task(name="restore", task_run_name="restore", **STAGE)
def restore(namespace: str, directory: Path, reference: Path | None, optimizer: OptimizerConfig, timeout_s: float, cut_s: float) -> None:
    """The actors go on where the checkpoint in this directory was taken. Waits as of `checkpoint`.

    Raises:
        CheckpointError: a part is damaged, or of another model.
    """
    _load(namespace, directory, reference, optimizer, timeout_s)
    ask(namespace, names.COLLECTOR, cut_s, Collector.restore, str(directory))


@task(name="load-weights", task_run_name="load-weights", **STAGE)
def load_weights(namespace: str, directory: Path, reference: Path | None, optimizer: OptimizerConfig, timeout_s: float) -> None:
    """The policy is that of the checkpoint in this directory; nothing else changes. Arguments as of `restore`."""
    _load(namespace, directory, reference, optimizer, timeout_s)


def reference_of(manifest: Manifest) -> Path | None:
    """The directory of the reference weights below the checkpoints' URL; None: there are none."""
    return next((Path(name).parent for name in manifest.shared if not name.startswith(JOURNAL)), None)


def _load(namespace: str, directory: Path, reference: Path | None, optimizer: OptimizerConfig, timeout_s: float) -> None:
    ask(namespace, names.POLICY, timeout_s + _GRACE_S, PolicyGroup.load_state, str(directory / POLICY), optimizer, timeout_s)
    if reference is not None:
        ask(namespace, names.POLICY, timeout_s + _GRACE_S, PolicyGroup.load_reference, str(reference), timeout_s)
