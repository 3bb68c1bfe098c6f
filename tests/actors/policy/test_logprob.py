"""Sliced log-probabilities against log_softmax. (Over several ranks: test_parity, where 97 tokens are split over two.)"""

import pytest
import torch

from actors.policy import logprob
from actors.policy.logprob import Top, VocabShard, token_logprobs, top_logprobs, vocab_logprobs

B, T, H, V = 3, 9, 5, 13
ONE = torch.ones(1)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(T, B, H, requires_grad=True), torch.randn(V, H, requires_grad=True), torch.randint(0, V, (B, T))


def expected(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = ((hidden @ weight.t()).transpose(0, 1) / temperature).log_softmax(-1)
    chosen = distribution.gather(-1, labels[..., None])[..., 0]
    return chosen, -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("slice_elements", [1, 2 * B * V, 3 * B * V, 10**9])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("reads_entropy", [False, True])
def test_equals_log_softmax_with_gradients(
    slice_elements: int, temperature: float, reads_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob, "SLICE_ELEMENTS", slice_elements)
    hidden, weight, labels = tensors()
    shard = VocabShard(start=0, width=V, total=V)
    ours, entropy = token_logprobs(
        hidden, lambda part: part @ weight.t(), labels, torch.tensor([temperature]), shard, entropy_gradient=reads_entropy
    )
    theirs, their_entropy = expected(hidden, weight, labels, temperature)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(entropy, their_entropy)
    assert entropy.requires_grad == reads_entropy
    factor, pull = torch.randn(B, T), torch.randn(B, T) * reads_entropy
    mine = torch.autograd.grad((ours * factor + entropy * pull).sum(), (hidden, weight))
    torch.testing.assert_close(mine, torch.autograd.grad((theirs * factor + their_entropy * pull).sum(), (hidden, weight)))


def test_the_gradient_of_the_entropy_is_exact_in_double_precision() -> None:
    torch.manual_seed(1)
    logits = (5 * torch.randn(4, V + 3, dtype=torch.float64)).requires_grad_()
    targets, shard = torch.randint(0, V, (4,)), VocabShard(0, V + 3, V)
    assert torch.autograd.gradcheck(lambda x: vocab_logprobs(x, targets, shard, entropy_gradient=True), (logits,))


def test_a_token_without_probability_has_no_gradient_and_is_no_nan() -> None:
    logits = torch.tensor([[0.0, -1e4, 3.0]], requires_grad=True)
    _, entropy = vocab_logprobs(logits, torch.tensor([0]), VocabShard(0, 3, 3), entropy_gradient=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 1] == 0


def test_padding_of_the_vocabulary_has_no_probability() -> None:
    hidden, weight, labels = tensors()
    padded = torch.cat([weight, torch.full((3, H), 50.0)])  # would win every softmax
    shard = VocabShard(start=0, width=V + 3, total=V)
    ours, entropy = token_logprobs(hidden, lambda part: part @ padded.t(), labels, ONE, shard)
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
        token_logprobs(hidden, project, labels, ONE, VocabShard(0, V, V))
    assert max(seen) <= 2 * B * V
    assert len(seen) == -(-T // 2)


def test_low_precision_logits_are_taken_to_float32() -> None:
    hidden, weight, labels = tensors()
    ours, _ = token_logprobs(hidden, lambda part: (part @ weight.t()).bfloat16(), labels, ONE, VocabShard(0, V, V))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected(hidden, weight, labels, 1.0)[0], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("slice_elements", [2 * B * V, 10**9])
def test_several_labels_in_a_place_have_the_gradients_of_all(slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "SLICE_ELEMENTS", slice_elements)
    hidden, weight, labels = tensors()
    several = torch.stack([labels, *torch.rand(B, T, V).argsort(-1)[..., :4].unbind(-1)], dim=-1)  # the label may be among the others
    ours, _ = token_logprobs(hidden, lambda part: part @ weight.t(), several, torch.tensor([0.6]), VocabShard(0, V, V))
    theirs = ((hidden @ weight.t()).transpose(0, 1) / 0.6).log_softmax(-1).gather(-1, several)
    torch.testing.assert_close(ours, theirs)
    factor = torch.randn(B, T, 5)
    mine = torch.autograd.grad((ours * factor).sum(), (hidden, weight))
    torch.testing.assert_close(mine, torch.autograd.grad((theirs * factor).sum(), (hidden, weight)))


@pytest.mark.parametrize("count", [1, 4, 11])
def test_the_most_probable_tokens_are_those_of_a_vocabulary_without_its_padding(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "SLICE_ELEMENTS", 2 * B * V)
    hidden, weight, labels = tensors()
    padded = torch.cat([weight, torch.full((3, H), 50.0)])
    with torch.no_grad():
        project = lambda part: part @ padded.t()  # noqa: E731
        found, entropies, ids = top_logprobs(hidden, project, labels, ONE, VocabShard(0, V + 3, V), Top(count, among=11))
        distribution = (hidden @ weight.t()).transpose(0, 1).log_softmax(-1)
        chosen = distribution[..., :11].topk(count)
        logprobs, expected_entropies = expected(hidden, weight, labels, 1.0)
    assert torch.equal(ids, chosen.indices)
    torch.testing.assert_close(found[..., 1:], chosen.values)
    torch.testing.assert_close((found[..., 0], entropies), (logprobs, expected_entropies))
