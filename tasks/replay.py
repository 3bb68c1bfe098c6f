"""put-inputs, compare: a step's rows into the data plane as they were, and what its stages made of them beside what was kept.

inputs/step-N ── put-inputs ──► data plane ◄── the step's own stages: logprob, ref-logprob, advantage, train
       └───────────────────────── compare ◄──┘
"""

from __future__ import annotations

from pathlib import Path

from prefect import task
from transformers import AutoTokenizer

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.meta import KVBatchMeta
from actors.rollout.assemble import ROLLOUT_FIELDS, TRAIN_FIELDS
from actors.rollout.inputs import StepInputs, path_of
from tasks.call import STAGE
from tasks.reporting.replay import Bounds, Column, Rows, compare_columns


@task(name="put-inputs", task_run_name="put-inputs-{step}", **STAGE)
def put_inputs(address: DataPlaneAddress, step: int, meta: KVBatchMeta, directory: Path, timeout_s: float) -> None:
    """Put the rows of a step into the data plane, in their order.

    Args:
        meta: its rows; `fields`: the columns to put. directory: of the steps' inputs.

    Raises:
        CheckpointError: the file is damaged. DataPlaneError.
    """
    columns = StepInputs.read(path_of(directory, step)).columns(directory)
    plane = connect(address, timeout_s=timeout_s)
    try:
        plane.register_partition(meta.partition_id, fields=TRAIN_FIELDS)
        plane.put(meta, {name: columns[name] for name in sorted(meta.fields)})
    finally:
        plane.close()


def clear_inputs(address: DataPlaneAddress, meta: KVBatchMeta, timeout_s: float) -> None:
    """The rows leave the data plane."""
    plane = connect(address, timeout_s=timeout_s)
    try:
        plane.clear(meta)
    finally:
        plane.close()


@task(name="compare", task_run_name="compare-{step}", **STAGE)
def compare_step(
    address: DataPlaneAddress, step: int, meta: KVBatchMeta, directory: Path, bounds: Bounds, model_path: str, timeout_s: float
) -> tuple[Column, ...]:
    """The columns of a step that was made again.

    Args:
        meta: its rows; `fields`: what is in the data plane. directory: of the steps' inputs. model_path: whose tokenizer names tokens.

    Raises:
        CheckpointError: the file is damaged. DataPlaneError.
    """
    inputs = StepInputs.read(path_of(directory, step))
    kept = inputs.columns(directory)
    plane = connect(address, timeout_s=timeout_s)
    try:
        again = plane.get(meta, sorted(meta.fields.difference(ROLLOUT_FIELDS)))
    finally:
        plane.close()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = Rows(inputs.meta, kept["input_ids"], lambda token: str(tokenizer.decode([token])))
    return compare_columns(rows, kept, again, inputs.weight_version, bounds)
