"""What generating while training brings: a recipe run synchronously, with updates that wait, and with updates in flight.

    sync       generate B groups ─► train ─► refit ─► generate ...                           one of the two is always idle
    waiting    generation goes on while training; an update waits for the running requests   stragglers hold every update up
    in_flight  generation goes on; an update comes between two tokens                        nobody waits

CPU: generation is pinned to one core (engine, collector, environment, replay buffer), training to another (policy group and worker;
engine and worker have one thread); what serves both (Ray, TransferQueue, this driver) runs on either. Real parts throughout, without
Prefect; a random Qwen3 whose responses end at each token with a chance of about 2 %, so their lengths are geometric: a mean of about 50
tokens, and stragglers up to `--longest`.

What a group costs beside engine and policy worker, 15 to 25 ms of CPU, would have cores of its own on a machine with GPUs; here it takes
them from the two. So that these are measured, model and responses are not the smallest: engine and worker take about a second of a
step. With `--longest 96 --ends 16 rollout.prompts_per_step=16 model.hidden_size=128 model.intermediate_size=384` they take 0.3 s, and
the rest is a third of all CPU time.

Training is made as expensive as generation: in synchronous steps before, with one log-probability pass more, generation, training and
the pass are timed, and from then on each step's trainer does as many passes (over the step's own batch) as fill the difference. Two
synchronous phases enclose the other two, so that the machine's drift is seen.

  tokens/s     prompt and response tokens of trained samples, over the phase's wall time.
  trainer      fraction of the time in which the policy worker had nothing to do.
  generator    fraction in which no engine had a request; the standstill of an update counts.

`value` is tokens/s in flight over tokens/s of the sync phases (their mean); with both cores busy all the time it would be 2. It is
null when the machine's speed changed meanwhile: generation and training no longer cost the same, or the two sync phases differ (`drift`).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from actors import names
from actors.data_plane.connect import connect
from actors.data_plane.interface import DataPlane
from actors.data_plane.meta import KVBatchMeta
from actors.generation.types import UpdateOptions
from actors.preflight import check, prepare_model
from actors.rollout.collector import Collector
from actors.rollout.ledger_actor import ClaimReply, ledger_actor_class
from actors.rollout.prompts import end_token_ids
from actors.waiting import find, look_for, wait
from configs.loader import load
from configs.run import RunConfig
from tasks.handles import RunActors
from tasks.launch import launch, stop

NAMESPACE = "benchmark-async"
ALTERNATING = ("collector-sync", "ledger-sync")
GENERATION = (names.COLLECTOR, names.ENVIRONMENT, names.LEDGER, *ALTERNATING)  # beside the engine
TRAINING = (names.POLICY, "policy-worker-0")
AGE = 4  # the longest responses outlast two updates
DRIFT = 1.25  # steps differ by a tenth, since the lengths of their responses do
OVERRIDES = [
    "name=async-overlap", "model.hidden_size=256", "model.intermediate_size=768", "rollout.prompts_per_step=8",
    "rollout.responses_per_prompt=4", "rollout.temperature=1.0", "policy.updates_per_step=1", "policy.optimizer.decay_steps=1000000",
    "policy.loss.kl_coef=0", "policy.batching={mode: dynamic, tokens_per_micro_batch: 1024}", "warm_start.steps=0",
    "warm_start.stop_at_accuracy=null", "generation.max_num_seqs=64", "generation.kv_cache_gib=0.5",
    f"asynchronous.max_trajectory_age_steps={AGE}",
]  # fmt: skip
IN_FLIGHT, WAITING = UpdateOptions("in_flight", recompute_kv_cache=False), UpdateOptions("wait")


@dataclass
class Phase:
    """What one way of running has done."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    trainer_idle_s: float = 0.0
    generator_idle_s: float = 0.0

    def detail(self) -> dict[str, float]:
        """As printed."""
        return {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "seconds_per_step": round(self.seconds / self.steps, 3),
            "steps": self.steps,
            "trainer_idle": round(self.trainer_idle_s / self.seconds, 3),
            "generator_idle": round(self.generator_idle_s / self.seconds, 3),
        }


