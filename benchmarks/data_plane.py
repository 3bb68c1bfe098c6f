"""Throughput of put and get: this client, raw TransferQueue, and the Ray object store, in one run.

Cases: 64, 512 and 4,096 samples x 2,048 tokens x 5 columns (int64 ids, a bool mask, three float32 columns: 43 kB a sample),
and 512 samples of 1 to 4,095 tokens, which is how rollouts look. All three get the same values:

    client   plane.put(meta, rows) / plane.get(meta, fields)          a list of rows per column, in and out; lengths and tags kept
    raw      kv_batch_put(keys, partition, fields, tags) / kv_batch_get, on a queue of its own with as many storage units.
             Its TensorDict is made before the clock starts, and what it returns is not taken apart into rows: its best case.
             Equal lengths are dense tensors, others jagged ones, as its documentation has it.
    ray      ray.put(rows) / ray.get(reference)

One driver process does everything; both queues' processes get one torch thread, which is what TransferQueue asks for on a small
machine. Each repetition runs the three in a random order and clears; the first is dropped. A ratio client / raw is the median of
the repetitions' own ratios, so that slow changes of the machine's load cancel out; `value` is the smallest over cases and
directions. MB/s are medians; `spread` is (p75 - p25) / median of a series' seconds: the machine's noise. Target: at least 0.95.
A machine that takes long to start the queues gets the fewest repetitions, and may pass the 60 s by that.

    .venv/bin/python -m benchmarks.data_plane [--units 1] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from configs import settings

TOKENS = 2048
CASES = {"64": (64, False), "512": (512, False), "512 ragged": (512, True), "4096": (4096, False)}
FIELDS = ("input_ids", "token_mask", "generation_logprobs", "policy_logprobs", "reference_logprobs")
REPETITIONS = {64: (15, 40), 512: (7, 15), 4096: (5, 7)}  # at least, at most
_ENVIRONMENT = {"TQ_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}


class Clock:
    """Seconds of named calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """What the call returns."""
        started = time.perf_counter()
        result = call()
        self.seconds[name].append(time.perf_counter() - started)
        return result


class Case:
    """One batch in the three forms in which it is written."""

    def __init__(self, samples: int, ragged: bool) -> None:
        import torch
        from tensordict import TensorDict

        from actors.data_plane.meta import KVBatchMeta

        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 2 * TOKENS, (samples,), generator=generator).tolist() if ragged else [TOKENS] * samples
        self.keys = [f"sample-{row}" for row in range(samples)]
        self.tags = [{"reward": 0.5, "prompt_uid": f"prompt-{row // 8}", "weight_version": 3} for row in range(samples)]
        self.rows = {
            "input_ids": [torch.randint(0, 150_000, (n,), generator=generator) for n in lengths],
            "token_mask": [torch.rand(n, generator=generator) < 0.5 for n in lengths],
            **{name: [torch.randn(n, generator=generator) for n in lengths] for name in FIELDS[2:]},
        }
        self.meta = KVBatchMeta(partition_id="p", keys=tuple(self.keys), sequence_lengths=tuple(lengths), tags=tuple(self.tags))
        whole = (lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)) if ragged else torch.stack
        self.tensors = TensorDict({name: whole(rows) for name, rows in self.rows.items()}, batch_size=[samples])
        self.bytes = sum(row.nbytes for rows in self.rows.values() for row in rows)

    def check(self, columns: dict[str, Sequence[Any]]) -> None:
        """Refuse to measure something that does not return what was written."""
        import torch

        for name, rows in self.rows.items():
            for got, written in zip(columns[name], rows, strict=True):
                if got.dtype != written.dtype or not torch.equal(got, written):
                    raise RuntimeError(f"column {name!r} came back changed")


