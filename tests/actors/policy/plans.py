"""Plans in every layout, made the plainest way: an independent stand-in for plan_batch, with every freedom that a plan has used."""

from __future__ import annotations

from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import MicroBatchPlan, ShardPlan

MODES = ("padded", "dynamic", "packed")


def plain_plan(meta: KVBatchMeta, mode: str, *, data_parallel: int = 1, at_once: int = 2, align: int = 4) -> list[ShardPlan]:
    """Rows dealt in turn, `at_once` of them per micro-batch, and one micro-batch of padding only at the end.

    dynamic: each micro-batch is as long as its longest row. packed: slots are aligned, and there are more of everything than needed.
    """
    lengths = meta.sequence_lengths
    tokens = sum(int(tag["response_length"]) for tag in meta.tags)
    longest, total = _up(max(lengths), align), at_once * _up(max(lengths), align) + align

    def part(rows: tuple[int, ...], lengths: list[int]) -> MicroBatchPlan:
        if mode == "packed":
            starts = tuple(sum(_up(length, align) for length in lengths[:i]) for i in range(len(rows)))
            return MicroBatchPlan(rows=rows, shape=(1, total), starts=starts, sequences=at_once + (len(rows) < 2), longest=longest + 1)
        shape = (at_once, longest) if mode == "padded" else (max(len(rows), 1), _up(max(lengths, default=1), align))
        return MicroBatchPlan(rows=rows, shape=shape, sequences=shape[0], longest=shape[1])

    shards = []
    for rank in range(data_parallel):
        rows = tuple(range(rank, len(meta), data_parallel))
        cuts = [tuple(range(len(rows)))[i : i + at_once] for i in range(0, len(rows), at_once)]
        micro_batches = tuple(part(cut, [lengths[rows[i]] for i in cut]) for cut in [*cuts, ()])
        shards.append(
            ShardPlan(
                meta=meta.subset(rows), micro_batches=micro_batches, packed=mode == "packed",
                global_tokens=tokens, global_sequences=len(meta),
            )
        )  # fmt: skip
    return shards


def _up(length: int, align: int) -> int:
    return -(-length // align) * align
