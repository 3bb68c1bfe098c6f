"""What the rollout stages return: metadata, numbers, and a few responses that a person can read."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from actors.environments import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Outcome, Verdict
from actors.generation.fleet import Change
from actors.rollout.statistics import Estimate, Tally, accuracy, mean_pass_at_k, paired_difference
from configs.validation import OWN_SET, ValidationConfig

SLOWEST = 5  # of a step or a validation are kept
_LONGEST_ERROR = 300  # characters: a reward may raise with the whole response in its message


class SlowSample(BaseModel, frozen=True):
    """A response whose scoring took long, or came to nothing.

    Attributes:
        uid: of the problem. label: the reward that has no value; when all have, the one that took longest.
        seconds: of all rewards. error: why there is no value; empty when scored.
    """

    uid: str
    label: str
    seconds: float
    outcome: Outcome
    error: str = ""

    @classmethod
    def of(cls, uid: str, verdict: Verdict) -> SlowSample:
        """Of the verdict on a response to problem `uid`."""
        guilty = {label: part for label, part in verdict.parts.items() if part.outcome == verdict.outcome}
        label = max(guilty, key=lambda label: guilty[label].seconds, default="")
        error = guilty[label].error if label else ""
        return cls(uid=uid, label=label, seconds=verdict.seconds, outcome=verdict.outcome, error=_cut(error))


def slowest(found: Iterable[SlowSample], count: int) -> tuple[SlowSample, ...]:
    """The `count` slowest, and one example for each (reward, outcome) that is not `scored` and not among them; slowest first."""
    every = list(found)
    chosen = heapq.nlargest(count, every, key=lambda one: one.seconds)  # of equal ones the first
    examples = {(one.label, one.outcome): one for one in chosen}
    for one in every:
        if one.outcome != "scored" and (one.label, one.outcome) not in examples:
            examples[one.label, one.outcome] = one
            chosen.append(one)
    return tuple(sorted(chosen, key=lambda one: -one.seconds))


class Sample(BaseModel, frozen=True):
    """One response as a person reads it.

    Attributes:
        uid, source: of the problem.
        success: whether the response is right; None: the reward that says so has no opinion.
        rewards: raw values by the reward's label; None: no opinion, or no value.
        tokens: generated ones, the end token included. truncated: it had no room to end.
        seconds: that scoring took. label: as of `SlowSample`. error: why it was not scored.
    """

    uid: str
    source: str
    prompt: str
    response: str
    answer: str
    reward: float
    success: bool | None
    outcome: Outcome
    rewards: dict[str, float | None]
    tokens: int
    truncated: bool
    seconds: float
    label: str
    error: str
    weight_version: int

    @classmethod
    def of(cls, problem: Problem, response: Response, verdict: Verdict, weight_version: int) -> Sample:
        """A response to the problem and what it is paid; `weight_version` sampled its first token."""
        return cls(
            uid=problem.uid,
            source=problem.source,
            prompt=problem.question,
            response=response.text,
            answer=problem.answer,
            reward=verdict.reward,
            success=verdict.success,
            outcome=verdict.outcome,
            rewards={label: part.value for label, part in verdict.parts.items()},
            tokens=response.tokens,
            truncated=response.truncated,
            seconds=verdict.seconds,
            label=SlowSample.of(problem.uid, verdict).label,
            error=_cut(verdict.error),
            weight_version=weight_version,
        )

    @property
    def slow(self) -> SlowSample:
        """What is kept of it among the slowest."""
        return SlowSample(uid=self.uid, label=self.label, seconds=self.seconds, outcome=self.outcome, error=self.error)


class Scores(BaseModel, frozen=True):
    """Of the problems of one source. `low`, `high`: around accuracy."""

    problems: int
    reward: float
    accuracy: float
    low: float
    high: float


class Validation(Scores, frozen=True):
    """Answers to the held-out problems: numbers over all of them, and a few to read.

    Attributes:
        reward: mean over all answers. accuracy: mean over problems of the fraction of right answers (mean@k; pass@1).
        low, high: interval around accuracy (`statistics.accuracy`), of the configured confidence.
        pass_at: pass@k by k, without those that no problem has k judged answers for.
        per_source: by Problem.source.
        rates: of each problem in their order, the fraction of right answers; None: no answer was judged.
        truncated, tokens_mean: fraction of answers that had no room to end, and mean length in tokens.
        timed_out, failed, no_opinion: numbers of answers; of the last, those that were scored, but not for success.
        problems, samples_per_prompt, count: `count` is the number of answers.
        samples: the first answers to the first problems. slowest: of all answers.
    """

    confidence: float
    pass_at: dict[int, float]
    per_source: dict[str, Scores]
    rates: tuple[float | None, ...]
    truncated: float
    tokens_mean: float
    timed_out: int
    failed: int
    no_opinion: int
    samples_per_prompt: int
    count: int
    samples: tuple[Sample, ...]
    slowest: tuple[SlowSample, ...] = ()

    @classmethod
    def of(cls, answers: Sequence[Sequence[Sample]], config: ValidationConfig, *, shown: int, slow: int = SLOWEST) -> Validation:
        """Of `Validator.answers`: the answers to each problem, of which there is at least one.

        Args:
            shown: how many problems' first answers are kept. slow: how many of the slowest.
        """
        tallies = [Tally.of([sample.success for sample in group]) for group in answers]
        every = [sample for group in answers for sample in group]
        overall = _scores(answers, config.confidence)
        sources = dict.fromkeys(group[0].source for group in answers)
        return cls(
            **overall.model_dump(),
            confidence=config.confidence,
            pass_at={k: value for k in config.ks if (value := mean_pass_at_k(tallies, k)) is not None},
            per_source={
                source: _scores([group for group in answers if group[0].source == source], config.confidence) for source in sources
            },
            rates=tuple(tally.rate if tally.judged else None for tally in tallies),
            truncated=sum(sample.truncated for sample in every) / len(every),
            tokens_mean=sum(sample.tokens for sample in every) / len(every),
            timed_out=sum(sample.outcome == "timed_out" for sample in every),
            failed=sum(sample.outcome == "failed" for sample in every),
            no_opinion=sum(sample.outcome == "scored" and sample.success is None for sample in every),
            samples_per_prompt=config.samples_per_prompt,
            count=len(every),
            samples=tuple(group[0] for group in answers[:shown]),
            slowest=slowest((sample.slow for sample in every), slow),
        )

    @property
    def estimate(self) -> tuple[float, float, float]:
        """Accuracy, low, high."""
        return self.accuracy, self.low, self.high

    def gain(self, before: Validation) -> Estimate:
        """What changed since `before`, paired by problem.

        Raises:
            ValueError: another number of problems.
        """
        return paired_difference(before.rates, self.rates, self.confidence)

    def metrics(self, name: str = OWN_SET) -> dict[str, float]:
        """Numbers of the set `name`.

        Returns:
            accuracy/NAME, /low, /high and, with several sources, /SOURCE; reward/NAME; pass@K/NAME; with several answers to a problem
            mean@K/NAME; length/NAME in tokens; truncated/NAME, timed_out/NAME, failed/NAME, no_opinion/NAME as fractions of the answers.
        """
        several = self.per_source if len(self.per_source) > 1 else {}
        found = {f"accuracy/{name}/{source}": scores.accuracy for source, scores in several.items()}
        found |= {f"accuracy/{name}": self.accuracy, f"accuracy/{name}/low": self.low, f"accuracy/{name}/high": self.high}
        found |= {f"pass@{k}/{name}": value for k, value in self.pass_at.items()}
        if self.samples_per_prompt > 1:
            found[f"mean@{self.samples_per_prompt}/{name}"] = self.accuracy
        outcomes = {"timed_out": self.timed_out, "failed": self.failed, "no_opinion": self.no_opinion}
        found |= {f"{outcome}/{name}": count / self.count for outcome, count in outcomes.items()}
        return found | {f"reward/{name}": self.reward, f"truncated/{name}": self.truncated, f"length/{name}": self.tokens_mean}


def _scores(answers: Sequence[Sequence[Sample]], confidence: float) -> Scores:
    found = accuracy([Tally.of([sample.success for sample in group]) for group in answers], confidence)
    rewards = [sample.reward for group in answers for sample in group]
    mean = math.fsum(rewards) / len(rewards)
    return Scores(problems=len(answers), reward=mean, accuracy=found.value, low=found.low, high=found.high)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_ERROR else f"{line[: _LONGEST_ERROR - 1]}…"


class StepReport(BaseModel, frozen=True):
    """What the collector's loop did since the last report.

    Attributes:
        samples: of the first groups of these, in the order of drawing. slowest: to score.
        metrics: generated_tokens; seconds in which an engine had a request (time/generate), in which groups were only being scored
            (time/score_and_store), and of neither (idle/generator_s); engines/alive, /restarts (since the start); verdicts and prompts.
    """

    samples: tuple[Sample, ...]
    metrics: dict[str, float]
    slowest: tuple[SlowSample, ...] = ()


class Progress(BaseModel, frozen=True):
    """How the collector's loop stands.

    Attributes:
        groups, tokens: committed, and generated, since it began. seconds: since it began.
        in_flight: groups being generated or scored.
        log: lines for the run's log since the last call. engines: lost, back, or given up since then.
        ended: whether it has stopped. error: why, when nobody asked for it.
    """

    groups: int
    tokens: int
    seconds: float
    in_flight: int
    log: tuple[str, ...]
    ended: bool
    error: str | None
    engines: tuple[Change, ...] = ()
