"""Sliced log-probabilities against log_softmax. (Over several ranks: test_parity, where 97 tokens are split over two.)"""

import pytest
import torch

from actors.policy import logprob
from actors.policy.logprob import VocabShard, token_logprobs

B, T, H, V = 3, 9, 5, 13


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(T, B, H, requires_grad=True), torch.randn(V, H, requires_grad=True), torch.randint(0, V, (B, T))


def expected(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = ((hidden @ weight.t()).transpose(0, 1) / temperature).log_softmax(-1)
    chosen = distribution.gather(-1, labels[..., None])[..., 0]
    return chosen, -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("slice_elements", [1, 2 * B * V, 3 * B * V, 10**9])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax_with_gradients(slice_elements: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "SLICE_ELEMENTS", slice_elements)
    hidden, weight, labels = tensors()
    shard = VocabShard(start=0, width=V, total=V)
    ours, entropy = token_logprobs(hidden, lambda part: part @ weight.t(), labels, temperature, shard)
    theirs, their_entropy = expected(hidden, weight, labels, temperature)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(entropy, their_entropy)
    assert not entropy.requires_grad
    factor = torch.randn(B, T)
    mine = torch.autograd.grad((ours * factor).sum(), (hidden, weight))
    torch.testing.assert_close(mine, torch.autograd.grad((theirs * factor).sum(), (hidden, weight)))


def test_padding_of_the_vocabulary_has_no_probability() -> None:
    hidden, weight, labels = tensors()
    padded = torch.cat([weight, torch.full((3, H), 50.0)])  # would win every softmax
    shard = VocabShard(start=0, width=V + 3, total=V)
    ours, entropy = token_logprobs(hidden, lambda part: part @ padded.t(), labels, 1.0, shard)
    theirs, their_entropy = expected(hidden, weight, labels, 1.0)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(entropy, their_entropy)


def test_one_slice_of_logits_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "SLICE_ELEMENTS", 2 * B * V)
    hidden, weight, labels = tensors()
    seen = []

    def project(part: torch.Tensor) -> torch.Tensor:
        seen.append(part.shape[0] * B * V)
        return part @ weight.t()

    with torch.no_grad():
        token_logprobs(hidden, project, labels, 1.0, VocabShard(0, V, V))
    assert max(seen) <= 2 * B * V
    assert len(seen) == -(-T // 2)


def test_low_precision_logits_are_taken_to_float32() -> None:
    hidden, weight, labels = tensors()
    ours, _ = token_logprobs(hidden, lambda part: (part @ weight.t()).bfloat16(), labels, 1.0, VocabShard(0, V, V))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected(hidden, weight, labels, 1.0)[0], atol=0.05, rtol=0.05)
