"""The automation that `make up` installs: a flow run that crashed is scheduled again, and goes on from its newest checkpoint.

    process killed ─► Crashed ─► automation ─► Scheduled (the same run) ─► worker ─► resume: auto

Prefect retries runs that fail, within their process; nothing of Prefect's starts a run again whose process is gone.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import AutomationCore, EventTrigger, Posture, ResourceSpecification
from prefect.events.actions import ChangeFlowRunState

NAME = "resume crashed runs"
_TAGS = ["prefect.tag.grpo", "prefect.tag.sft"]  # of deployments whose runs go on where they were


RESUME_CRASHED = AutomationCore(
    name=NAME,
    description="A run that trains and whose process died starts again, and goes on from its newest checkpoint (docs/reliability.md).",
    trigger=EventTrigger(
        expect={"prefect.flow-run.Crashed"},
        match=ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=ResourceSpecification.model_validate({"prefect.resource.role": "tag", "prefect.resource.id": _TAGS}),
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    ),
    actions=[ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message="It crashed, and goes on.")],
)


def install(client: SyncPrefectClient) -> None:
    """Create it, unless there is one of its name: what a person has changed or turned off stays so."""
    if not client.read_automations_by_name(NAME):
        client.create_automation(RESUME_CRASHED)
