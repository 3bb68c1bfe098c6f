"""What the policy's ranks do together when they send weights; over gloo. Imports no vLLM: its processes are to start quickly."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from actors.refit import ipc
from actors.refit.transport import NotDeliveredError


def one_of_two(rank: int, file: str) -> str:
    """What a rank says when rank 0's engines take a first piece, and no second one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    did: list[str] = []

    def refuse() -> None:
        raise KeyError("no engine is left")

    try:
        for work in (lambda: did.append("delivered"), refuse):
            ipc._together(work, torch.device("cpu"))
    except (KeyError, NotDeliveredError) as error:
        did.append(type(error).__name__)
    torch.distributed.destroy_process_group()
    return " ".join(did)


def test_when_a_piece_cannot_be_delivered_every_rank_ends(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        said = processes.map(one_of_two, (0, 1), [str(tmp_path / "meet")] * 2, timeout=120)
    assert list(said) == ["delivered KeyError", "NotDeliveredError"]
