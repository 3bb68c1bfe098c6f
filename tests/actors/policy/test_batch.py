"""From columns to micro-batches: what goes into the model and the loss, against the rows themselves."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.connect import connect
from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.interface import DataPlane
from actors.data_plane.sharding import ShardPlan
from actors.policy.batch import CANDIDATES, MicroBatch, build
from actors.policy.boundaries import DENSE_MULTIPLE, block_diagonal_mask, packed_inputs, rows_as_slots
from actors.policy.fetch import ColumnReader
from configs.policy import ParallelConfig, PolicyConfig
from tests.actors.policy import processes, tiny
from tests.actors.policy.plans import MODES, plain_plan

CPU = torch.device("cpu")
VOCAB = 50


@st.composite
def cases(draw: st.DrawFn) -> tuple[ShardPlan, dict[str, list[torch.Tensor]]]:
    meta, columns = tiny.batch(draw(st.integers(0, 999)), VOCAB, rows=draw(st.integers(1, 7)))
    mode, at_once, align = draw(st.sampled_from(MODES)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 4, 8]))
    (plan,) = plain_plan(meta, mode, at_once=at_once, align=align)
    return plan, columns


def where(plan: ShardPlan, number: int, i: int, length: int) -> tuple[int, slice]:
    """The row of input_ids and the positions there of the micro-batch's i-th sequence."""
    if not plan.packed:
        return i, slice(0, length)
    start = plan.micro_batches[number].starts[i]
    return 0, slice(start, start + length)


@given(cases())
def test_every_token_is_where_the_plan_puts_it_and_the_rest_is_zero(case: tuple[ShardPlan, dict[str, list[torch.Tensor]]]) -> None:
    plan, columns = case
    for number, (part, batch) in enumerate(zip(plan.micro_batches, build(columns, plan, CPU), strict=True)):
        assert batch.input_ids.shape == batch.position_ids.shape == part.shape
        per_token = {"token_mask": batch.token_mask, "sample_mask": batch.sample_mask, **batch.columns}
        assert set(per_token) == {"token_mask", "sample_mask", "generation_logprobs", "advantages"}
        assert {tensor.shape for tensor in per_token.values()} == {(part.sequences, part.longest)}
        assert batch.rows == part.rows
        for i, row in enumerate(part.rows):
            ids = columns["input_ids"][row]
            line, span = where(plan, number, i, len(ids))
            assert torch.equal(batch.input_ids[line, span], ids)
            assert torch.equal(batch.position_ids[line, span], torch.arange(len(ids)))
            batch.input_ids[line, span] = 0
            for name, column in per_token.items():
                assert torch.equal(column[i, : len(ids)], columns[name][row].expand(len(ids)))  # a row's one value is each token's
                column[i, : len(ids)] = 0
        assert not any(tensor.any() for tensor in (batch.input_ids, *per_token.values()))


@given(cases(), st.integers(1, 3))
def test_a_teacher_s_candidates_lie_beside_the_tokens_that_the_model_reads(
    case: tuple[ShardPlan, dict[str, list[torch.Tensor]]], k: int
) -> None:
    plan, columns = case
    lengths = [len(ids) for ids in columns["input_ids"]]
    columns |= {"teacher_ids": [torch.randint(1, VOCAB, (length, k), dtype=torch.int32) for length in lengths]}
    columns |= {"teacher_logprobs": [-1 - torch.rand(length, k) for length in lengths]}
    for number, b in enumerate(build(columns, plan, CPU)):
        for batch, chunked in ((b, False), (rows_as_slots(b), not plan.packed)):
            for name in CANDIDATES:
                found = batch.tensors()[name].clone()
                assert found.shape == (*batch.input_ids.shape, k)
                assert found.dtype == {"teacher_ids": torch.int64, "teacher_logprobs": torch.float32}[name]
                for i, row in enumerate(batch.rows):
                    line, span = where(plan, number, i, lengths[row])
                    span = slice(i * part_length(b), i * part_length(b) + lengths[row]) if chunked else span
                    place = found[0 if chunked else line, span]
                    assert torch.equal(place, columns[name][row].to(found.dtype))
                    place.zero_()
                assert not found.any()
        assert b.with_room(5) is b
        roomy = dataclasses.replace(b, teacher_ids=None, teacher_logprobs=None).with_room(k)
        assert {name: one.shape for name, one in roomy.tensors().items()} == {name: one.shape for name, one in b.tensors().items()}
        assert {name: one.dtype for name, one in roomy.tensors().items()} == {name: one.dtype for name, one in b.tensors().items()}


