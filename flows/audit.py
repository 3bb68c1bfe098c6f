"""What became of each prompt group of a run, proved from its journal.

python -m flows.audit runs/latest                    a run's directory, or a journal's file
python -m flows.audit runs/latest --json

Exit code: 0 nothing failed; 1 something did, and the text names the first line; 2 there is no such journal, or it cannot be read.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from actors.rollout import journal
from actors.rollout.audit import Audit, audit
from flows.arguments import parse
from tasks.reporting.run_dir import RunDirectory


def main(arguments: list[str] | None = None) -> int:
    """Audit one run. Returns the exit code."""
    options = parse("audit", arguments)
    path = RunDirectory(options.run).journal if options.run.is_dir() else options.run
    try:
        contents = journal.parse(path.read_bytes())
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        print(f"error: {path}: {error}", file=sys.stderr)
        return 2
    found = audit(contents)
    print(json.dumps(as_json(found), indent=2) if options.json else as_text(found, str(path)))
    return 0 if found.clean else 1


def as_json(found: Audit) -> dict[str, object]:
    """The audit's fields, and whether it is clean."""
    return {"clean": found.clean, "verdict": found.verdict, **asdict(found)}


def as_text(found: Audit, where: str) -> str:
    """For a terminal: what was read, what became of the groups, what resumes made void, and the verdict. ASCII only."""
    lines = [where]
    if began := found.began:
        bound = f"max_trajectory_age_steps {began.max_age}, {began.groups_per_step} groups per step"
        lines += [f"run {began.run!a}: sampler {began.sampler!a}, {bound}; weight version {found.version}"]
    lines += [f"{found.lines} lines, {found.surviving} of them count; {found.cuts} checkpoints; {'' if found.finished else 'not '}finished"]
    if found.torn:
        lines.append(f"an unfinished last line of {found.torn} bytes is left out")
    lines += ["", *(f"  {number:>8}  {ascii(what)[1:-1]}" for what, number in found.counts())]
    lines += [f"  {found.reissued:>8}  issued again after a resume"] if found.reissued else []
    lines += [f"  {number:>8}  trained at age {age}" for age, number in found.ages.items()]
    for void in found.voided:
        steps = f", of weight versions {', '.join(map(str, void.versions))}" if void.versions else ""
        source = f"checkpoint {void.checkpoint!a}" if void.checkpoint else "the run's beginning"
        lines += ["", f"line {void.line} went back to {source} ({ascii(void.why)[1:-1]}):"]
        lines += [f"  {void.lines} lines became void: of {void.groups} groups, {void.trained} of them trained{steps}"]
    return "\n".join([*lines, "", ascii(found.verdict)[1:-1]])


if __name__ == "__main__":
    raise SystemExit(main())
