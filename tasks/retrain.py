"""find-new-prompts, promote, keep: the steps of a night that are not flows of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas import State
from prefect.states import Completed

from configs.environment import FieldsConfig
from tasks import events
from tasks.call import STAGE
from tasks.retraining.lease import Lease
from tasks.retraining.prompts import NewPrompts, Row, find_new, read_files, read_frozen
from tasks.retraining.registry import Attempt, Promotion, Registry
from tasks.retraining.storage import Content


@dataclass(frozen=True)
class Found:
    """What a night begins with: the promoted model, the frozen set, and what is new since that model."""

    parent: Promotion | None
    frozen: tuple[Row, ...]
    new: NewPrompts


@task(name="find-new-prompts", task_run_name="find-new-prompts", **STAGE)
def find_new_prompts(registry_url: str, data_url: str, frozen_url: str, fields: FieldsConfig) -> Found:
    """Read registry, frozen set and data.

    Raises:
        ConfigError: one of them cannot be reached, is damaged, or the promoted model has vanished.
    """
    return look(registry_url, data_url, frozen_url, fields)


def look(registry_url: str, data_url: str, frozen_url: str, fields: FieldsConfig) -> Found:
    """`find_new_prompts` outside a flow."""
    registry = Registry(registry_url)
    parent = registry.current()
    if parent is not None:
        registry.check_model(parent)
    frozen = tuple(read_frozen(frozen_url, fields))
    consumed: Mapping[str, Content] = parent.consumed if parent else {}
    return Found(parent, frozen, find_new(read_files(data_url), consumed, {row.digest for row in frozen}, fields))


@task(name="promote", task_run_name="promote", **STAGE)
def promote(registry_url: str, candidate: str, attempt: Attempt, consumed: Mapping[str, Content], lease: Lease, keep: int) -> Promotion:
    """The new model takes the old one's place; automations hear of it.

    Raises:
        PromotionConflictError, LeaseLostError: another run was here meanwhile; nothing was promoted.
    """
    promotion = Registry(registry_url).promote(Path(candidate), attempt, consumed, lease, keep)
    events.promoted(registry_url, promotion.model_dump(mode="json", exclude={"files", "consumed"}))
    return promotion


@task(name="keep", task_run_name="keep-the-old-model", **STAGE)
def keep_old(registry_url: str, attempt: Attempt) -> State:
    """The old model stays; the same is not tried again."""
    Registry(registry_url).reject(attempt)
    return Completed(name="Kept", message=attempt.reason)


def publish_comparison(markdown: str, description: str) -> None:
    """The page in the UI. Call inside the flow."""
    create_markdown_artifact(markdown=markdown, key="retrain-comparison", description=description)