class Bench:
    """Running actors, and the ways to drive them."""

    def __init__(self, config: RunConfig, plane: DataPlane, engines: list[str]) -> None:
        self._config, self._plane, self._engines = config, plane, engines
        self._number = 0
        self.filler = 0.0  # log-probability passes over the batch, beside the step's own work

    def ask(self, actor: str, method: str, *arguments: Any) -> Any:
        return wait(getattr(find(actor, NAMESPACE), method).remote(*arguments), who=actor, what=method, timeout_s=120)

    def train(self, meta: KVBatchMeta) -> float:
        """The trainer's work of a step. Returns the seconds of it that were filler."""
        meta = self._plane.put(meta, {"advantages": [torch.tensor(float(row % 2)) for row in range(len(meta))]})
        self.ask(names.POLICY, "train", meta, "grpo")
        passes, began = self.filler, time.monotonic()
        while passes > 0.01:
            rows = max(1, round(min(passes, 1.0) * len(meta)))
            self.ask(names.POLICY, "logprob", meta.slice(0, rows), "policy_logprobs")
            passes -= 1.0
        return time.monotonic() - began

    def refit(self, options: UpdateOptions) -> float:
        """New weights into the engine. Returns the seconds for which it stood still."""
        result = self.ask(names.POLICY, "refit", self._engines, options)
        self._number = int(result["weight_version"])
        return float(result["pause_s"])

    def sync(self, seconds: float) -> tuple[Phase, float, float, float]:
        """Steps one after the other. Returns also the seconds per step of generation, of training, and of training's filler."""
        phase, generating, training, filling = Phase(), 0.0, 0.0, 0.0
        began = time.monotonic()
        while phase.seconds < seconds:
            started = time.monotonic()
            self.ask(ALTERNATING[1], "set_version", self._number)
            reply: ClaimReply = self.ask(ALTERNATING[1], "claim", self._config.rollout.prompts_per_step, 60.0)
            assert reply.claim is not None, reply.log
            meta, generated = reply.claim.meta, time.monotonic()
            filling += self.train(meta)
            trained = time.monotonic()
            self.refit(WAITING)
            self.ask(ALTERNATING[1], "trained", reply.claim.uids)
            generating, training = generating + generated - started, training + trained - generated
            phase.tokens += sum(meta.sequence_lengths)
            phase.steps += 1
            phase.trainer_idle_s += generated - started
            phase.seconds = time.monotonic() - began
        phase.generator_idle_s = phase.seconds - generating
        return phase, generating / phase.steps, training / phase.steps, filling / phase.steps

    def overlapped(self, seconds: float, options: UpdateOptions) -> Phase:
        """Steps beside generation, which is running already; the first ones, until the pipeline is full, do not count."""
        for _ in range(AGE + 1):
            self._overlapped_step(options, Phase())
        phase = Phase()
        self.ask(names.COLLECTOR, "report")
        began = time.monotonic()
        while phase.seconds < seconds:
            self._overlapped_step(options, phase)
            phase.seconds = time.monotonic() - began
        phase.generator_idle_s += self.ask(names.COLLECTOR, "report").metrics["idle/generator_s"]
        return phase

    def _overlapped_step(self, options: UpdateOptions, phase: Phase) -> None:
        started = time.monotonic()
        reply: ClaimReply = self.ask(names.LEDGER, "claim", self._config.rollout.prompts_per_step, 60.0)
        assert reply.claim is not None, reply.log
        phase.trainer_idle_s += time.monotonic() - started
        self.train(reply.claim.meta)
        updating = time.monotonic()
        phase.generator_idle_s += self.refit(options)
        if options.mode == "wait":
            phase.trainer_idle_s += time.monotonic() - updating  # it waits for the engine's last request
        self.ask(names.LEDGER, "trained", reply.claim.uids)
        self.ask(names.LEDGER, "set_version", self._number)
        phase.tokens += sum(reply.claim.meta.sequence_lengths)
        phase.steps += 1


def alternate(config: RunConfig, model: str, actors: RunActors) -> list[Any]:
    """A collector and a ledger beside the run's own, as a synchronous run has them, with the same engine and environment: their handles."""
    sync = config.model_copy(update={"mode": "sync"})
    collector, ledger = ALTERNATING
    opened = partial(connect, actors.address, timeout_s=60)
    handles = [
        ledger_actor_class().options(name=ledger, namespace=NAMESPACE, num_cpus=0).remote(
            sync.ledger, sync.rollout.prompts_per_step, 0, "train", opened, partial(look_for, collector, NAMESPACE)
        ),
        ray.remote(Collector).options(name=collector, namespace=NAMESPACE, num_cpus=0, max_concurrency=4).remote(
            sync, model, NAMESPACE, actors.engines, names.ENVIRONMENT, actors.address, ledger=ledger
        ),
    ]  # fmt: skip
    ray.get([handle.ready.remote() for handle in handles], timeout=120)
    ray.get(handles[1].begin_generating.remote(), timeout=60)
    return handles


