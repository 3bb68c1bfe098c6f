"""What every data plane does: one suite, run over the in-memory twin and over TransferQueue."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.data_plane.interface import (
    AlreadyWrittenError,
    CapacityError,
    ColumnTypeError,
    DataPlane,
    DataPlaneGoneError,
    PartitionConflictError,
    RowCountError,
    UnknownConsumerError,
    UnknownFieldError,
    UnknownKeyError,
    UnknownPartitionError,
)
from actors.data_plane.meta import KVBatchMeta
from tests.actors.data_plane.conftest import Plane, new_partition

DTYPES = (
    torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def batch(partition: str, *keys: str) -> KVBatchMeta:
    return KVBatchMeta(partition_id=partition, keys=keys)


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads included; for bool 0 and 1 only."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def bits(value: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert bits(a) == bits(b)
        else:
            assert a == b


def test_put_get_status_clear(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["ids", "reward"], capacity=8)
    rows, rewards = [torch.arange(n) for n in (3, 0, 5)], [torch.tensor(float(n)) for n in range(3)]
    meta = plane.put(batch(partition, "a", "b", "c"), {"ids": rows, "reward": rewards})

    assert meta.fields == {"ids", "reward"}
    got = plane.get(meta, ["reward", "ids"])
    assert_same(got["ids"], rows)
    assert_same(got["reward"], rewards)
    assert plane.samples(partition) == 3

    plane.clear(meta.slice(0, 2))
    assert plane.samples(partition) == 1
    assert_same(plane.get(meta.slice(2, 3), ["ids"])["ids"], rows[2:])
    with pytest.raises(UnknownKeyError, match="'a'"):
        plane.get(meta, ["ids"])
    plane.clear(meta)
    plane.clear(meta)  # gone already: no error
    assert plane.samples(partition) == 0


def test_keys_are_read_in_any_order(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x"])
    keys = [f"k{n}" for n in range(50)]
    meta = plane.put(batch(partition, *keys), {"x": [torch.full((n % 7,), n) for n in range(50)]})
    order = random.Random(0).sample(range(50), 30)
    assert_same(plane.get(meta.subset(order), ["x"])["x"], [torch.full((n % 7,), n) for n in order])


def test_columns_are_appended_under_the_same_keys(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "y"])
    meta = plane.put(batch(partition, "a", "b"), {"x": [torch.tensor(1), torch.tensor(2)]})
    with pytest.raises(UnknownFieldError, match="'y' is not written for key 'a'"):
        plane.get(meta, ["x", "y"])
    plane.put(meta.subset([1]), {"y": [torch.tensor([2.0])]})
    with pytest.raises(UnknownFieldError, match="'y' is not written for key 'a'"):
        plane.get(meta, ["y"])
    plane.put(meta.subset([0]), {"y": [torch.tensor([1.0, 1.0])]})
    assert_same(plane.get(meta, ["y"])["y"], [torch.tensor([1.0, 1.0]), torch.tensor([2.0])])
    assert plane.samples(partition) == 2


def test_a_written_column_is_kept_unless_overwritten(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x"])
    meta = plane.put(batch(partition, "a"), {"x": [torch.tensor([1, 2])]})
    wider = batch(partition, "new", "a")
    with pytest.raises(AlreadyWrittenError, match="'x' is already written for key 'a'"):
        plane.put(wider, {"x": [torch.tensor([3]), torch.tensor([4])]})
    assert plane.samples(partition) == 1, "a refused put leaves nothing behind"
    with pytest.raises(UnknownKeyError, match="'new'"):
        plane.get(wider, ["x"])
    assert_same(plane.get(meta, ["x"])["x"], [torch.tensor([1, 2])])
    plane.put(wider, {"x": [torch.tensor([3]), torch.tensor([4, 4, 4])]}, overwrite=True)
    assert_same(plane.get(wider, ["x"])["x"], [torch.tensor([3]), torch.tensor([4, 4, 4])])


def test_cleared_keys_can_be_written_again(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "y"])
    meta = batch(partition, "a", "b")
    for value in range(3):
        plane.put(meta, {"x": [torch.tensor(value)] * 2, "y": [torch.full((value,), 1.0)] * 2})
        assert_same(plane.get(meta, ["x"])["x"], [torch.tensor(value)] * 2)
        plane.clear(meta)
    plane.put(meta, {"x": [torch.tensor(9)] * 2})
    with pytest.raises(UnknownFieldError, match="'y'"):
        plane.get(meta, ["y"])


def test_errors_name_what_is_wrong(plane: DataPlane, partition: str) -> None:
    with pytest.raises(UnknownPartitionError, match=partition):
        plane.put(batch(partition, "a"), {"x": [torch.tensor(1)]})
    for call in (lambda: plane.get(batch(partition, "a"), ["x"]), lambda: plane.samples(partition)):
        with pytest.raises(UnknownPartitionError, match=partition):
            call()
    with pytest.raises(UnknownPartitionError, match=partition):
        plane.clear(batch(partition, "a"))

    plane.register_partition(partition, fields=["x", "y"])
    with pytest.raises(UnknownKeyError, match=f"{partition}'.*'a'"):
        plane.get(batch(partition, "a"), ["x"])
    with pytest.raises(UnknownFieldError, match=f"{partition}'.*'z'.*its columns: x, y"):
        plane.put(batch(partition, "a"), {"z": [torch.tensor(1)]})
    with pytest.raises(UnknownFieldError, match=f"{partition}'.*'z'"):
        plane.get(batch(partition, "a"), ["z"])
    with pytest.raises(RowCountError, match=f"{partition}'.*'x' has 2 rows for 1 keys"):
        plane.put(batch(partition, "a"), {"x": [torch.tensor(1)] * 2})
    assert plane.samples(partition) == 0
    plane.put(batch(partition, "a"), {"x": [torch.tensor(1)]})
    with pytest.raises(UnknownKeyError, match=f"{partition}'.*'b'"):
        plane.get(batch(partition, "a", "b"), ["x"])
    with pytest.raises(UnknownFieldError, match=f"{partition}'.*'y' is not written for key 'a'"):
        plane.get(batch(partition, "a"), ["x", "y"])


@pytest.mark.parametrize(
    "rows",
    [
        [torch.tensor(1), torch.tensor(1.0)],
        [torch.tensor(1), "text"],
        [torch.ones(2).to_sparse(), torch.ones(2).to_sparse()],
        [torch.ones(2, device="meta"), torch.ones(2, device="meta")],
        [lambda: None, lambda: None],
    ],
    ids=["two dtypes", "tensor and text", "sparse", "without values", "not picklable"],
)
def test_rows_that_do_not_make_a_column(plane: DataPlane, partition: str, rows: list[Any]) -> None:
    plane.register_partition(partition, fields=["x"])
    with pytest.raises(ColumnTypeError):
        plane.put(batch(partition, "a", "b"), {"x": rows})
    assert plane.samples(partition) == 0


def test_a_columns_type_is_fixed_by_its_first_put(made: Plane, partition: str) -> None:
    made.plane.register_partition(partition, fields=["x"])
    made.plane.put(batch(partition, "a"), {"x": [torch.tensor([1.0])]})
    other = made.with_timeout(5.0)
    for rows in ([torch.tensor([1])], [torch.tensor(1.0)], ["text"], [torch.ones(1, 1)]):
        with pytest.raises(ColumnTypeError, match="vector:float32"):
            other.put(batch(partition, "b"), {"x": rows})
    other.put(batch(partition, "b"), {"x": [torch.tensor([2.0, 3.0])]})
    assert_same(made.plane.get(batch(partition, "b", "a"), ["x"])["x"], [torch.tensor([2.0, 3.0]), torch.tensor([1.0])])


def test_registering_again(made: Plane, partition: str) -> None:
    made.plane.register_partition(partition, fields=["x", "y"], capacity=3)
    made.with_timeout(5.0).register_partition(partition, fields=["y", "x"], capacity=3)
    with pytest.raises(PartitionConflictError, match=partition):
        made.plane.register_partition(partition, fields=["x", "y"], capacity=3, consumers=["train"])
    with pytest.raises(PartitionConflictError, match=partition):
        made.plane.register_partition(partition, fields=["x"], capacity=3)
    with pytest.raises(PartitionConflictError, match=partition):
        made.plane.register_partition(partition, fields=["x", "y"])
    for fields, capacity in ((["x", "x"], None), ([], None), (["x::shape"], None), (["x"], 0)):
        with pytest.raises(ValueError, match=r"partition 'other"):
            made.plane.register_partition("other", fields=fields, capacity=capacity)
    for consumers in (["train", "train"], [""], ["a::b"]):
        with pytest.raises(ValueError, match=r"partition 'other"):
            made.plane.register_partition("other", fields=["x"], consumers=consumers)
    with pytest.raises(UnknownConsumerError, match="registered: none"):
        made.plane.claim(partition, "train", ["x"], 1, 0.0)


def test_empty_batches(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x"])
    meta = plane.put(batch(partition), {"x": []})
    assert meta.fields == {"x"}
    assert plane.get(meta, ["x"]) == {"x": []}
    plane.clear(meta)
    assert plane.samples(partition) == 0


def test_nothing_is_shared_with_the_caller(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "note"])
    rows, notes = [torch.zeros(4), torch.zeros(2, requires_grad=True)], [{"a": [1]}, {"b": [2]}]
    meta = plane.put(batch(partition, "a", "b"), {"x": rows, "note": notes})
    rows[0].fill_(7)
    notes[0]["a"].append(8)
    first = plane.get(meta, ["x", "note"])
    assert_same(first["x"], [torch.zeros(4), torch.zeros(2)])
    assert not first["x"][1].requires_grad
    first["x"][0].fill_(9)
    first["note"][1]["b"].append(9)
    second = plane.get(meta, ["x", "note"])
    assert_same(second["x"], [torch.zeros(4), torch.zeros(2)])
    assert second["note"] == [{"a": [1]}, {"b": [2]}]


def test_a_full_partition_makes_writers_wait(made: Plane, partition: str) -> None:
    made.plane.register_partition(partition, fields=["x", "y"], capacity=3)
    first = made.plane.put(batch(partition, "a", "b"), {"x": [torch.tensor(1)] * 2})
    impatient = made.with_timeout(0.3)
    started = time.monotonic()
    with pytest.raises(CapacityError, match="2 more samples, it holds 2 of 3"):
        impatient.put(batch(partition, "c", "d"), {"x": [torch.tensor(1)] * 2})
    assert 0.25 < time.monotonic() - started < 5
    assert made.plane.samples(partition) == 2, "a refused put leaves nothing behind"
    with pytest.raises(CapacityError, match="4 more samples"):
        made.plane.put(batch(partition, *"efgh"), {"x": [torch.tensor(1)] * 4})  # can never fit: refused at once
    impatient.put(first, {"y": [torch.tensor(1)] * 2})  # no new samples: never waits
    impatient.put(batch(partition, "b", "c"), {"x": [torch.tensor(1)] * 2}, overwrite=True)  # one new: fits

    timer = threading.Timer(0.5, made.plane.clear, (first,))
    timer.start()
    started = time.monotonic()
    made.plane.put(batch(partition, "d", "e"), {"x": [torch.tensor(5)] * 2})
    assert time.monotonic() - started > 0.3
    timer.join()
    assert made.plane.samples(partition) == 3
    assert_same(made.plane.get(batch(partition, "d"), ["x"])["x"], [torch.tensor(5)])


def test_many_writers_never_exceed_the_capacity(made: Plane, partition: str) -> None:
    made.plane.register_partition(partition, fields=["x"], capacity=4)

    def write(name: int) -> None:
        for n in range(4):
            meta = batch(partition, f"{name}-{n}-0", f"{name}-{n}-1")
            made.plane.put(meta, {"x": [torch.tensor(name)] * 2})
            assert_same(made.plane.get(meta, ["x"])["x"], [torch.tensor(name)] * 2)
            made.plane.clear(meta)

    most = 0
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, name) for name in range(4)]
        while not all(writer.done() for writer in writers):
            most = max(most, made.plane.samples(partition))
            time.sleep(0.005)
    for writer in writers:
        writer.result()
    assert most <= 4
    assert made.plane.samples(partition) == 0


def test_a_closed_client_says_so(made: Plane, partition: str) -> None:
    made.plane.register_partition(partition, fields=["x"])
    client = made.with_timeout(5.0)
    client.close()
    client.close()
    with pytest.raises(DataPlaneGoneError, match="closed"):
        client.samples(partition)
    assert made.plane.samples(partition) == 0


VALUES: dict[str, Callable[[torch.dtype], list[torch.Tensor]]] = {
    "ragged with a length of 0": lambda dtype: [random_bits((n,), dtype, n) for n in (3, 0, 17)],
    "equal lengths": lambda dtype: [random_bits((4,), dtype, n) for n in range(3)],
    "all of length 0": lambda dtype: [random_bits((0,), dtype)] * 2,
    "scalars": lambda dtype: [random_bits((), dtype, n) for n in range(3)],
    "one row": lambda dtype: [random_bits((5,), dtype)],
    "one scalar": lambda dtype: [random_bits((), dtype)],
    "pixel values": lambda dtype: [random_bits(shape, dtype) for shape in ((2, 3, 4, 5), (0, 3, 4, 4), (1, 3, 6, 2))],
    "different numbers of dimensions": lambda dtype: [random_bits(shape, dtype) for shape in ((), (2,), (1, 2), (2, 0, 3))],
    "slices of one tensor": lambda dtype: list(random_bits((40,), dtype).split([7, 0, 20, 13])),
    "not contiguous": lambda dtype: [random_bits((4, 6), dtype).t()[::2], random_bits((3, 2), dtype).t()],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_bits_dtype_and_shape_survive(
    plane: DataPlane, partition: str, values: Callable[[torch.dtype], list[torch.Tensor]], dtype: torch.dtype
) -> None:
    rows = values(dtype)
    plane.register_partition(partition, fields=["x"])
    meta = plane.put(batch(partition, *(f"k{n}" for n in range(len(rows)))), {"x": rows})
    assert_same(plane.get(meta, ["x"])["x"], rows)


def test_one_column_of_dense_and_ragged_puts(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "image"])
    rows = [torch.ones(4), torch.ones(4), torch.ones(2), torch.ones(0), torch.ones(9), torch.ones(9)]
    images = [torch.ones(n % 3, n, 2) for n in range(6)]
    metas = []
    for start in range(0, 6, 2):
        meta = batch(partition, f"k{start}", f"k{start + 1}")
        metas.append(plane.put(meta, {"x": rows[start : start + 2], "image": images[start : start + 2]}))
    got = plane.get(KVBatchMeta.concat(metas), ["x", "image"])
    assert_same(got["x"], rows)
    assert_same(got["image"], images)


def test_values_that_are_not_tensors(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["note"])
    values = ["text", "", None, 3, 2.5, [1, [2]], {"a": (1, 2)}, b"\x00bytes", {"tensor": 1}]
    meta = plane.put(batch(partition, *(f"k{n}" for n in range(len(values)))), {"note": values})
    got = plane.get(meta, ["note"])["note"]
    assert got == values
    assert [type(value) for value in got] == [type(value) for value in values]


def test_lazy_conjugates_and_negatives(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["conjugate", "negative", "gradient"])
    number = torch.tensor([1 + 2j, 3 - 4j])
    weight = torch.ones(2, requires_grad=True)
    columns = {"conjugate": [number.conj()], "negative": [number.conj().imag], "gradient": [weight * 2]}
    got = plane.get(plane.put(batch(partition, "a"), columns), list(columns))
    assert_same(got["conjugate"], [torch.tensor([1 - 2j, 3 + 4j])])
    assert_same(got["negative"], [torch.tensor([-2.0, 4.0])])
    assert_same(got["gradient"], [torch.tensor([2.0, 2.0])])
    assert not got["gradient"][0].requires_grad


def test_a_misspelt_column_is_named(made: Plane, partition: str) -> None:
    made.plane.register_partition(partition, fields=["input_ids"])
    with pytest.raises(UnknownFieldError, match=rf"{partition}.*'input_id'; did you mean 'input_ids'"):
        made.plane.put(batch(partition, "a"), {"input_id": [torch.tensor(1)]})


@pytest.mark.parametrize("field", ["tags", "sequence_lengths"])
def test_lengths_and_tags_that_do_not_fit(plane: DataPlane, partition: str, field: str) -> None:
    plane.register_partition(partition, fields=["x"])
    value = {"tags": ({},) * 3, "sequence_lengths": (1, 2, 3)}[field]
    with pytest.raises(RowCountError, match=rf"{partition}.*3 {field} for 2 keys"):
        plane.put(batch(partition, "a", "b").model_copy(update={field: value}), {"x": [torch.tensor(1)] * 2})
    with pytest.raises(ColumnTypeError, match="tags"):
        plane.put(batch(partition, "a").model_copy(update={"tags": ({"f": lambda: None},)}), {"x": [torch.tensor(1)]})
    assert plane.samples(partition) == 0


def test_metrics_count_what_was_done(plane: DataPlane, partition: str) -> None:
    plane.register_partition(partition, fields=["x", "note"], consumers=["train"])
    meta = plane.put(batch(partition, "a", "b"), {"x": [torch.ones(3), torch.ones(5)], "note": ["p", "q"]})
    plane.get(meta, ["x"])
    plane.get(meta.slice(0, 1), ["x"])
    plane.claim(partition, "train", ["x"], 2, 5.0)
    with pytest.raises(UnknownFieldError):
        plane.get(meta, ["z"])
    plane.clear(meta.slice(0, 1))
    seen = plane.metrics()
    expected = {
        "put/count": 1, "put/rows": 2, "put/bytes": 32, "put/errors": 0, "get/count": 2, "get/rows": 3, "get/bytes": 44, "get/errors": 1,
        "claim/count": 1, "claim/rows": 2, "clear/count": 1, "clear/rows": 1, f"occupancy/{partition}": 1,
    }  # fmt: skip
    assert {name: seen[f"data_plane/{name}"] for name in expected} == expected
    assert 0 < seen["data_plane/get/p50_s"] <= seen["data_plane/get/p99_s"] < 60
    assert pickle.loads(pickle.dumps(plane.usage())) == plane.usage()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ragged_column_round_trips(plane: DataPlane, data: st.DataObject) -> None:
    partition = new_partition()
    dims = data.draw(st.integers(0, 3), label="dims")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    shapes = data.draw(st.lists(st.tuples(*[st.integers(0, 5)] * dims), min_size=1, max_size=12), label="shapes")
    rows = [random_bits(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    order = data.draw(st.permutations(range(len(rows))), label="order")
    plane.register_partition(partition, fields=["x"])
    meta = plane.put(batch(partition, *(f"k{n}" for n in range(len(rows)))), {"x": rows})
    assert_same(plane.get(meta.subset(order), ["x"])["x"], [rows[n] for n in order])
    plane.clear(meta)
    assert plane.samples(partition) == 0