def part_length(b: MicroBatch) -> int:
    return b.input_ids.shape[1]


@given(cases())
def test_outputs_of_the_model_come_to_their_sequences(case: tuple[ShardPlan, dict[str, list[torch.Tensor]]]) -> None:
    plan, columns = case
    rows: dict[int, torch.Tensor] = {}
    for number, batch in enumerate(build(columns, plan, CPU)):
        size, length = batch.input_ids.shape
        output = torch.rand(2, size, length) + 1
        output[:, :, 0] = 0  # as token_logprobs has it
        output.requires_grad_()
        values = batch.per_sequence(output)
        assert values.shape == (2, *batch.token_mask.shape)
        counted = torch.where(batch.token_mask, values, 0.0)
        counted.sum().backward()
        expected = torch.zeros_like(output)
        for i, (row, count) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            line, span = where(plan, number, i, count)
            assert torch.equal(values[:, i, 1:count], output[:, line, span][:, 1:])
            assert not values[:, i, 0].any()  # a first token has no log-probability
            if plan.packed:
                assert not values[:, i, count:].any()
            expected[:, line, span] = columns["token_mask"][row].float()  # (the prompt is at least two tokens)
        assert torch.equal(output.grad[:, :, 1:], expected[:, :, 1:])  # type: ignore[index]
        rows |= dict(batch.unpad(counted[0]))
    assert sorted(rows) == list(range(len(plan.meta)))
    for row, values in rows.items():
        assert torch.equal(values != 0, columns["token_mask"][row])


@given(st.lists(st.integers(1, 6), max_size=5), st.integers(0, 4), st.integers(0, 2))
def test_a_packed_token_sees_itself_and_what_precedes_it_in_its_slot(slots: list[int], rest: int, spare: int) -> None:
    total = sum(slots) + rest + (not slots)
    starts = [sum(slots[:i]) for i in range(len(slots))] or [0]
    boundaries = torch.tensor(starts + [total] * (1 + spare), dtype=torch.int32)
    hidden = block_diagonal_mask(boundaries, total)
    assert hidden.shape == (1, 1, total, total)
    for query in range(total):
        start = max(s for s in starts if s <= query)
        assert hidden[0, 0, query].logical_not().nonzero()[:, 0].tolist() == list(range(start, query + 1))


