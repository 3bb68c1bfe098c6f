"""Make one training step of a `grpo` run again, from a checkpoint and the inputs that were kept, and say what differs, and where first.

    checkpoint ─► data plane, policy ─► the steps in between: train ─► the step: logprob ─► ref_logprob ─► advantage ─► train ─► compare

The run may be at work, have ended or have failed. The machine may be another one: a GPU's step on a CPU is `--cpu`.

python -m flows.replay runs/my-model --step 137
python -m flows.replay runs/my-model --step 137 --cpu
python -m flows.replay runs/my-model --step 137 policy.parallel.tensor=2

Exit code: 0 within the bounds; 1 beyond one of them, or it could not be made; 2 wrong input.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import runtime
from prefect.artifacts import create_markdown_artifact

from actors import names
from actors.checkpoints.errors import CheckpointError
from actors.checkpoints.manifest import Manifest, shape_digest
from actors.checkpoints.store import CheckpointStore
from actors.data_plane.meta import KVBatchMeta
from actors.models.hf import check_layout, check_model_dir, tensor_shapes
from actors.policy.turns import Turn
from actors.preflight import prepare_model
from actors.rollout.assemble import ROLLOUT_FIELDS
from actors.rollout.inputs import NoInputsError, StepInputs, path_of, steps_in
from configs.base import ConfigError
from configs.continuity import differences
from configs.loader import load
from configs.run import RunConfig
from flows.arguments import parse
from flows.cli import exit_code
from flows.resume import Mark
from flows.served import flow
from tasks.actor_logs import ActorLogs
from tasks.advantage import advantage
from tasks.call import quoted
from tasks.checkpoint import POLICY, load_weights, reference_of
from tasks.cluster import cluster
from tasks.handles import RunActors
from tasks.launch import launch_policy, logical_cpus, stop
from tasks.logprob import POLICY_LOGPROBS, REFERENCE_LOGPROBS, logprob, ref_logprob, reference_columns
from tasks.quiet import quiet_console
from tasks.replay import clear_inputs, compare_step, put_inputs
from tasks.reporting.replay import Bounds, Replayed, as_markdown, as_text, bounds_of, compare_metrics
from tasks.reporting.run_dir import RunDirectory
from tasks.train import pass_over, place, scale_rate, train

# A GPU's settings, for one process on a CPU.
ON_CPU = ("policy.device=cpu", "policy.dtype=float32", "policy.parallel={}", "policy.cuda_graph={}", "ray.address=null")
_NOT_OF_THE_BITS = {"device", "timeout_s", "compiled_graph"}  # of the settings of a policy


class OtherUpdatesError(RuntimeError):
    """A guard tripped in a step before, and did not in the run, or the other way round."""


@flow(name="replay", flow_run_name="replay-of-{run}-step-{step}", validate_parameters=False)
def replay(run: str, step: int, overrides: list[str] | None = None) -> dict[str, Any]:
    """Make a step of a run again, and compare it with what the run wrote down: artifact `grpo-replay`. Returns `Replayed`'s fields.

    Args:
        run: its directory. overrides: dotted.field=value, of how it is computed, on top of the run's settings.

    Raises:
        ConfigError: no such run, or settings that would make it another step. NoInputsError: the step cannot be made again.
        CheckpointError: a file is damaged.
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = _Replay(plan_of(RunDirectory(Path(run).resolve()), step, overrides or (), Path(scratch)), Path(scratch)).run()
    create_markdown_artifact(key="grpo-replay", markdown=as_markdown(found), description=f"{found.run}, step {step}: {found.verdict}")
    return found.model_dump()


@dataclass(frozen=True)
class Plan:
    """What is made again.

    Attributes:
        manifest: of the checkpoint. steps: those after it, the last of which is compared.
        before: settings that the steps were made with, the last one's first. config: to compute with now.
    """

    directory: RunDirectory
    store: CheckpointStore
    manifest: Manifest
    steps: tuple[StepInputs, ...]
    before: tuple[RunConfig, ...]
    config: RunConfig


