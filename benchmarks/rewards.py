"""Rewards per second: in scoring processes, and inline (in this process, unprotected), for exact match and for math-verify.

    isolated   ScoringPool with a process per core: pickled to a process, scored, answered by JSON
    inline     the same reward objects called one after the other

Responses are chains of thought of 100, 1,000 and 8,000 tokens (3.5 characters a token), right and wrong ones in turns; ways take turns.
`value` is exact match with isolation, the slowest of the three lengths. --samples 4096 --lengths 8000 times what docs/rewards.md says of
math-verify; `wall_s` is then the time for all of them.

python -m benchmarks.rewards [--samples N] [--lengths 100 1000 8000] [--rounds N] [--processes N]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.rewards.build import build_rewards
from actors.environments.scoring.pool import ScoringPool
from actors.environments.scoring.zygote import Start
from configs import settings
from configs.environment import EnvironmentConfig
from configs.rewards import ExactReward, MathReward, ScoringConfig

_CHARACTERS_PER_TOKEN = 3.5
REWARDS = (ExactReward(pattern=r"\\boxed\{(.*)\}\.$", timeout_s=60), MathReward(timeout_s=60))
_STEPS = (
    "Let $x = {a}$, so that $2x + {b} = {c}$. ", "We add {a} and {b}, which gives {c}. ", "Hence \\frac{{{a}}}{{{b}}} is not whole.\n",
    "The area is {a} \\times {b} = {c} square metres, and the rest follows. ", "Check: {c} - {b} = {a}, as it should be.\n",
)  # fmt: skip


def sample(number: int, tokens: int) -> tuple[Problem, Response]:
    """A problem and a response of about so many tokens, right when `number` is even."""
    rng = random.Random(number)
    answer = rng.choice(
        [str(rng.randint(1, 9999)), rf"\frac{{{rng.randint(1, 99)}}}{{{rng.randint(2, 99)}}}", rf"{rng.randint(2, 99)}\sqrt{{3}}"]
    )
    words: list[str] = []
    while sum(map(len, words)) < tokens * _CHARACTERS_PER_TOKEN:
        a, b = rng.randint(1, 999), rng.randint(1, 999)
        words.append(rng.choice(_STEPS).format(a=a, b=b, c=a + b))
    said = answer if number % 2 == 0 else f"1 + {answer}"
    text = "".join(words) + rf"So the answer is \boxed{{{said}}}."
    return Problem(f"p:{number}", "?", answer), Response(text, tokens, False)


def measure(score: Callable[[], object], rounds: int) -> float:
    """Median seconds of a round."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        score()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def compare(pool: ScoringPool, label: str, pairs: Sequence[tuple[Problem, Response]], rounds: int) -> dict[str, float]:
    """Rewards per second, isolated and inline, over the same pairs."""
    reward = build_rewards(REWARDS, max_new_tokens=1, environment=None)[label]
    calls = [(label, problem, response) for problem, response in pairs]
    values = [part.value for part in pool.score(calls)]  # golds are parsed here, once
    if values != [reward.score(problem, response) for problem, response in pairs]:
        raise SystemExit(f"{label}: isolated and inline rewards differ")
    isolated = measure(lambda: pool.score(calls), rounds)
    inline = measure(lambda: [reward.score(problem, response) for problem, response in pairs], rounds)
    return {
        "isolated_per_s": round(len(pairs) / isolated, 1),
        "inline_per_s": round(len(pairs) / inline, 1),
        "wall_s": round(isolated, 3),
        "right": values.count(1.0) / len(values),
    }


def main() -> None:
    """Measure and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 8000], help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, help="default: one per core, at most 16")
    options = parser.parse_args()
    config = ScoringConfig(processes=options.processes, batch_timeout_s=600)
    found: dict[str, dict[str, dict[str, float]]] = {reward.label: {} for reward in REWARDS}
    with ScoringPool(Start(tuple(sys.path), REWARDS, EnvironmentConfig(), 1, config)) as pool:
        processes = pool.processes
        for tokens in options.lengths:
            pairs = [sample(number, tokens) for number in range(options.samples)]
            for label in found:
                found[label][str(tokens)] = compare(pool, label, pairs, options.rounds)
                print(f"{label}, {tokens} tokens: {found[label][str(tokens)]}", flush=True)
    value = min(length["isolated_per_s"] for length in found["exact"].values())
    detail = {"samples": options.samples, "processes": processes, "cores": settings.cpu_count(), **found}
    print(
        json.dumps({"name": "rewards", "value": value, "unit": "rewards/s (exact match, isolated, the slowest length)", "detail": detail})
    )


if __name__ == "__main__":
    main()
