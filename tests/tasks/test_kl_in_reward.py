"""The KL penalty in the reward, against the formulas written out token by token; REINFORCE++'s advantages; what it needs of a step."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.meta import KVBatchMeta
from actors.policy.objectives.grpo import Grpo
from configs.base import ConfigError
from configs.loader import load
from configs.loss import LossConfig
from tasks import advantage as stage

FIELDS = ("token_mask", "policy_logprobs", "reference_logprobs", "advantages")


@dataclass(frozen=True)
class Token:
    """`log_ratio`: log π_old / π_ref."""

    sampled: bool
    log_policy: float
    log_ratio: float


@dataclass(frozen=True)
class Response:
    group: int
    reward: float
    dropped: bool
    tokens: tuple[Token, ...]
    source: str


@st.composite
def batches(draw: st.DrawFn) -> list[Response]:
    """Ragged; prompts and what an environment says in between are not sampled; some responses are dropped."""
    small = st.integers(-8, 8).map(lambda value: value / 8)
    tokens = st.lists(st.builds(Token, st.booleans(), small.map(lambda value: value - 2), small), min_size=1, max_size=6).map(tuple)
    rewards, sources = st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["", "words"])
    return [
        Response(group, draw(rewards), draw(st.integers(0, 5)) == 0, draw(tokens), draw(sources))
        for group in range(draw(st.integers(1, 4)))
        for _ in range(draw(st.integers(2, 4)))
    ]


def k(estimator: str, log_ratio: float) -> float:
    """Schulman, "Approximating KL divergence": of x = log π / π_ref, with r = π_ref / π."""
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(-log_ratio) - 1 + log_ratio}[estimator]


def penalties(response: Response, loss: LossConfig) -> list[float]:
    coef = 0.5 if response.source == "words" and "words" in loss.sources else loss.kl_coef
    return [coef * k(loss.kl_estimator, token.log_ratio) * token.sampled for token in response.tokens]


def written(batch: list[Response], loss: LossConfig) -> tuple[list[torch.Tensor], dict[str, float]]:
    """What the stage writes, and its metrics."""
    plane = MemoryPlane()
    plane.register_partition("train", fields=FIELDS)
    tags = tuple(
        {"prompt_uid": str(one.group), "weight_version": 0, "reward": one.reward, "dropped": one.dropped, "masked": one.dropped,
         "response_length": 1, "truncated": False, "source": one.source}
        for one in batch
    )  # fmt: skip
    meta = KVBatchMeta(
        partition_id="train", keys=tuple(map(str, range(len(batch)))), sequence_lengths=tuple(len(one.tokens) for one in batch), tags=tags
    )
    columns = {
        "token_mask": [torch.tensor([token.sampled for token in one.tokens]) for one in batch],
        "policy_logprobs": [torch.tensor([token.log_policy for token in one.tokens]) for one in batch],
        "reference_logprobs": [torch.tensor([token.log_policy - token.log_ratio for token in one.tokens]) for one in batch],
    }
    meta = plane.put(meta, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "connect", lambda address, timeout_s: plane)
        result = stage.advantage.fn(None, 1, meta, loss, None, 5.0)
    return plane.get(result.meta, ["advantages"])["advantages"], result.metrics


SOURCES = {"words": {"kl_coef": 0.5}}


@given(batches(), st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([{}, SOURCES]))
def test_each_response_is_paid_its_reward_less_the_sum_of_its_tokens_penalties(
    batch: list[Response], estimator: str, sources: dict[str, dict[str, float]]
) -> None:
    """verl: `token_level_rewards.sum(-1)` of `token_level_scores - beta * kld`; TRL's RLOO: `rewards - beta * kl.sum(-1)`."""
    options = {"kl_in": "reward", "kl_coef": 0.25, "kl_estimator": estimator, "sources": sources}
    loss = LossConfig(**options)
    paid = [one.reward - sum(penalties(one, loss)) for one in batch]
    grpo, metrics = written(batch, loss)
    rloo, _ = written(batch, LossConfig(**options, advantages="rloo", normalize_advantages="none"))
    for row, one in enumerate(batch):
        group = [paid[i] for i, other in enumerate(batch) if other.group == one.group and not other.dropped]
        expected = (0.0, 0.0)
        if not one.dropped and len(group) > 1 and statistics.pstdev(group) > 1e-6:
            centred = paid[row] - statistics.fmean(group)
            expected = centred / statistics.pstdev(group), paid[row] - (sum(group) - paid[row]) / (len(group) - 1)
        assert (float(grpo[row]), float(rloo[row])) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    kept = [one for one in batch if not one.dropped]
    sampled = [token for one in kept for token in one.tokens if token.sampled]
    assert metrics["kl"] == pytest.approx(sum(k(estimator, token.log_ratio) for token in sampled) / max(len(sampled), 1), abs=1e-6)
    assert metrics["reward/kl_penalty"] == pytest.approx(sum(sum(penalties(one, loss)) for one in kept) / max(len(kept), 1), abs=1e-6)