def plan_of(run: RunDirectory, step: int, overrides: Sequence[str], scratch: Path) -> Plan:
    """From which checkpoint, and with which inputs. Starts nothing. Arguments and errors as of `replay`."""
    mark = Mark.read(run.root)
    if mark is None:
        raise ConfigError(f"{run.root} is no directory of a run (it has no run.json)")
    store = CheckpointStore(mark.checkpoints, scratch)
    saved, kept = store.steps(), set(steps_in(run.inputs))
    if not saved:
        raise NoInputsError(f"no inputs of step {step}: the run has no checkpoint to begin from")
    if step <= saved[0]:
        raise NoInputsError(f"no inputs of step {step}: they are kept from step {saved[0] + 1} on, after the oldest kept checkpoint")
    since = max(one for one in saved if one < step)
    there = f"{run.inputs} has those of {_ranges(kept)}" if kept else f"{run.inputs} has none (checkpoint.inputs)"
    if step not in kept:
        raise NoInputsError(f"no inputs of step {step}: {there}")
    if missing := [one for one in range(since + 1, step) if one not in kept]:
        raise NoInputsError(f"no inputs of step {missing[0]}, between the checkpoint of step {since} and step {step}: {there}")
    steps = tuple(StepInputs.read(path_of(run.inputs, one)) for one in range(since + 1, step + 1))
    recipe = scratch / "recipe.yaml"
    before = []
    for text in dict.fromkeys(one.config for one in reversed(steps)):
        recipe.write_text(text)
        before.append(load(str(recipe)))
    if any(one.optimizer != before[0].optimizer for one in before):
        raise NoInputsError(f"between steps {since} and {step} the run was made longer: the learning rate followed two schedules")
    recipe.write_text(steps[-1].config)
    config = load(str(recipe), overrides)
    if changed := differences(before[0].model_dump(mode="json"), config.model_dump(mode="json")):
        raise ConfigError(f"with {'; '.join(changed[:5])} it would be another step (python -m flows.fork goes on with other settings)")
    return Plan(run, store, store.at(since), steps, tuple(before), config)


def _ranges(steps: set[int]) -> str:
    first = [one for one in sorted(steps) if one - 1 not in steps]
    last = [one for one in sorted(steps) if one + 1 not in steps]
    return ", ".join(f"step {a}" if a == b else f"steps {a} to {b}" for a, b in zip(first, last, strict=True))


