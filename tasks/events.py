"""Events that automations can trigger on."""

from __future__ import annotations

from prefect.events import emit_event

from tasks.retraining.registry import Promotion


def model_promoted(registry_url: str, promotion: Promotion) -> None:
    """`model.promoted`: a model took the old one's place. The payload is its lineage, without the list of files and of consumed data."""
    emit_event(
        event="model.promoted",
        resource={
            "prefect.resource.id": f"grpo-flows.registry.{registry_url}",
            "prefect.resource.name": registry_url,
            "grpo-flows.model": promotion.model,
        },
        payload={"registry": registry_url, **promotion.model_dump(mode="json", exclude={"files", "consumed"})},
    )