@given(batches(), st.sampled_from([0.0, 0.25]))
def test_reinforce_pp_is_equations_8_to_10(batch: list[Response], coef: float) -> None:
    """A_t = r - β Σ_{i >= t} log(π_old / π_ref), then (A - mean) / std over the tokens of the batch."""
    options = {"kl_in": "reward", "kl_coef": coef, "kl_estimator": "k1"} if coef else {}
    loss = LossConfig(**options, advantages="reinforce", normalize_advantages="batch")
    expected: dict[tuple[int, int], float] = {}
    for row, one in enumerate(batch):
        for t, token in enumerate(one.tokens):
            if token.sampled and not one.dropped:
                expected[row, t] = one.reward - sum(coef * later.log_ratio for later in one.tokens[t:] if later.sampled)
    mean = statistics.fmean(expected.values()) if expected else 0.0
    deviation = statistics.pstdev(expected.values()) if expected else 0.0
    plain, _ = written(batch, loss.model_copy(update={"normalize_advantages": "none"}))
    whitened, _ = written(batch, loss)
    for row, one in enumerate(batch):
        assert plain[row].dtype == whitened[row].dtype == torch.float32
        assert plain[row].shape == whitened[row].shape == (len(one.tokens),)
        for t in range(len(one.tokens)):
            raw = expected.get((row, t))
            assert float(plain[row][t]) == pytest.approx(raw or 0.0, abs=1e-6)
            normal = 0.0 if raw is None or deviation < 1e-6 else (raw - mean) / deviation
            assert float(whitened[row][t]) == pytest.approx(normal, rel=1e-4, abs=1e-5)


def test_a_loss_without_the_penalty_in_the_reward_reads_no_log_probabilities() -> None:
    batch = [Response(0, reward, False, (Token(True, -1.0, 3.0),), "") for reward in (0.0, 1.0)]
    values, metrics = written(batch, LossConfig(kl_coef=0.1))
    assert [float(value) for value in values] == [-1.0, 1.0]
    assert not {"kl", "reward/kl_penalty"} & metrics.keys()


def test_what_a_step_with_the_penalty_in_the_reward_needs() -> None:
    config = load("arithmetic-cpu", ["preset=reinforce-pp", "policy.updates_per_step=1"])
    policy = config.policy
    assert policy.why_no_logprob() is policy.why_no_ref_logprob() is None
    objective = Grpo(policy)
    assert objective.components == ("policy_gradient",)  # and the loss has no other penalty
    assert set(objective.columns) == {"advantages", "generation_logprobs", "policy_logprobs"}
    in_loss = load("arithmetic-cpu", ["policy.updates_per_step=1"]).policy
    assert in_loss.why_no_logprob() is not None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["preset=reinforce-pp", "rollout.dynamic_sampling=true"],
            "have no gradient, and with policy.loss.advantages reinforce they have one",
        ),
        (["policy.loss={kl_in: reward, kl_coef: 0.1}", "guards.kl={above: 1}"], "guards.kl would never trip: it sees the KL in the loss"),
    ],
)
def test_what_does_not_fit_the_run(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load("arithmetic-cpu", overrides)
