"""audit: what became of each prompt group of a run, proved from its journal, in the Prefect UI."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from actors.rollout.audit import Audit, audit
from actors.rollout.journal import JournalError, parse
from tasks.call import STAGE


@task(name="audit", task_run_name="audit", **STAGE)
def audit_run(journal: str) -> Audit:
    """Judge the run's journal, and show it: artifacts `grpo-audit` (Markdown) and `grpo-audit-groups` (table).

    It does not fail when the audit does: the caller decides what that means for the run.

    Raises:
        JournalError: the file cannot be read.
    """
    try:
        contents = parse(Path(journal).read_bytes())
    except OSError as error:
        raise JournalError(f"{journal}: {error}") from error
    found = audit(contents)
    create_table_artifact(
        key="grpo-audit-groups",
        table=[{"what became of it": what, "groups": number} for what, number in found.counts()],
        description=found.verdict,
    )
    create_markdown_artifact(key="grpo-audit", markdown=as_markdown(found), description=found.verdict)
    return found


def as_markdown(found: Audit) -> str:
    """The audit on one page."""
    state = "the run has finished" if found.finished else "the run has not finished"
    page = [f"# Audit: {'clean' if found.clean else 'failed'}", "", _plain(found.verdict), ""]
    page += [f"{found.lines} lines, {found.surviving} of them count; {found.cuts} checkpoints; {state}.", ""]
    page += ["| groups | what became of them |", "|---:|---|", *(f"| {number} | {_plain(what)} |" for what, number in found.counts())]
    page += [f"| {found.reissued} | issued again after a resume |"] if found.reissued else []
    if found.ages:
        page += [
            "",
            "| trained | at age (weight versions) |",
            "|---:|---|",
            *(f"| {number} | {age} |" for age, number in found.ages.items()),
        ]
    if found.voided:
        page += ["", "## Undone by a resume", "", "| line | went back to | why | void lines | groups | trained | weight versions |"]
        page += ["|---:|---|---|---:|---:|---:|---|"]
    for void in found.voided:
        cells = [str(void.line), void.checkpoint or "the beginning", void.why, str(void.lines), str(void.groups)]
        cells += [str(void.trained), ", ".join(map(str, void.versions))]
        page.append(f"| {' | '.join(map(_plain, cells))} |")
    return "\n".join([*page, ""])


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line and one cell."""
    for special in "\\`*_{}[]<>#|~":
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())
