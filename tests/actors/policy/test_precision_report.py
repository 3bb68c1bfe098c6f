"""The report of benchmarks.precision: rows of both sides in the same order, and the first operation that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from actors.models.weight_table import Qkv
from benchmarks.precision import compare
from benchmarks.precision_hooks import Recorder, _by_group, _by_kind, _tokens
from benchmarks.precision_replay import following, replayed, words


def test_fused_projections_come_in_the_engine_s_order() -> None:
    groups, queries, head = 2, 3, 4
    rows = {name: torch.randn(groups * count * head, 8) for name, count in (("q", queries), ("k", 1), ("v", 1))}
    inputs = torch.randn(5, 8)
    fused = inputs @ Qkv(groups, queries, head).shard(list(rows.values()), 0, 1).T
    torch.testing.assert_close(_by_kind(fused, groups, head), torch.cat([inputs @ weight.T for weight in rows.values()], dim=1))
    assert torch.equal(_by_group(_by_kind(fused, groups, head), groups, head), fused)


@pytest.mark.parametrize("shape", [(6, 1, 8), (6, 1, 2, 4), (6, 2, 4), (6, 8)])
def test_tokens_are_rows_in_every_layout(shape: tuple[int, ...]) -> None:
    values = torch.randn(6, 8)
    assert torch.equal(_tokens(values.view(shape)), values)


def test_calls_one_after_the_other_are_rows_of_one_sequence() -> None:
    recorder, layer = Recorder(), nn.Linear(3, 2)
    layer.register_forward_hook(lambda _, __, out: recorder.add("MLP", 4, out))
    inputs = torch.randn(5, 3)
    whole = torch.cat([layer(part) for part in inputs.split([3, 1, 1])])
    assert torch.equal(recorder.rows()["MLP", 4], whole)


def side(change: str = "", by: float = 0.0) -> dict[str, Any]:
    """Two prompt tokens and three of the response, of which the last goes through no engine."""
    generator = torch.Generator().manual_seed(0)
    operations = {(name, layer): torch.randn(4, 6, generator=generator) for layer in (0, 1) for name in ("norm", "qkv")}
    logits = torch.randn(3, 9, generator=generator)
    logprobs = logits.log_softmax(-1)[range(3), [1, 2, 3]].tolist()
    if change:
        operations[change, 1] = operations[change, 1] * (1 + by)
    return {"prompt": [7, 8], "response": [1, 2, 3], "logprobs": logprobs, "operations": operations | {("head", 0): logits}}


def trainer(one: dict[str, Any]) -> dict[str, Any]:
    """Its rows go on to the end of the sequence; logits of the prompt, and of the padded vocabulary, come along."""
    operations = {key: torch.cat([rows, torch.ones(2, rows.shape[1])]) for key, rows in one["operations"].items() if key[0] != "head"}
    head = torch.cat([torch.zeros(1, 9), one["operations"]["head", 0], torch.ones(2, 9)])
    return {"logprobs": one["logprobs"], "operations": operations | {("head", 0): torch.nn.functional.pad(head, (0, 3))}}


def test_equal_sides_have_no_first_operation() -> None:
    found = compare([side()], [trainer(side())])
    assert (found["tokens"], found["mean"], found["max"], found["first"]) == (3, 0.0, 0.0, None)
    assert list(found["operations"]) == ["norm", "qkv", "head", "sampler"]


def test_the_first_operation_that_differs_is_named_with_its_layer() -> None:
    found = compare([side("qkv", by=0.01)], [trainer(side())])
    assert found["first"] == {"operation": "qkv", "layer": 1}
    assert found["operations"]["qkv"] == {"layers": 2, "first_layer": 0.0, "largest": pytest.approx(0.01, rel=1e-3)}


def record(layers: list[nn.Module], calls: list[torch.Tensor], recorder: Recorder) -> dict[Any, torch.Tensor]:
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=f"layer {number}": recorder.add(name, 0, out))
        for number, layer in enumerate(layers)
    ]
    with torch.no_grad():
        for rows in calls:
            nn.Sequential(*layers)(rows)
    for hook in hooks:
        hook.remove()
    return recorder.rows()


def test_a_side_that_follows_gets_the_other_side_s_inputs_and_is_recorded_as_it_was() -> None:
    """Of three layers only the second is another one: it alone differs, and the third goes on from what the other side had."""
    inputs, layers = torch.randn(5, 4), [nn.Linear(4, 4) for _ in range(3)]
    engine = record(layers, [inputs[:3], inputs[3:4]], Recorder())
    other, recorder = nn.Linear(4, 4), Recorder()
    recorder.clear(follow=engine)
    trainer = record([layers[0], other, layers[2]], [inputs[:, None]], recorder)  # [tokens, 1, width], and one token more
    for name, equal in (("layer 0", True), ("layer 1", False), ("layer 2", True)):
        assert torch.allclose(trainer[name, 0][:4], engine[name, 0], rtol=1e-6) == equal
    torch.testing.assert_close(trainer["layer 1", 0][:4], other(engine["layer 0", 0]).detach())
    torch.testing.assert_close(trainer["layer 1", 0][4], other(trainer["layer 0", 0][4]).detach())


def test_what_is_followed_comes_back_in_the_trainer_s_layout_with_its_padding() -> None:
    recorder, groups, head = Recorder(), 2, 4
    given = torch.arange(3.0 * 40).view(3, 40)
    recorder.clear(follow={("qkv", 0): given, ("head", 0): given})
    orders = [lambda rows, order=order: order(rows, groups, head) for order in (_by_kind, _by_group)]
    fused, logits = torch.zeros(4, 1, 40), torch.full((4, 1, 42), 7.0)
    recorder.add("qkv", 0, fused, *orders)
    recorder.add("head", 0, logits)
    assert torch.equal(_by_kind(fused[:3, 0], groups, head), given)
    assert not fused[3].any()
    assert torch.equal(logits[:3, 0, :40], given)
    assert (logits[3] == 7).all()
    assert (logits[..., 40:] == 7).all()


def test_operations_with_other_bits_are_counted_by_layer() -> None:
    one = side()
    whole, scored = trainer(side("qkv", by=1e-3)), trainer(side())
    scored["logprobs"] = [value + 0.5 * (number == 1) for number, value in enumerate(one["logprobs"])]
    found = replayed([one | {"replay": {"operations": whole["operations"]}}], [{"replay": scored}])
    assert list(found) == ["norm", "qkv", "head", "log-softmax"]
    assert found["norm"]["engine"] == found["norm"]["trainer"] == {"layers": 2, "equal": 2, "largest": 0.0}
    assert found["qkv"]["engine"] == {"layers": 2, "equal": 1, "largest": pytest.approx(1e-3, rel=1e-3)}
    assert words(found["qkv"]["engine"]) == "up to 0.001, equal in 1 of 2"
    assert words(found["qkv"]["trainer"]) == "equal to the bit"
    assert found["log-softmax"] == {"trainer": {"layers": 1, "equal": 0, "largest": pytest.approx(0.5)}}


def test_logits_are_followed_from_the_first_that_was_sampled_from() -> None:
    given = following(side())["head", 0]
    assert given.shape == (4, 9)
    assert torch.equal(given[1:], side()["operations"]["head", 0])