@given(cases())
def test_slots_cover_the_row_and_none_is_longer_than_the_longest(case: tuple[ShardPlan, dict[str, list[torch.Tensor]]]) -> None:
    plan, columns = case
    for part, batch in zip(plan.micro_batches, build(columns, plan, CPU), strict=True):
        if not plan.packed:
            assert batch.boundaries is None
            continue
        assert batch.boundaries is not None
        slots = batch.boundaries.tolist()
        assert len(slots) == part.sequences + -(-part.shape[1] // part.longest), "by the shapes alone"
        assert (slots[0], slots[-1]) == (0, part.shape[1])
        assert tuple(slots[: len(part.starts)]) == part.starts
        assert all(0 <= stop - start <= part.longest for start, stop in pairwise(slots))


def test_rows_that_are_not_packed_have_no_mask_of_their_own() -> None:
    assert packed_inputs(None, 16, 16, thd=False) == {"attention_mask": None, "packed_seq_params": None}


@pytest.mark.parametrize("mode", ["padded", "dynamic"])
def test_rows_become_slots_and_outputs_come_to_the_same_sequences(mode: str) -> None:
    meta, columns = tiny.batch(0, VOCAB, rows=5)
    (plan,) = plain_plan(meta, mode)
    for rows in build(columns, plan, CPU):
        slots = rows_as_slots(rows)
        size, length = rows.input_ids.shape
        assert slots.boundaries is not None
        assert slots.boundaries.tolist() == [length * row for row in range(size + 1)]
        assert torch.equal(slots.input_ids.view(size, length), rows.input_ids)
        assert torch.equal(slots.position_ids.view(size, length), rows.position_ids)
        output = torch.rand(2, size, length)
        output[:, :, 0] = 0  # as token_logprobs has it; in one row, only the first
        flat = output.clone()
        flat[:, 1:, 0] = 9
        assert torch.equal(slots.per_sequence(flat.view(2, 1, -1)), rows.per_sequence(output))
        assert rows_as_slots(slots) is slots


def test_rows_of_whole_tiles_stay_dense() -> None:
    meta, columns = tiny.batch(0, VOCAB, rows=4)
    (plan,) = plain_plan(meta, "padded", align=DENSE_MULTIPLE)
    assert all(rows_as_slots(rows) is rows for rows in build(columns, plan, CPU))


def save_thd_inputs(rank: int, boundaries: torch.Tensor, length: int, longest: int, path: Path) -> None:
    inputs = packed_inputs(boundaries, length, longest, thd=True)
    torch.save(inputs | {"packed_seq_params": vars(inputs["packed_seq_params"])}, path)


@pytest.mark.slow
def test_transformer_engine_gets_the_same_boundaries(tmp_path: Path) -> None:
    boundaries = torch.tensor([0, 3, 8, 8], dtype=torch.int32)
    processes.run(save_thd_inputs, (boundaries, 8, 5, tmp_path / "inputs.pt"), 1)  # there Megatron is imported already
    inputs = torch.load(tmp_path / "inputs.pt")
    assert inputs["attention_mask"] is None
    params = inputs["packed_seq_params"]
    assert (params["qkv_format"], params["max_seqlen_q"], params["max_seqlen_kv"]) == ("thd", 5, 5)
    assert torch.equal(params["cu_seqlens_q"], boundaries)
    assert torch.equal(params["cu_seqlens_kv"], boundaries)


def test_columns_of_different_lengths_are_refused() -> None:
    meta, columns = tiny.batch(0, VOCAB, rows=2)
    (plan,) = plain_plan(meta, "padded")
    columns["token_mask"][1] = columns["token_mask"][1][:-1]
    with pytest.raises(ValueError, match=r"'token_mask': a row of \d+ tokens, but its input_ids are \d+"):
        build(columns, plan, CPU)


@pytest.mark.parametrize(("mode", "message"), [("padded", "promised at most 16"), ("packed", "the plan gave it 12")])
def test_rows_longer_than_planned_are_refused(mode: str, message: str) -> None:
    meta, columns = tiny.batch(0, VOCAB, rows=2)
    meta = meta.model_copy(update={"sequence_lengths": (9, 16)})
    (plan,) = plain_plan(meta, mode)
    columns["input_ids"][0] = torch.ones(17, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"17 tokens, but .*{message}"):
        build(columns, plan, CPU)


def worker_batches(plane: DataPlane, partition: str, mode: str, data_parallel: int) -> list[list[MicroBatch]]:
    """What each data-parallel worker trains on."""
    meta, columns = tiny.batch(3, VOCAB, rows=8)
    meta = meta.model_copy(update={"partition_id": partition})
    plane.register_partition(partition, fields=list(columns))
    meta = plane.put(meta, columns)
    config = PolicyConfig(parallel=ParallelConfig(data=data_parallel))
    plans = plain_plan(meta, mode, data_parallel=data_parallel)
    return [build(ColumnReader(plane, config, rank, CPU).read(plan.meta, list(columns)), plan, CPU) for rank, plan in enumerate(plans)]


def assert_same_bytes(one: MicroBatch, other: MicroBatch) -> None:
    assert (one.rows, one.lengths) == (other.rows, other.lengths)
    assert one.tensors().keys() == other.tensors().keys()
    for name, a in one.tensors().items():
        b = other.tensors()[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes(), name


@pytest.fixture(scope="module")
def queue(address: DataPlaneAddress) -> DataPlane:
    return connect(address, timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_workers_train_on_the_same_bytes_from_queue_and_twin(queue: DataPlane, mode: str, data_parallel: int, tmp_path: Path) -> None:
    theirs = worker_batches(MemoryPlane(), tmp_path.name, mode, data_parallel)
    ours = worker_batches(queue, tmp_path.name, mode, data_parallel)
    assert len(ours) == len(theirs) == data_parallel
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert_same_bytes(a, b)
