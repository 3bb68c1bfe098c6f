"""The Triton kernels of CUDA's log-probabilities, run by Triton's interpreter on a CPU, against the plain path. (On a GPU: tests/gpu.)

The vocabulary is split over two processes, padded at its end, and longer than a kernel's block.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import WAIT_S

SCRIPT = """
import sys, torch
from actors.policy.logprob import VocabShard, fused_vocab_logprobs, vocab_logprobs

rank, address = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
    torch.manual_seed(0)
    width, total, temperature = 4100, 8191, torch.tensor([0.7])
    logits = (6 * torch.randn(3, 2, 2 * width)).to(dtype)
    logits[..., total:] = 99.0  # padding would win every softmax
    targets, upstream = torch.randint(0, total, (3, 2)), torch.randn(3, 2)
    targets[0, 0], targets[0, 1] = width, width - 1
    whole = logits.float().requires_grad_()
    expected, entropy = vocab_logprobs(whole / temperature, targets, VocabShard(0, 2 * width, total))
    (expected * upstream).sum().backward()
    columns = slice(rank * width, (rank + 1) * width)
    mine = logits[..., columns].detach().clone().requires_grad_()
    shard = VocabShard(rank * width, width, total, torch.distributed.group.WORLD)
    ours, our_entropy = fused_vocab_logprobs(mine * 1, targets, temperature, shard)
    assert not our_entropy.requires_grad
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(our_entropy, entropy, atol=1e-5, rtol=1e-5)
    (ours * upstream).sum().backward(retain_graph=True)
    # The plain path over the same halves, and the entropy's gradient on both.
    pull = torch.randn(3, 2)
    both = logits.detach().float().clone().requires_grad_()
    found, entropy = vocab_logprobs(both / temperature, targets, VocabShard(0, 2 * width, total), entropy_gradient=True)
    (found * upstream + entropy * pull).sum().backward()
    distribution = (logits.detach()[..., :total].float() / temperature).requires_grad_()
    log_p = distribution.log_softmax(-1)
    chosen = log_p.gather(-1, targets[..., None])[..., 0]
    (chosen * upstream - (log_p.exp() * log_p).sum(-1) * pull).sum().backward()
    torch.testing.assert_close(both.grad[..., :total], distribution.grad / temperature, atol=1e-5, rtol=1e-5)
    half = both.detach()[..., columns].requires_grad_()
    found, entropy = vocab_logprobs(half / temperature, targets, shard, entropy_gradient=True)
    (found * upstream + entropy * pull).sum().backward()
    torch.testing.assert_close(half.grad, both.grad[..., columns], atol=1e-5, rtol=1e-5)
    fused = logits[..., columns].detach().clone().requires_grad_()
    found, entropy = fused_vocab_logprobs(fused * 1, targets, temperature, shard, entropy_gradient=True)
    (found * upstream + entropy * pull).sum().backward()
    torch.testing.assert_close(fused.grad.float(), both.grad[..., columns], atol=tolerance, rtol=tolerance)
    assert not fused.grad[..., total - rank * width :].any()
    torch.testing.assert_close(mine.grad.float(), whole.grad[..., columns], atol=tolerance, rtol=tolerance)
    assert not mine.grad[..., total - rank * width :].any()
    # Several targets in a place, the last ones different from each other: the first may be one of them.
    several = torch.cat((targets[..., None], torch.rand(3, 2, total).argsort(-1)[..., :150]), dim=-1)
    several[1, 1, 7] = several[1, 1, 0]
    factor = torch.randn(several.shape)
    plain = logits.detach().float().clone().requires_grad_()
    expected_several, entropy = vocab_logprobs(plain / temperature, several, VocabShard(0, 2 * width, total), entropy_gradient=True)
    ((expected_several * factor).sum() + (entropy * pull).sum()).backward()
    fused = logits[..., columns].detach().clone().requires_grad_()
    found, entropy = fused_vocab_logprobs(fused * 1, several, temperature, shard, entropy_gradient=True)
    torch.testing.assert_close(found, expected_several, atol=1e-5, rtol=1e-5)
    ((found * factor).sum() + (entropy * pull).sum()).backward()
    torch.testing.assert_close(fused.grad.float(), plain.grad[..., columns], atol=5 * tolerance, rtol=tolerance)
    at = several.clamp(columns.start, columns.stop - 1) - columns.start  # rounded once: the bits of the exact gradient
    torch.testing.assert_close(fused.grad.gather(-1, at), plain.grad[..., columns].gather(-1, at).to(dtype), atol=2e-5, rtol=tolerance)
    try:
        ours.sum().backward()
    except RuntimeError as error:
        assert "second backward" in str(error)
    else:
        raise AssertionError("the logits were used twice")
    # One position of two sequences, cut from tensors in which the sequences lie apart: the kernels read rows one after the other.
    last, pull = (tensor.t().contiguous().t()[2:] for tensor in (targets, upstream))
    mine = logits[2:, :, columns].detach().clone().requires_grad_()
    ours, _ = fused_vocab_logprobs(mine * 1, last, temperature, shard)
    torch.testing.assert_close(ours, expected[2:], atol=1e-5, rtol=1e-5)
    ours.backward(pull)
    torch.testing.assert_close(mine.grad.float(), whole.grad[2:, :, columns], atol=tolerance, rtol=tolerance)
"""


def test_the_kernels_equal_the_plain_path_over_a_split_vocabulary(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), f"file://{tmp_path}/rendezvous"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        output, _ = rank.communicate(timeout=WAIT_S)
        assert rank.returncode == 0, output