class _Replay:
    """One replay, while its actors live."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        self._plan, self._config, self._scratch = plan, plan.config, scratch
        self._namespace = names.namespace(str(runtime.flow_run.id or uuid.uuid4()))
        self._stage_s, self._plane_s = plan.config.deadlines.policy_stage, plan.config.data_plane.timeout_s
        self._rate = 1.0

    def run(self) -> Replayed:
        plan, config = self._plan, self._config
        self._model = prepare_model(config, self._scratch / "model")
        check_layout(config.policy.parallel, check_model_dir(self._model))
        if plan.manifest.shape != shape_digest(tensor_shapes(self._model)):
            raise CheckpointError(f"the checkpoint of step {plan.manifest.step} is of another model than the run's {self._model}")
        reference = reference_of(plan.manifest)
        with (
            plan.store.fetched(plan.manifest, POLICY) as root,
            cluster(config.ray, self._namespace, logical_cpus(config), None),
            ActorLogs(),
        ):
            self._actors: RunActors = launch_policy(config, self._model, self._namespace)
            try:
                folder = root / plan.manifest.folder
                at = root / reference if reference else None
                load_weights(self._namespace, folder, at, config.optimizer, config.checkpoint.timeout_s)
                for inputs in plan.steps[:-1]:
                    self._train_again(inputs)
                return self._compare(plan.steps[-1])
            finally:
                stop(self._namespace, self._actors.address)

    def _train_again(self, inputs: StepInputs) -> None:
        """A step before the one in question, from all that was kept of it."""
        put_inputs(self._actors.address, inputs.step, quoted(inputs.meta), self._plan.directory.inputs, self._plane_s)
        made, before = self._train(inputs, inputs.meta)["updates"], inputs.metrics.get("updates")
        if made != before:
            raise OtherUpdatesError(f"step {inputs.step} made {before} updates, and now {made:g} (guards): what follows is another run")
        clear_inputs(self._actors.address, inputs.meta, self._plane_s)

    def _train(self, inputs: StepInputs, rows: KVBatchMeta) -> dict[str, float]:
        config, turn = self._config, Turn(inputs.step, "train")
        if inputs.rate != self._rate:
            scale_rate(self._namespace, inputs.rate / self._rate, self._stage_s)
            self._rate = inputs.rate
        if inputs.passed_over:
            return _metrics(pass_over(self._namespace, inputs.step, self._stage_s, turn))
        batch, objective = rows.subset(inputs.trained), config.policy.loss.objective
        return _metrics(train(self._namespace, inputs.step, quoted(batch), objective, self._stage_s, turn, config.guards.limits))

    def _compare(self, inputs: StepInputs) -> Replayed:
        """The step itself, by the stages that a run has; the policy's log-probabilities also where the run left them out."""
        config, step, address = self._config, inputs.step, self._actors.address
        rows = inputs.meta.model_copy(update={"fields": frozenset(ROLLOUT_FIELDS)})
        put_inputs(address, step, quoted(rows), self._plan.directory.inputs, self._plane_s)
        logprob(self._namespace, step, quoted(rows), POLICY_LOGPROBS, self._stage_s)
        rows = rows.with_fields(POLICY_LOGPROBS)
        if config.policy.why_no_ref_logprob() is None:
            ref_logprob(self._namespace, step, quoted(rows), REFERENCE_LOGPROBS, self._stage_s)
            rows = rows.with_fields(*reference_columns(config.policy))
        scored = advantage(address, step, quoted(rows), config.policy.loss, self._plan.before[0].trained_multiple, self._plane_s)
        rows = rows.with_fields("advantages")
        made = scored.metrics | self._train(inputs, rows)
        here = place(self._namespace, self._stage_s)
        bounds = self._bounds(here, inputs.metrics.get("logprob_error/mean", 0.0))
        columns = compare_step(address, step, quoted(rows), self._plan.directory.inputs, bounds, self._model, self._plane_s)
        return Replayed(
            run=self._plan.directory.root.name, step=step, since=self._plan.manifest.step, before=inputs.place, here=here,
            bounds=bounds, columns=columns, metrics=compare_metrics(inputs.metrics, made, bounds),
        )  # fmt: skip

    def _bounds(self, here: str, measured: float) -> Bounds:
        policies = [one.policy for one in self._plan.before]
        ours = self._config.policy.model_dump(exclude=_NOT_OF_THE_BITS)
        same = all(one.place == here for one in self._plan.steps) and all(
            one.model_dump(exclude=_NOT_OF_THE_BITS) == ours for one in policies
        )
        bounds = bounds_of(same, policies[0].dtype, self._config.policy.dtype, self._config.generation.dtype, measured)
        return bounds.model_copy(update={"advantages": bounds.column}) if self._config.policy.loss.kl_in_reward else bounds


def _metrics(result: Any) -> dict[str, float]:
    assert isinstance(result, dict)  # nobody withdraws a step of a replay
    return result


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    from flows.service.server import prefect_server

    options = parse("replay", arguments)
    overrides = [*(ON_CPU if options.cpu else ()), *options.overrides]

    def work() -> int:
        with tempfile.TemporaryDirectory() as scratch:
            plan_of(RunDirectory(Path(options.run).resolve()), options.step, overrides, Path(scratch))
        with prefect_server() as url:
            print(f"Prefect UI: {url}")
            quiet_console()
            found = Replayed.model_validate(replay(options.run, options.step, overrides))
        print(as_text(found))
        return 1 if found.verdict == "beyond" else 0

    return exit_code(work)


if __name__ == "__main__":
    raise SystemExit(main())
