"""An outer wait is longer than the sum of the waits inside it, whatever the recipe says; and nobody waits by a number of his own."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from actors.data_plane.transfer_queue import connection, plane
from actors.environments.scoring import pool
from configs.deadlines import ENGINE_HEALTH_S, GRACE_S, LEDGER_CALL_S, SCORING_START_S, Deadlines
from configs.loader import load

ROOT = Path(__file__).parents[2]
SECONDS = st.floats(0.01, 1e6)


@st.composite
def deadlines(draw: st.DrawFn) -> Deadlines:
    counts = (draw(st.integers(1, 64)) for _ in range(3))
    return Deadlines(draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(SECONDS), *counts)


@given(deadlines())
def test_an_outer_wait_is_longer_than_the_sum_of_its_inner_ones(d: Deadlines) -> None:
    inner = {
        # an engine notices its own deadline; the pool that waits for it has a grace
        "engine_call": [d.generation],
        # every local reward and every judge is answered by the end of the batch
        "score": [d.scoring],
        # generation until its deadline, the last verdicts, a put for what came before and one for the rest
        "rollout": [d.generation, d.score, d.data_plane_call, d.data_plane_call],
        "sleep": [d.engine_call],
        # each death of an engine begins the batch anew; the last one's waits until an engine is back
        "validation": [d.engine_call] * d.engines + [d.engine_return, d.score],
        "engine_return": [d.restart, d.policy_stage, d.refit],
        # a put waits for its answer, and as long again for space
        "data_plane_call": [d.data_plane, d.data_plane],
        # columns are read, the work is done, a column is written
        "workers": [d.data_plane_call, d.policy, d.data_plane_call],
        "train": [d.workers] * d.updates,
        "refit": [d.restart, d.policy, d.policy, d.policy + d.generation, ENGINE_HEALTH_S] * 2,
        "restart": [d.generation, ENGINE_HEALTH_S],
        "policy_stage": [max(d.train, d.refit, d.workers)],
        # its batch is put, every pass is one call to the workers, the batch is cleared; memory is given back, the heap frozen
        "warm_up": [d.data_plane_call, *[d.workers] * d.warm_up_passes, d.data_plane_call, d.policy, d.policy],
        # the workers say their nodes, rank 0 announces, all set up
        "policy_start": [d.policy, d.policy, d.policy, d.warm_up],
        "start": [max(d.engine_call, d.policy_start, SCORING_START_S)],
        "clear": [d.data_plane_call],
        # requests, a put; a group that fails, a commit, the cut itself
        "turn": [d.engine_call, d.data_plane_call, *[LEDGER_CALL_S] * 3],
        "cut": [max(d.turn + d.data_plane_call, 2 * d.data_plane_call + LEDGER_CALL_S), d.files],
    }
    for outer, waits in inner.items():
        assert getattr(d, outer) >= sum(waits) * (1 - 1e-12), outer
    for outer in (
        "engine_call",
        "score",
        "rollout",
        "sleep",
        "validation",
        "policy_stage",
        "warm_up",
        "start",
        "clear",
        "turn",
        "cut",
    ):  # those that another process waits for
        assert getattr(d, outer) > sum(inner[outer]) or sum(inner[outer]) > 1e15, outer


def test_the_constants_are_those_of_the_actors() -> None:
    d = Deadlines(generation=5.0, data_plane=7.0)
    assert d.engine_call >= 5.0 + GRACE_S  # EnginePool's own
    assert d.data_plane_call >= 2 * 7.0 + plane.ANSWER_S + 2 * connection._PROBE_EVERY_S  # a put's own, and a last look at the actors
    assert SCORING_START_S >= pool._START_S + pool._READY_S + pool._SEND_S


def test_flows_wait_by_these_deadlines_alone() -> None:
    """The recipe's own bounds are the innermost waits: a flow that waited for an actor by one of them would win against its error."""
    raw = re.compile(r"(generation|policy|scoring)\.(batch_)?timeout_s")
    for path in sorted((ROOT / "flows").glob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert not raw.search(line), f"{path.name}:{number}: {line.strip()}"


def test_somebody_waits_by_each_deadline() -> None:
    """Else the wait that it is meant for goes by another number."""
    sources = [path for room in ("configs", "actors", "tasks", "flows") for path in (ROOT / room).rglob("*.py")]
    own = set(re.findall(r"deadlines\.(\w+)", "\n".join(path.read_text() for path in sources)))
    inner = set(re.findall(r"self\.(\w+)", (ROOT / "configs" / "deadlines.py").read_text()))
    assert {name for name, kind in vars(Deadlines).items() if isinstance(kind, property)} - (own | inner) == set()


def test_a_recipe_s_deadlines_follow_from_its_bounds() -> None:
    config = load(
        "arithmetic-cpu", ["generation.timeout_s=50", "scoring.batch_timeout_s=20", "policy.timeout_s=30", "data_plane.timeout_s=4"]
    )
    d = config.deadlines
    assert (d.generation, d.scoring, d.policy, d.data_plane, d.updates, d.engines) == (50, 20, 30, 4, config.policy.updates_per_step, 1)
    files = load("arithmetic-cpu", ["checkpoint.timeout_s=5"])
    assert files.deadlines.files == 5
    assert files.deadlines.cut > files.deadlines.turn + 5  # generation that is slow to come to the end of its turn says so itself
    graph = load("arithmetic-cpu", ["policy.timeout_s=30", "policy.compiled_graph.timeout_s=90"])
    assert graph.deadlines.policy == 90
    two = load("arithmetic-cpu-async", ["generation.num_engines=2"])
    assert two.deadlines.validation > load("arithmetic-cpu", ["generation.num_engines=2"]).deadlines.validation
