"""Context parallelism without the model: rows cut over two processes, a function of each token and its successor, and whole rows again.

What the cut means to attention is Transformer Engine's and runs on GPUs (tests/gpu/test_layouts.py); packed rows are cut by its kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.policy.batch import MicroBatch
from actors.policy.context import context_part, whole_rows
from actors.policy.device import runtime
from configs.base import ConfigError
from configs.loader import load
from tests.actors.policy import processes

B, T, RANKS = 3, 24, 2


def micro_batch() -> MicroBatch:
    ids = torch.randint(1, 50, (B, T), generator=torch.Generator().manual_seed(0))
    return MicroBatch(
        input_ids=ids,
        position_ids=torch.arange(T).expand(B, T),
        token_mask=torch.ones(B, T, dtype=torch.bool),
        sample_mask=torch.ones(B, T),
        totals=torch.ones(2),
        temperature=torch.ones(1),
        loss_scale=torch.ones(1),
        rows=tuple(range(B)),
        lengths=(T,) * B,
    )


def scores(table: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[2, ...]: two functions of a token and the one that follows it, differentiable in the table."""
    value = table[ids, 0] * table[labels, 1]
    return torch.stack((value, value.sin()))


def weights() -> torch.Tensor:
    return torch.rand(2, B, T, generator=torch.Generator().manual_seed(1))


def rank_of_two(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    group = torch.distributed.group.WORLD
    assert group is not None
    b = micro_batch()
    table = torch.linspace(-1, 1, 100).view(50, 2).requires_grad_()
    with runtime(torch.device("cpu")):
        part = context_part(b, group)
        whole = whole_rows(scores(table, part.input_ids, part.labels), part, group)
        (whole * weights()).sum().backward()
    assert table.grad is not None
    torch.distributed.all_reduce(table.grad)  # as DDP does
    torch.save({"part": part, "whole": whole.detach(), "gradient": table.grad}, Path(directory) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_whole_rows_and_their_gradient_are_those_of_one_process(tmp_path: Path) -> None:
    processes.run(rank_of_two, (str(tmp_path),), RANKS)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    b = micro_batch()
    table = torch.linspace(-1, 1, 100).view(50, 2).requires_grad_()
    expected = torch.nn.functional.pad(scores(table, b.input_ids[:, :-1], b.input_ids[:, 1:]), (1, 0))
    (expected * weights()).sum().backward()
    for result in results:
        assert torch.equal(result["whole"], expected.detach())
        torch.testing.assert_close(result["gradient"], table.grad)
    # Each rank has one chunk from either end, so that causal attention costs all ranks the same.
    assert [result["part"].position_ids[0].tolist() for result in results] == [[*range(6), *range(18, 24)], [*range(6, 18)]]
    assert all(torch.equal(result["part"].input_ids, b.input_ids[:, result["part"].position_ids[0]]) for result in results)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.device=cpu", "device is 'cpu'"),
        ("policy.dtype=float32", "dtype is 'float32'"),
        ("policy.cuda_graph.impl=full_iteration", "cuda_graph.impl is 'full_iteration'"),
        ("policy.batching={token_buckets: [40]}", "40 does not divide by 32"),
    ],
)
def test_what_context_parallelism_cannot_do_is_refused(override: str, message: str) -> None:
    fits = ["policy.parallel.context=2", "policy.dtype=bfloat16"]
    load("arithmetic-cpu", fits)
    with pytest.raises(ConfigError, match=message):
        load("arithmetic-cpu", [*fits, override])
