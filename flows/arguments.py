"""Every command and its arguments, for `grpo-flows NAME` and `python -m MODULE` alike.

Nothing here imports a flow: torch, Ray and Prefect take seconds, and a page of help or a completion should not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.evaluate import EvaluateConfig
from configs.loader import recipe_names
from configs.retrain import RetrainConfig
from configs.run import BaseConfig, RunConfig
from configs.sft import SftConfig

VARIABLE = "_GRPO_FLOWS_COMPLETE"  # a shell that completes sets it (flows/completion.py)

type _Adds = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: in `grpo-flows NAME`. help: what it does, in a line.
        runs: "module:function"; the function takes the arguments and returns the exit code.
        adds: the arguments, to a parser.
        root: of a flow, the configuration of its recipes.
    """

    name: str
    help: str
    runs: str
    adds: _Adds
    root: type[BaseConfig] | None = None

    def parser(self) -> argparse.ArgumentParser:
        """Of its arguments."""
        parser = argparse.ArgumentParser(prog=f"grpo-flows {self.name}", description=f"{self.help[0].upper()}{self.help[1:]}.")
        self.adds(parser)
        return parser


def parse(name: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command (None: of this process); options may stand between the others.

    Raises:
        SystemExit: 2 for wrong arguments, 0 when help was asked for.
    """
    return COMMANDS[name].parser().parse_intermixed_args(arguments)


def parse_flow(name: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """As `parse`, of a command that runs a flow; its recipe may also be the first word, or the default one."""
    options = parse(name, arguments)
    if options.recipe is None and options.overrides and "=" not in options.overrides[0]:  # no setting is without an equals sign
        options.recipe = options.overrides.pop(0)
    options.recipe = options.recipe or options.default
    return options


def _flow(root: type[BaseConfig], default: str) -> _Adds:
    def add(parser: argparse.ArgumentParser) -> None:
        names = ", ".join(recipe_names(root))
        parser.add_argument("--recipe", help=f"a name ({names}; default: {default}) or a path to a .yaml file; may also be the first word")
        kind = parser.add_mutually_exclusive_group()
        kind.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the planned actors; look at nothing")
        kind.add_argument("--check", action="store_true", help="look at all that needs no actor, and plan seconds, GPU-hours and GiB")
        parser.add_argument("overrides", nargs="*", metavar="field=value", help="for example model.hidden_size=256 steps=20")
        parser.set_defaults(default=default)

    return add


def _new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the recipe; its files are NAME.yaml and so on")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", metavar="PATH", help=".jsonl or .parquet file (or a folder or URL of them) with prompts and answers")
    source.add_argument("--environment", action="store_true", help="write the skeleton of an environment of one's own")
    parser.add_argument("--reward", choices=("math", "exact", "own"), help="own: write a reward function (default: math, with --data)")
    parser.add_argument("--model", metavar="MODEL", help="directory, URL, hub id, .gguf file or package with one (default: a tiny one)")
    parser.add_argument("--gpu", action="store_true", help="settings for one GPU, which engine and trainer share (default: this CPU)")
    parser.add_argument("--to", type=Path, default=Path(), metavar="DIR", help="where the files go (default: here)")


def _recipes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("list", "show", "diff"), default="list", help="list (the default), show or diff")
    parser.add_argument(
        "names", nargs="*", metavar="RECIPE", help="show: one, diff: two; names or paths; field=value goes on top of the last"
    )
    parser.add_argument("--resolved", action="store_true", help="show: every setting with its value, defaults too")


def _up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--down", action="store_true", help="stop what was started, and nothing else")
    _home(parser)
    parser.add_argument("--host", default="127.0.0.1", help="listen on this address of the machine (default: loopback only)")


def _home(parser: argparse.ArgumentParser) -> None:
    where = "where .grpo/ and prefect.toml go (default: the checkout; of an installed package, this directory)"
    parser.add_argument("--home", type=Path, help=where)


def _doctor(parser: argparse.ArgumentParser) -> None:
    nodes = "look at each node of this cluster (default: RAY_ADDRESS)"
    parser.add_argument("--cluster", nargs="?", const="", metavar="ADDRESS", help=nodes)
    parser.add_argument("--recipe", metavar="NAME", help="with --cluster: whose run directory and checkpoints must be there")


def _audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a run, or file of a journal")
    parser.add_argument("--json", action="store_true", help="print the audit as JSON")


def _fork(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of the parent")
    parser.add_argument("--at", type=int, metavar="STEP", help="step of the checkpoint (default: the newest)")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="what the child does otherwise")


def _replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run of grpo")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to make again")
    parser.add_argument("--cpu", action="store_true", help="in float32 on this machine's CPU")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="how it is computed, for example policy.parallel.data=2")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--at", type=int, metavar="STEP", help="step of the checkpoint (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best validation")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory to write, which must not exist")


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


_LIST = (
    Command("new", "write a recipe, with what it needs, for the data, reward and model that one has", "flows.new:main", _new),
    Command("recipes", "list the recipes, show one, or say how two differ", "flows.recipes:main", _recipes),
    Command("doctor", "say what is found, what is missing, and what mends it", "flows.service.doctor:main", _doctor),
    Command("run", "train a language model by GRPO", "flows.grpo:main", _flow(RunConfig, "arithmetic-cpu"), RunConfig),
    Command(
        "sft", "teach a language model to answer prompts with given responses",
        "flows.sft:main", _flow(SftConfig, "sft-cpu"), SftConfig,
    ),
    Command(
        "evaluate", "measure a language model, alone or beside a baseline",
        "flows.evaluate:main", _flow(EvaluateConfig, "evaluate-cpu"), EvaluateConfig,
    ),
    Command(
        "retrain", "train on what is new since the promoted model, and promote the result if it is better",
        "flows.retrain:main", _flow(RetrainConfig, "retrain-cpu"), RetrainConfig,
    ),
    Command("up", "start everything that deployments need, and deploy them", "flows.service.up:main", _up),
    Command("down", "stop what `up` started, and nothing else", "flows.service.up:stop", _home),
    Command("audit", "prove from its journal what a run did with each prompt group", "flows.audit:main", _audit),
    Command("fork", "train a child of a run from one of its checkpoints", "flows.fork:main", _fork),
    Command("replay", "make one training step of a run again, and compare", "flows.replay:main", _replay),
    Command("export", "export a checkpoint of a run as a Hugging Face directory", "flows.export:main", _export),
    Command("completion", "print the script that completes this command in a shell", "flows.completion:main", _completion),
)  # fmt: skip
COMMANDS = {command.name: command for command in _LIST}
