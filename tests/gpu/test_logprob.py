"""Log-probabilities over the vocabulary on CUDA against the plain path: values, entropies and gradients, in slices and at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from actors.policy import logprob
from actors.policy.logprob import VocabShard, token_logprobs, vocab_logprobs

pytestmark = pytest.mark.gpu
B, T, H = 3, 50, 64


@pytest.fixture(params=[(5003, 4999), (151936, 151936)], ids=["padded-vocabulary", "qwen2-vocabulary"])
def shard(request: pytest.FixtureRequest) -> VocabShard:
    return VocabShard(start=0, width=request.param[0], total=request.param[1])


def tensors(shard: VocabShard, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(T, B, H, device="cuda").to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(shard.width, H, device="cuda")).to(dtype)
    weight[shard.total :] = 9
    return hidden, weight.requires_grad_(), torch.randint(0, shard.total, (B, T), device="cuda")


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Every logit in float32 at once."""
    logits = (hidden @ weight.t()).float() / 0.8
    logprobs, entropies = vocab_logprobs(logits, labels.t(), shard, entropy_gradient=True)
    return logprobs.t(), entropies.t()


@pytest.mark.parametrize("slices", [1, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_equals_the_plain_path_with_gradients(
    shard: VocabShard, dtype: torch.dtype, tolerance: float, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob, "CUDA_KEPT_ELEMENTS", -(-T // slices) * B * shard.width)
    hidden, weight, labels = tensors(shard, dtype)
    project: Callable[[torch.Tensor], torch.Tensor] = lambda part: part @ weight.t()  # noqa: E731
    ours, entropy = token_logprobs(hidden, project, labels, torch.tensor([0.8], device="cuda"), shard, entropy_gradient=True)
    theirs, their_entropy = plain(hidden, weight, labels, shard)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)  # both from the same logits
    torch.testing.assert_close(entropy, their_entropy, atol=1e-4, rtol=1e-4)
    upstream, pull = torch.randn(2, B, T, device="cuda")
    mine = torch.autograd.grad((ours * upstream + entropy * pull).sum(), (hidden, weight))
    expected = torch.autograd.grad((theirs * upstream + their_entropy * pull).sum(), (hidden, weight))
    for found, wanted in zip(mine, expected, strict=True):
        assert (found - wanted).float().norm() <= tolerance * wanted.float().norm()


def test_no_float32_copy_of_the_logits_is_made() -> None:
    shard = VocabShard(start=0, width=151936, total=151936)
    torch.manual_seed(0)
    rows, width = 1024, shard.width
    hidden = torch.randn(rows, 1, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(width, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, width, (1, rows), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, _ = token_logprobs(hidden, lambda part: part @ weight.t(), labels, torch.ones(1, device="cuda"), shard)
    logprobs.sum().backward()
    logits = 2 * rows * width  # bytes in bfloat16
    assert torch.cuda.max_memory_allocated() - before < 1.5 * logits
