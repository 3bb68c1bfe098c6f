"""Stochastic rounding to bfloat16: on the grid, without a bias, and the same again for the same chances."""

from __future__ import annotations

import math

import torch

from actors.policy.rounding import stochastic


def chances(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**16, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def test_the_mean_over_chances_is_the_value() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 64)
    draws = 20_000
    found = stochastic(values.expand(draws, 64).contiguous(), chances(draws, 64)).double()
    grid = torch.stack([found.amin(0), found.amax(0)])
    assert all(len(column.unique()) <= 2 for column in found.T)  # the two neighbours
    assert (grid[0] <= values).all()
    assert (values <= grid[1]).all()
    step = grid[1] - grid[0]
    assert (step > 0).sum() > 60
    error = (found.mean(0) - values.double()).abs()
    assert (error <= 4.5 * 0.5 * step / math.sqrt(draws)).all()


def test_numbers_of_the_grid_stay_and_others_move_by_less_than_a_step() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    near = values.bfloat16()
    assert torch.equal(stochastic(near.float(), chances(10_000)), near)
    found = stochastic(values, chances(10_000))
    assert ((found.float() - values).abs() < values.abs() / 128).all()
    assert not torch.equal(found, near)
    assert torch.equal(found, stochastic(values, chances(10_000)))
    assert not torch.equal(found, stochastic(values, chances(10_000, seed=1)))


def test_what_is_no_number_stays_so() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    found = stochastic(values, torch.full((4,), 2**16 - 1, dtype=torch.int32))
    assert found[0] == math.inf
    assert found[1] == -math.inf
    assert found[2].isnan()
    assert found[3] == 0