def pin(core: int) -> int:
    """Every thread of this process onto one core; returns how many. Runs inside an actor."""
    threads = os.listdir("/proc/self/task")
    for thread in threads:
        os.sched_setaffinity(int(thread), {core})
    return len(threads)


def end_often(model: Path, ends: int) -> None:
    """Let so many tokens end a response: the largest vocabulary numbers that the tokenizer has."""
    path = model / "generation_config.json"
    values = json.loads(path.read_text())
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    values["eos_token_id"] = sorted({*end_token_ids(str(model)), *range(vocabulary - ends - 8, vocabulary - 8)})
    path.write_text(json.dumps(values))


def main() -> None:
    """Run it and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the four phases")
    parser.add_argument("--longest", type=int, default=288, help="most tokens of a response")
    parser.add_argument("--ends", type=int, default=5, help="tokens that end a response, of about 270")
    parser.add_argument("overrides", nargs="*", help="field=value of the recipe")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the engine, one for the policy worker")
    lengths = [f"rollout.max_new_tokens={options.longest}", f"model.max_position_embeddings={options.longest + 32}"]
    config = load("arithmetic-cpu-async", [*OVERRIDES, *lengths, *options.overrides])
    with tempfile.TemporaryDirectory() as directory:
        model = prepare_model(config, Path(directory))
        check(config, model)
        end_often(Path(model), options.ends)
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE, _node_ip_address="127.0.0.1"
        )
        actors = launch.fn(config, model, NAMESPACE)
        alternating = alternate(config, model, actors)
        bench = Bench(config, connect(actors.address, timeout_s=60), actors.engines)
        for name, core in {**dict.fromkeys([actors.engines[0], *GENERATION], cores[0]), **dict.fromkeys(TRAINING, cores[1])}.items():
            ray.get(ray.get_actor(name, namespace=NAMESPACE).__ray_call__.remote(lambda _, core=core: pin(core)), timeout=60)
        bench.sync(0.1)
        bench.filler = 1.0
        _, generation, training, one = bench.sync(2 * options.seconds)  # lengths, and with them seconds, differ from step to step
        bench.filler = max(0.0, (generation - training + one) / one)
        print(f"a step: generation {generation:.2f} s, training {training - one:.2f} s, one more pass {one:.2f} s")
        phases: dict[str, Phase] = {}
        first, generation, training, _ = bench.sync(options.seconds)
        print(f"with {bench.filler:.2f} more passes: generation {generation:.2f} s, training {training:.2f} s")
        bench.ask(names.LEDGER, "set_version", bench._number)
        bench.ask(names.COLLECTOR, "begin_generating")
        phases["waiting"] = bench.overlapped(options.seconds, WAITING)
        phases["in_flight"] = bench.overlapped(options.seconds, IN_FLIGHT)
        bench.ask(names.COLLECTOR, "stop_generating")
        last, *_ = bench.sync(options.seconds)
        del alternating
        stop(NAMESPACE, actors.address)
        ray.shutdown()
    phases = {"sync": first, **phases, "sync_again": last}
    rates = {name: phase.tokens / phase.seconds for name, phase in phases.items()}
    base = (rates["sync"] + rates["sync_again"]) / 2
    drift = max(max(pair) / min(pair) for pair in ((generation, training), (rates["sync"], rates["sync_again"])))
    value = round(rates["in_flight"] / base, 3) if drift <= DRIFT else None
    if value is None:
        print(f"no value: the machine's speed changed {drift:.2f} times during this run; once more when it is quiet")
    detail = {
        **{name: phase.detail() for name, phase in phases.items()},
        "generation_s": round(generation, 3), "training_s": round(training, 3), "waiting_to_sync": round(rates["waiting"] / base, 3),
        "drift": round(drift, 3), "max_trajectory_age_steps": AGE, "longest": options.longest,
    }  # fmt: skip
    print(json.dumps({"name": "async_overlap", "value": value, "unit": "tokens/s in flight / sync", "detail": detail}))


if __name__ == "__main__":
    main()
