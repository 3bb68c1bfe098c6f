"""What orchestration (Prefect, Ray calls, data-plane metadata) adds to a synchronous step. About a minute.

A Prefect server, a process worker and a deployment, as a person has them; the worker runs `control_plane_flow`: the `grpo` flow on the
recipe arithmetic-cpu (64 prompts x 8 responses) with actors that compute nothing in the first steps, and a second in all in later ones.
A step is timed from its start to the start of the next one, so nothing between two steps is left out.

  added     median step without compute: all of it is orchestration
  visible   median step with a second of compute, less that second: what did not hide behind it
  machine   cores, CPU time that all processes used for a step without compute (two cores cannot be quicker than half of it), and how much
            of the machine's time its host gave to others meanwhile
"""

from __future__ import annotations

import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs import settings

ROOT = Path(__file__).parent.parent
_POOL, _LEFT_OUT = "control-plane", 3  # steps at the start of each half
_DEADLINE_S = 300.0


@contextmanager
def _worker(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", _POOL, "--type", "process"]
    environment = settings.child_environment(PYTHONPATH=settings.python_path(ROOT), PREFECT_WORKER_QUERY_SECONDS="1")
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as worker:
        try:
            yield worker
        finally:
            worker.terminate()
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:  # it turns SIGTERM into a SIGINT, which a shell's background jobs ignore
                worker.kill()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def deploy_and_run(output: Path) -> Path:
    """A flow run through the worker. Returns its run directory.

    Raises:
        RuntimeError: the run did not complete.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.deployments import run_deployment

    from benchmarks.control_plane_flow import QUICK_STEPS, SLOW_STEPS, control_plane

    steps = QUICK_STEPS + SLOW_STEPS
    overrides = [
        f"steps={steps}",
        f"validate_every={steps}",
        "warm_start.steps=0",
        "warm_start.stop_at_accuracy=null",
        "checkpoint.every_steps=null",  # the stand-in policy has no state
        f"output_dir={output}",
    ]
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=_POOL, type="process"))
        source: Any = control_plane.from_source(source=str(ROOT), entrypoint="benchmarks/control_plane_flow.py:control_plane")
        source.deploy(name="benchmark", work_pool_name=_POOL, build=False, push=False, print_next_steps=False, ignore_warnings=True)
        run: Any = run_deployment(
            "control-plane/benchmark", parameters={"recipe": "arithmetic-cpu", "overrides": overrides}, timeout=0, as_subflow=False
        )
        log = output.with_name("worker.log")
        with _worker(log) as worker:
            deadline = time.monotonic() + _DEADLINE_S
            state: Any = None
            while state is None or not state.is_final():
                if worker.poll() is not None:
                    raise RuntimeError(f"the worker ended with {worker.returncode}; it said:\n{_tail(log)}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the run is still {state.name} after {_DEADLINE_S:.0f} s; the worker said:\n{_tail(log)}")
                time.sleep(0.5)
                state = client.read_flow_run(run.id).state
    if not state.is_completed():
        raise RuntimeError(f"the run ended as {state.name}: {state.message}; the worker said:\n{_tail(log)}")
    return (output / "latest").resolve()


def summary(milliseconds: list[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(milliseconds, n=4)
    return {"median_ms": round(middle, 1), "quartiles_ms": [round(low, 1), round(high, 1)], "steps": len(milliseconds)}


def machine(starts: list[tuple[float, float, float]]) -> dict[str, float]:
    """What the machine gave to the steps between these starts: seconds, of the clock, of CPU used, of CPU lost."""
    seconds, used, lost = (last - first for first, last in zip(starts[0], starts[-1], strict=True))
    cores = settings.cpu_count()
    return {
        "cores": cores,
        "cpu_ms_per_step": round(1e3 * used / (len(starts) - 1), 1),
        "stolen_percent": round(100 * lost / (cores * seconds), 1),
    }


def main() -> None:
    """Measure and print one JSON line."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worker ends too
    with tempfile.TemporaryDirectory() as home:
        # The stubs take no GPU: one on this machine would only choose another transport for weights.
        settings.set_for_process(PREFECT_HOME=f"{home}/prefect", PREFECT_API_URL="", RAY_ADDRESS="", CUDA_VISIBLE_DEVICES="")
        from benchmarks.control_plane_flow import QUICK_STEPS, SHARES, TIMES
        from flows.service.server import prefect_server
        from tasks.reporting.jsonl import read_lines
        from tasks.reporting.metrics import by_step

        with prefect_server():
            directory = deploy_and_run(Path(home) / "runs")
        starts = json.loads((directory / TIMES).read_text())
        rows = by_step(read_lines(directory / "metrics.jsonl"))
    periods = [1e3 * (after - before) for (before, *_), (after, *_) in itertools.pairwise(starts)]
    compute = 1e3 * (sum(SHARES.values()) + SHARES["logprob"])
    quick = periods[_LEFT_OUT : QUICK_STEPS - 1]
    slow = [period - compute for period in periods[QUICK_STEPS + _LEFT_OUT - 1 :]]
    stages = [name for name in rows[1] if name.startswith("time/")]
    medians = {
        half: {name[5:]: round(1e3 * statistics.median(row[name] for row in part), 1) for name in stages}
        for half, part in (("added", rows[1 + _LEFT_OUT : QUICK_STEPS]), ("with_compute", rows[QUICK_STEPS + _LEFT_OUT : -1]))
    }
    detail: dict[str, Any] = {
        "added": summary(quick), "visible_with_1s_compute": summary(slow), "compute_ms": compute, "stages_ms": medians,
        "machine": machine(starts[_LEFT_OUT:QUICK_STEPS]), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps({"name": "control_plane", "value": detail["added"]["median_ms"], "unit": "ms added per step", "detail": detail}))


if __name__ == "__main__":
    main()
