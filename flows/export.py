"""Export any checkpoint of a run as a Hugging Face directory, on this machine's CPU.

python -m flows.export runs/my-model --at 50 --to exported
python -m flows.export runs/my-model --best --to exported
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from actors.checkpoints.errors import CheckpointError
from actors.checkpoints.manifest import Manifest, shape_digest
from actors.checkpoints.store import CheckpointStore
from actors.data_plane.in_memory import MemoryPlane
from actors.models.hf import tensor_shapes
from actors.preflight import prepare_model
from configs import settings
from configs.base import ConfigError
from configs.cuda_graph import CudaGraphConfig
from configs.loader import load
from configs.policy import ParallelConfig
from configs.run import RunConfig
from configs.sft import SftConfig
from flows.arguments import parse
from flows.fork import checkpoint_of
from flows.saving import best_of
from tasks.checkpoint import POLICY
from tasks.reporting.run_dir import RunDirectory
from tasks.scratch import scratch


def export(run: RunDirectory, at: int | None, best: bool, target: Path) -> Manifest:
    """Write the weights of a checkpoint to `target`. Returns its manifest.

    Args:
        at: step of the checkpoint; None: the newest. best: the one with the best validation instead.

    Raises:
        ConfigError: no such run, or a target that exists. CheckpointError: no such checkpoint, or it is damaged.
    """
    if target.exists():
        raise ConfigError(f"--to: {target} exists already")
    url, step = checkpoint_of(run, at)
    store = CheckpointStore(url, run.root)
    manifest = best_of(store) if best else store.at(step)
    if manifest is None:
        raise CheckpointError(f"{url}: no checkpoint was validated, so none is the best: say which (--at)")
    with scratch(), tempfile.TemporaryDirectory() as place:
        config: RunConfig | SftConfig = load(str(run.config), (), SftConfig) if manifest.flow == "sft" else load(str(run.config))
        model_path = prepare_model(config, Path(place) / "model")
        if manifest.shape != shape_digest(tensor_shapes(model_path)):
            raise CheckpointError(f"the checkpoint of step {manifest.step} is of another model than the run's {model_path}")
        with store.fetched(manifest, POLICY) as files:
            _write(config, model_path, files / manifest.folder / POLICY, Path(place), target)
    return manifest


def _write(config: RunConfig | SftConfig, model_path: str, state: Path, place: Path, target: Path) -> None:
    from actors.policy.worker import PolicyWorker  # Megatron: not for those who only ask for help

    optimizer = config.policy.optimizer.model_copy(update={"decay_style": "constant", "warmup_steps": 0})  # it makes no step
    here = {"device": "cpu", "parallel": ParallelConfig(), "cuda_graph": CudaGraphConfig(), "optimizer": optimizer}
    policy = config.policy.model_copy(update=here)
    worker = PolicyWorker(policy, model_path, 0, MemoryPlane(), config.seed, 1.0)
    worker.setup(f"file://{place}/rendezvous")
    try:
        worker.load_state(str(state), None)
        partial = target.with_name(f".{target.name}.partial")
        worker.save_hf(str(partial))
        partial.replace(target)
    finally:
        worker.close()


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input."""
    options = parse("export", arguments)
    settings.apply_defaults()
    try:
        manifest = export(RunDirectory(options.run.resolve()), options.at, options.best, options.to.resolve())
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.to}: the weights after step {manifest.step} (validation score {manifest.score})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
