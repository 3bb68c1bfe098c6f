"""Reading columns inside a replica: by every rank, or by its leader for all. Processes over gloo, no model."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.interface import DataPlaneError
from actors.data_plane.meta import KVBatchMeta
from actors.policy.fetch import ColumnReader, MissingColumnsError
from configs.policy import ParallelConfig, PolicyConfig
from tests.actors.policy import processes

RANKS = 4
LAYOUTS = {
    "TP2xDP2": ParallelConfig(tensor=2, data=2),
    "PP2xDP2": ParallelConfig(pipeline=2, data=2),
    "TP2xPP2": ParallelConfig(tensor=2, pipeline=2),
    "DP4": ParallelConfig(data=4),
}
LEADERS = {"TP2xDP2": (0, 0, 2, 2), "PP2xDP2": (0, 1, 0, 1), "TP2xPP2": (0, 0, 0, 0), "DP4": (0, 1, 2, 3)}
COLUMNS: dict[str, list[torch.Tensor]] = {
    "tokens": [torch.tensor([2**62, -1, 7]), torch.tensor([], dtype=torch.int64), torch.tensor([5])],
    "mask": [torch.tensor([True, False]), torch.tensor([False]), torch.tensor([True] * 5)],
    "scalar": [torch.tensor(0.1), torch.tensor(float("nan")), torch.tensor(-0.0)],
    "half": [torch.tensor([1.5, 3e38], dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.bfloat16)],
    "matrix": [torch.arange(6, dtype=torch.int16).reshape(2, 3), torch.zeros(0, 3, dtype=torch.int16), torch.ones(1, 1, dtype=torch.int16)],
    "nothing": [torch.zeros(0)] * 3,
}
META = KVBatchMeta(partition_id="p", keys=("a", "b", "c"))


def plane(*, written: bool) -> tuple[MemoryPlane, KVBatchMeta]:
    made = MemoryPlane()
    made.register_partition("p", fields=[*COLUMNS, "late"])
    if written:
        made.put(META, COLUMNS)
    return made, META.with_fields(*COLUMNS, "late")


def worker(rank: int, directory: str) -> None:
    """Every scenario in turn; what came of it goes into a file."""
    from megatron.core.parallel_state import RankGenerator

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        leads = LEADERS[name][rank] == rank
        for fetch in ("independent", "leader_broadcast", "auto"):
            config = PolicyConfig(parallel=parallel, fetch=fetch, timeout_s=60)
            source, meta = plane(written=leads or fetch == "independent")  # the others' planes are empty: asking them would fail
            reader = ColumnReader(source, config, rank, torch.device("cpu"))
            results[f"{name}-{fetch}"] = reader.read(meta, list(COLUMNS))
            if fetch == "auto":
                for fields in (["tokens", "late"], ["tokens", "absent"]):
                    try:
                        reader.read(meta, fields)
                    except (DataPlaneError, MissingColumnsError) as error:
                        results[f"{name}-{fields[1]}"] = repr(error)
                results[f"{name}-after"] = reader.read(meta.subset([2, 0]), ["tokens"])
                source.close()
                try:
                    reader.read(meta, ["tokens"])
                except DataPlaneError as error:
                    results[f"{name}-gone"] = repr(error)
    results["megatron"] = {
        (dp, tp, pp, cp): RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp").get_ranks("tp-cp-pp")
        for dp, tp, pp, cp in itertools.product(range(1, 4), repeat=4)
    }
    torch.save(results, Path(directory) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        processes.run(worker, (directory,), RANKS)
        return [torch.load(Path(directory) / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bytes(one.reshape(-1).view(torch.uint8).tolist()) == bytes(
        other.reshape(-1).view(torch.uint8).tolist()
    )


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["independent", "leader_broadcast", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_gets_the_rows_bit_for_bit(results: list[dict[str, Any]], layout: str, fetch: str) -> None:
    for rank in range(RANKS):
        columns = results[rank][f"{layout}-{fetch}"]
        assert list(columns) == list(COLUMNS)
        for name, rows in COLUMNS.items():
            assert len(columns[name]) == len(rows)
            assert all(same_bits(mine, row) for mine, row in zip(columns[name], rows, strict=True)), (rank, name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failure_of_the_leader_is_raised_on_every_rank(results: list[dict[str, Any]], layout: str) -> None:
    for rank, leader in enumerate(LEADERS[layout]):
        late, gone = results[rank][f"{layout}-late"], results[rank][f"{layout}-gone"]
        assert "column 'late' is not written for key 'a'" in late
        assert "this data-plane client is closed" in gone
        own = rank == leader
        assert late.startswith("UnknownFieldError" if own else f'LeaderFetchError("policy worker {leader}, which reads for worker {rank}')
        assert gone.startswith("DataPlaneGoneError" if own else "LeaderFetchError")
        assert own or "failed: DataPlaneGoneError: " in gone
        assert "absent not written yet" in results[rank][f"{layout}-absent"]  # known from the meta, before anyone asks
        assert [row.tolist() for row in results[rank][f"{layout}-after"]["tokens"]] == [[5], [2**62, -1, 7]]  # and it goes on


@pytest.mark.slow
def test_replicas_are_those_of_megatron(results: list[dict[str, Any]]) -> None:
    assert len(results[0]["megatron"]) == 81
    for (data, tensor, pipeline, context), theirs in results[0]["megatron"].items():
        ours = ParallelConfig(data=data, tensor=tensor, pipeline=pipeline, context=context).replicas
        assert sorted(map(sorted, theirs)) == [list(ranks) for ranks in ours]
