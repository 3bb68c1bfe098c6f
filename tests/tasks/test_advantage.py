"""Grouping, dynamic sampling and batch statistics, from tags alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.meta import KVBatchMeta
from actors.policy.objectives.advantages.group_relative import group_relative
from configs.loss import LossConfig
from tasks import advantage as stage
from tasks.advantage import by_group, drop_dead_groups, group_metrics, zero_variance


def batch(rewards: list[list[float]]) -> KVBatchMeta:
    rows = [(f"u{g}", i, reward) for g, group in enumerate(rewards) for i, reward in enumerate(group)]
    return KVBatchMeta(
        partition_id="train",
        keys=tuple(f"{uid}-{i}" for uid, i, _ in rows),
        sequence_lengths=(4,) * len(rows),
        tags=tuple(
            {
                "prompt_uid": uid,
                "weight_version": 0,
                "reward": reward,
                "dropped": False,
                "masked": False,
                "response_length": 2 + i,
                "truncated": i == 0,
            }
            for uid, i, reward in rows
        ),
    )


def test_groups_and_statistics() -> None:
    meta = batch([[1.0, 0.0], [0.5, 0.5]])
    assert by_group(meta) == [[0, 1], [2, 3]]
    assert group_metrics(meta) == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": (0.5**2 * 2 / 4) ** 0.5,
            "response_length/mean": 2.5,
            "truncated_fraction": 0.5,
        }
    )


@given(
    alive=st.lists(st.booleans(), min_size=1, max_size=12),
    size=st.integers(2, 5),
    data_parallel=st.sampled_from([1, 2, 4]),
)
def test_dynamic_sampling_keeps_every_live_row_and_divides(alive: list[bool], size: int, data_parallel: int) -> None:
    size *= data_parallel  # the whole batch divides, as the configuration demands
    meta = batch([[float(lives and i == 0) for i in range(size)] for lives in alive])
    groups = by_group(meta)
    dead = [rows for rows, lives in zip(groups, alive, strict=True) if not lives]
    kept = drop_dead_groups(meta, dead, data_parallel)
    assert len(kept) % data_parallel == 0
    live = {meta.keys[row] for rows, lives in zip(groups, alive, strict=True) if lives for row in rows}
    assert live <= set(kept.keys)
    assert len(kept) == len(meta) if not live else len(kept) < len(live) + data_parallel
    assert list(kept.keys) == [key for key in meta.keys if key in set(kept.keys)]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=4), min_size=1, max_size=6), st.booleans())
def test_groups_without_variance_are_those_without_an_advantage(rewards: list[list[float]], normalize: bool) -> None:
    meta = batch(rewards)
    dead = [rows for rows, group in zip(by_group(meta), rewards, strict=True) if not any(group_relative(group, normalize=normalize))]
    assert zero_variance(meta) == dead


def dropped(meta: KVBatchMeta, rows: set[int]) -> KVBatchMeta:
    return meta.model_copy(
        update={"tags": tuple({**tag, "dropped": row in rows, "masked": row in rows} for row, tag in enumerate(meta.tags))}
    )


def test_dropped_rows_leave_their_group_s_mean_and_the_batch_s() -> None:
    meta = dropped(batch([[1.0, 0.0, 9.0], [0.5, 0.5, 7.0], [3.0, 4.0, 5.0]]), {2, 5, 6, 7, 8})
    assert group_metrics(meta)["reward/mean"] == pytest.approx((1.0 + 0.0 + 0.5 + 0.5) / 4)
    assert zero_variance(meta) == [[3, 4, 5], [6, 7, 8]]  # equal but for the dropped one; and all of it dropped
    plane = MemoryPlane()
    plane.register_partition("train", fields=("sample_mask", "advantages"))
    plane.put(meta, {"sample_mask": [torch.tensor(1.0)] * len(meta)})
    values = written_advantages(plane, meta, LossConfig(normalize_advantages="none"))
    assert values == pytest.approx([0.5, -0.5, 0, 0, 0, 0, 0, 0, 0])


def test_a_group_whose_responses_are_all_too_long_has_no_gradient() -> None:
    meta = batch([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    tags = tuple({**tag, "masked": row in (1, 2, 3)} for row, tag in enumerate(meta.tags))
    assert zero_variance(meta.model_copy(update={"tags": tags})) == [[2, 3]]


def test_advantages_over_the_batch() -> None:
    meta = dropped(batch([[1.0, 0.0, 9.0], [0.5, 0.5], [3.0, 5.0]]), {2})
    plane = MemoryPlane()
    plane.register_partition("train", fields=("sample_mask", "advantages"))
    plane.put(meta, {"sample_mask": [torch.tensor(1.0)] * len(meta)})
    values = written_advantages(plane, meta, LossConfig(normalize_advantages="batch"))
    deviation = ((2 * 0.5**2 + 2 * 1.0**2) / 6) ** 0.5  # of six rows: the dropped one does not count
    assert values == pytest.approx([0.5 / deviation, -0.5 / deviation, 0, 0, 0, -1 / deviation, 1 / deviation])


def test_a_batch_of_which_everything_is_dropped_has_no_reward_and_no_gradient() -> None:
    meta = dropped(batch([[1.0, 0.0]]), {0, 1})
    assert group_metrics(meta)["reward/mean"] == 0.0
    assert zero_variance(meta) == [[0, 1]]


def test_advantages_by_a_function_of_ones_own() -> None:
    meta = dropped(batch([[1.0, 0.0, 0.25], [2.0, 2.5]]), {1})
    plane = MemoryPlane()
    plane.register_partition("train", fields=("sample_mask", "advantages"))
    plane.put(meta, {"sample_mask": [torch.tensor(1.0)] * len(meta)})
    loss = LossConfig(advantages="tests.actors.policy.objectives.own:above_the_worst")
    assert written_advantages(plane, meta, loss) == [0.75, 0, 0, 0, 0.5]


def written_advantages(plane: MemoryPlane, meta: KVBatchMeta, loss: LossConfig) -> list[float]:
    """What the stage writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "connect", lambda address, timeout_s: plane)
        result = stage.advantage.fn(None, 1, meta, loss, None, 5.0)
    return [float(value) for value in plane.get(result.meta, ["advantages"])["advantages"]]
