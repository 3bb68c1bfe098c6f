"""What a step says of its updates. (The group itself: test_compiled.)"""

from __future__ import annotations

from actors.policy.group import of_updates

MADE = {"loss": 1.0, "grad_norm": 2.0, "ratio/max": 1.5, "cuda_graph/replays": 3.0, "loss_scale": 8.0, "skipped_steps": 0.0}


def test_updates_that_overflowed_are_counted_and_have_no_gradient_norm() -> None:
    overflowed = {name: value for name, value in MADE.items() if name != "grad_norm"} | {"skipped_steps": 1.0, "loss_scale": 16.0}
    found = of_updates([overflowed, overflowed, MADE | {"grad_norm": 4.0}, MADE], {})
    assert found == MADE | {"grad_norm": 3.0, "cuda_graph/replays": 12.0, "loss_scale": 12.0, "skipped_steps": 2.0, "updates": 4.0}
    assert "grad_norm" not in of_updates([overflowed], {"grad_norm": (1.0, None)})


def test_what_was_beyond_a_limit_is_shown_as_it_was() -> None:
    tripped = MADE | {"grad_norm": 50.0, "guard/grad_norm": 1.0}
    found = of_updates([MADE | {"guard/grad_norm": 0.0}, tripped], {"grad_norm": (10.0, None), "entropy": (None, 0.0)})
    assert (found["grad_norm"], found["loss"], found["guard/grad_norm"], found["updates"]) == (50.0, 1.0, 1.0, 1.0)
