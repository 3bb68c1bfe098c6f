"""How long each wait of a run may last. An outer one is longer than the sum of those inside it, so that the innermost error is seen.

    flow waits for a call ─► actor waits for engines, scoring, workers, data plane ─► they wait for what the recipe bounds

Seconds. `generation.timeout_s`, `scoring.batch_timeout_s`, `data_plane.timeout_s` and `policy.timeout_s` are the innermost; everything else
follows from them. tests/configs/test_deadlines.py walks the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

GRACE_S = 10.0  # an outer wait beyond its inner ones
DATA_PLANE_GRACE_S = 15.0  # past all deadlines of a request, which it keeps itself; beyond this the loop's thread must be stuck
SCORING_START_S = 260.0  # a scoring process imports its verifiers, and constructs a user's: actors/environments/scoring/pool.py
LEDGER_CALL_S = 60.0  # for an answer of the ledger, beyond what it was asked to wait
ENGINE_HEALTH_S = 30.0  # for an engine's health, whatever it does: a thread of its own answers, but machines are shared
_WEIGHT_EXPORTS = 2


@dataclass(frozen=True)
class Deadlines:
    """Attributes:
    generation, scoring, data_plane, policy: as configured. files: until those of a checkpoint are written or read, as configured.
    updates: optimizer steps of one train stage. engines: their number.
    warm_up_passes: calls to the workers before step 1: stages times passes.
    """

    generation: float = 0.0
    scoring: float = 0.0
    data_plane: float = 0.0
    policy: float = 0.0
    files: float = 0.0
    updates: int = 1
    engines: int = 1
    warm_up_passes: int = 2

    @property
    def data_plane_call(self) -> float:
        """One put (which may wait as long again for space), get or clear of a client."""
        return 2 * self.data_plane + DATA_PLANE_GRACE_S

    @property
    def engine_call(self) -> float:
        """An engine pool's wait for its engines; each of them bounds its own work by `generation`."""
        return self.generation + GRACE_S

    @property
    def restart(self) -> float:
        """An engine pool's wait for an engine whose process was lost: another one starts, and vLLM in it."""
        return self.engine_call + ENGINE_HEALTH_S + GRACE_S

    @property
    def engine_return(self) -> float:
        """An engine pool's wait while no engine serves: one starts again, and the policy gives it weights after what it is doing."""
        return self.restart + 2 * self.policy_stage

    @property
    def score(self) -> float:
        """The collector's wait for verdicts on what was sent together."""
        return self.scoring + 2 * GRACE_S

    @property
    def rollout(self) -> float:
        """The flow's wait for one batch of a synchronous rollout: responses, verdicts, and two puts."""
        return self.engine_call + self.score + 2 * self.data_plane_call + GRACE_S

    @property
    def sleep(self) -> float:
        """The flow's wait for the collector to let the engines sleep."""
        return self.engine_call + GRACE_S

    @property
    def turn(self) -> float:
        """The collector's wait for the end of its loop's turn: requests to the engines, a put, calls of the ledger."""
        return self.engine_call + self.data_plane_call + 3 * LEDGER_CALL_S + GRACE_S

    @property
    def cut(self) -> float:
        """The flow's wait for the collector's cut (a turn, a get), or its restore (a clear, a put, a call of the ledger); and its files."""
        return self.turn + 2 * self.data_plane_call + LEDGER_CALL_S + self.files + GRACE_S

    @property
    def validation(self) -> float:
        """The flow's wait for a validation set; where engines may die, it begins again with those that are left, or that came back."""
        return self.engines * self.engine_call + self.engine_return + self.score + GRACE_S

    @property
    def workers(self) -> float:
        """The policy group's wait for one call to its workers: read columns, compute, write a column."""
        return self.policy + 2 * self.data_plane_call

    @property
    def train(self) -> float:
        """The policy group's wait for all optimizer steps of a stage."""
        return self.updates * self.workers

    @property
    def refit(self) -> float:
        """The policy group's longest refit: it waits for an engine; the workers export, the engines load; and once more, if they died."""
        once = _WEIGHT_EXPORTS * self.policy + self.engines * (self.policy + self.engine_call)
        return 2 * (self.restart + once + ENGINE_HEALTH_S)

    @property
    def policy_stage(self) -> float:
        """The flow's wait for one stage of the policy group, whichever it is."""
        return max(self.train, self.refit, self.policy) + GRACE_S

    @property
    def warm_up(self) -> float:
        """The flow's wait for the policy's warm-up: a put, the passes, a clear; then the workers give memory back, and are ready."""
        return self.warm_up_passes * self.workers + 2 * self.data_plane_call + 2 * self.policy + GRACE_S

    @property
    def policy_start(self) -> float:
        """The policy group's start: its workers say where they are and meet, rank 0 announces, they build the model; then the warm-up."""
        return 3 * self.policy + self.warm_up

    @property
    def start(self) -> float:
        """The flow's wait for all actors to be ready, each of which bounds its own start."""
        return max(self.engine_call, self.policy_start, SCORING_START_S) + GRACE_S

    @property
    def clear(self) -> float:
        """The flow's wait for a call to the collector that uses the data plane once."""
        return self.data_plane_call + GRACE_S
