"""What runs, in which order, and what of it is still missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

Side = Literal["ours", "trl"]
Weights = Literal["random", "float32", "bfloat16"]
ENGINES = (1, 3)  # ours; TRL has one in its own process

Triple = tuple[float, float, float]


class Job(BaseModel, frozen=True, extra="forbid"):
    """One process.

    Attributes:
        part: step: seconds of steps at full length, random weights; learning: sums, from SmolLM2's weights.
        size: "prompts x responses x tokens" of a step. steps: that count. turn: which alternation. engines: of vLLM.
        weights: where it starts; float32: as the GGUF file gives them, bfloat16: those rounded.
    """

    part: Literal["step", "learning"]
    side: Side
    size: str
    steps: int
    turn: int = 0
    engines: int = 1
    seed: int = 0
    weights: Weights = "random"

    @property
    def name(self) -> str:
        words = [self.part, self.side, self.size]
        words += [f"e{self.engines}", f"t{self.turn}"] if self.part == "step" else [self.weights, f"s{self.seed}"]
        return "-".join(words)


class Result(BaseModel, frozen=True, extra="forbid"):
    """What a job found: a line of results.jsonl.

    Attributes:
        lease: of which machine (`children.lease`); seconds are compared within one. device: its GPU.
        steps_s: seconds of each step that counts. peak_gib: of the GPU's memory in use, all processes together.
        rewards: mean training reward of each step. before, after: held-out accuracy, greedy, with its 95 % interval: value, low, high.
        rest_s: of the process beside these steps: start, validations, end. settings, versions: what it ran with.
    """

    job: Job
    lease: str
    device: str
    steps_s: tuple[float, ...]
    peak_gib: float = 0.0
    rewards: tuple[float, ...] = ()
    before: Triple | None = None
    after: Triple | None = None
    rest_s: float = 0.0
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}


def step_jobs(sizes: Sequence[str], turns: int, steps: int) -> list[Job]:
    """For each size the two sides in turns, this project's with one engine first; every other turn in the opposite order."""
    found = []
    for size in sizes:
        for turn in range(turns):
            order = [Job(part="step", side="ours", size=size, steps=steps, turn=turn, engines=engines) for engines in ENGINES]
            order.append(Job(part="step", side="trl", size=size, steps=steps, turn=turn))
            found += order if turn % 2 == 0 else order[::-1]
    return found


def learning_jobs(size: str, weights: Sequence[Weights], seeds: Sequence[int], steps: int) -> list[Job]:
    """For each start and seed the two sides, who is first alternating."""
    found = []
    for start in weights:
        for number, seed in enumerate(seeds):
            sides: list[Side] = ["ours", "trl"] if number % 2 == 0 else ["trl", "ours"]
            found += [Job(part="learning", side=side, size=size, steps=steps, seed=seed, weights=start) for side in sides]
    return found


def complete_lease(jobs: Sequence[Job], results: Sequence[Result], size: str) -> str | None:
    """The newest lease in which every step job of this size was done."""
    wanted = {job for job in jobs if job.part == "step" and job.size == size}
    leases = dict.fromkeys(result.lease for result in reversed(results))
    return next((lease for lease in leases if wanted and wanted <= {one.job for one in results if one.lease == lease}), None)


def missing(jobs: Sequence[Job], results: Sequence[Result], lease: str) -> list[Job]:
    """What is still to run, in order: of a size that no lease has all of, what this lease lacks; of the learning runs, what none has."""
    here, anywhere = {one.job for one in results if one.lease == lease}, {one.job for one in results}
    done = {size for size in {job.size for job in jobs} if complete_lease(jobs, results, size)}
    return [job for job in jobs if job not in (anywhere if job.part == "learning" or job.size in done else here)]
