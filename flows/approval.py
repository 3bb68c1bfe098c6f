"""A person has the last word: the run pauses, the UI shows a form, and the answer decides."""

from __future__ import annotations

from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.states import Running
from pydantic import Field

from configs.retrain import ApprovalConfig


class Approval(RunInput):
    """The form."""

    approve: bool = Field(description="Promote the new model?")
    note: str = Field("", description="Why; it is kept in the lineage.")


def ask_approval(question: str, config: ApprovalConfig) -> Approval | None:
    """Pause the flow run until a person answers. None: nobody did in time.

    Args:
        question: markdown above the form.
    """
    form = Approval.with_initial_data(description=question, approve=False)
    try:
        return pause_flow_run(wait_for_input=form, timeout=config.timeout_s, poll_interval=config.poll_s)
    except FlowPauseTimeout:
        # Prefect's server lets a run whose pause has timed out do nothing but fail, and no answer is no failure here.
        with get_client(sync_client=True) as client:
            run_id = UUID(str(runtime.flow_run.id))
            state = client.read_flow_run(run_id).state
            if state is not None and not (state.is_cancelled() or state.is_cancelling()):
                client.set_flow_run_state(run_id, Running(), force=True)
        return None