def measure(case: Case, plane: Any, until: float) -> dict[str, list[float]]:
    """Seconds by "client put", "raw get", ...; repetitions end at `until` (time.monotonic), within their bounds."""
    import ray
    import transfer_queue as tq

    clock, order = Clock(), random.Random(0)

    def client() -> dict[str, Any]:
        clock.time("client put", lambda: plane.put(case.meta, case.rows))
        columns = clock.time("client get", lambda: plane.get(case.meta, FIELDS))
        plane.clear(case.meta)
        return dict(columns)

    def raw() -> dict[str, Any]:
        clock.time("raw put", lambda: tq.kv_batch_put(keys=case.keys, partition_id="p", fields=case.tensors, tags=case.tags))
        data = clock.time("raw get", lambda: tq.kv_batch_get(keys=case.keys, partition_id="p", select_fields=list(FIELDS)))
        tq.kv_clear(keys=case.keys, partition_id="p")
        return {name: data[name].unbind() for name in FIELDS}

    def store() -> dict[str, Any]:
        reference = clock.time("ray put", lambda: ray.put(case.rows))
        return dict(clock.time("ray get", lambda: ray.get(reference)))

    sides = [client, raw, store]
    for side in sides:
        case.check(side())
    clock.seconds.clear()
    least, most = REPETITIONS[len(case.keys)]
    for done in range(most):
        if done >= least and time.monotonic() > until:
            break
        for side in order.sample(sides, len(sides)):
            side()
    return dict(clock.seconds)


def _summary(size: int, seconds: list[float]) -> dict[str, float]:
    low, _, high = quantiles(seconds, n=4)
    return {
        "MB/s": round(size / 1e6 / median(seconds), 1),
        "spread": round((high - low) / median(seconds), 3),
        "repetitions": len(seconds),
    }


def start(units: int) -> tuple[Any, Callable[[], None]]:
    """Ray, both queues, and a client of ours. Returns the client and what ends it all."""
    settings.set_for_process(**_ENVIRONMENT)  # read when transfer_queue is imported
    import ray
    import torch
    import transfer_queue as tq

    from actors.data_plane import transfer_queue as queue
    from actors.data_plane.connect import connect
    from configs.run import DataPlaneConfig

    torch.set_num_threads(1)
    path = settings.python_path(Path(__file__).parent.parent)
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=768 * 2**20,
        _node_ip_address="127.0.0.1", runtime_env={"env_vars": {"PYTHONPATH": path, **_ENVIRONMENT}},
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        ours = pool.submit(queue.start, "benchmark", DataPlaneConfig(num_storage_units=units))
        theirs = pool.submit(tq.init, {"backend": {"SimpleStorage": {"num_data_storage_units": units}}})
        address = ours.result()
        theirs.result()
    plane = connect(address, timeout_s=120)
    plane.register_partition("p", fields=FIELDS)

    def stop() -> None:
        queue.stop(address)
        tq.close()
        ray.shutdown()

    return plane, stop


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=1, help="storage units of each queue")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the whole run")
    options = parser.parse_args()
    began = time.monotonic()
    plane, stop = start(options.units)
    ready = time.monotonic()
    shares = {"64": 0.1, "512": 0.25, "512 ragged": 0.45, "4096": 1.0}  # of the time left, done when this case ends
    end = began + options.seconds - 12.0  # stopping, and a case in its last repetition
    detail: dict[str, Any] = {"storage_units": options.units, "start_s": round(ready - began, 1), "cases": {}}
    ratios = {}
    for name, (samples, ragged) in CASES.items():
        case = Case(samples, ragged)
        seconds = measure(case, plane, ready + (end - ready) * shares[name])
        detail["cases"][name] = {side: _summary(case.bytes, series) for side, series in seconds.items()}
        for way in ("put", "get"):
            pairs = zip(seconds[f"raw {way}"], seconds[f"client {way}"], strict=True)
            ratios[f"{name} {way}"] = round(median(raw / client for raw, client in pairs), 3)
    stop()
    detail |= {"ratios": ratios, "seconds": round(time.monotonic() - began, 1)}
    print(
        json.dumps({"name": "data_plane", "value": min(ratios.values()), "unit": "client MB/s / raw TransferQueue MB/s", "detail": detail})
    )


if __name__ == "__main__":
    main()
