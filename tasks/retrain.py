"""find-new-prompts, promote, keep: the steps of a night that are not flows of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.client.schemas import State
from prefect.states import Completed

from actors.storage import Content
from configs.environment import FieldsConfig
from configs.retrain import RegistryConfig, RetrainConfig
from tasks import events
from tasks.call import STAGE
from tasks.lease import Lease
from tasks.retraining.prompts import NewPrompts, Row, find_new, read_files, read_frozen
from tasks.retraining.registry import Attempt, Promotion, Registry


@dataclass(frozen=True)
class Found:
    """What a night begins with: the promoted model, the frozen set, and what is new since that model."""

    parent: Promotion | None
    frozen: tuple[Row, ...]
    new: NewPrompts

    @property
    def number(self) -> int | None:
        """Of the promoted model, if there is one."""
        return self.parent.number if self.parent else None


@task(name="find-new-prompts", task_run_name="find-new-prompts", **STAGE)
def find_new_prompts(config: RetrainConfig, fields: FieldsConfig) -> Found:
    """Read registry, frozen set and data.

    Raises:
        ConfigError: one of them cannot be reached, is damaged, or the promoted model has vanished.
    """
    registry = Registry(config.registry.url)
    parent = registry.current()
    if parent is not None:
        registry.check_model(parent)
    frozen = tuple(read_frozen(config.frozen_set.url, fields))
    consumed = parent.consumed if parent else {}
    return Found(parent, frozen, find_new(read_files(config.data.url), consumed, {row.digest for row in frozen}, fields))


@task(name="promote", task_run_name="promote", **STAGE)
def promote(config: RegistryConfig, candidate: str, attempt: Attempt, consumed: Mapping[str, Content], lease: Lease) -> Promotion:
    """The new model takes the old one's place; automations hear of it.

    Raises:
        PromotionConflictError, LeaseLostError: another run was here meanwhile; nothing was promoted.
    """
    registry = Registry(config.url)
    promotion = registry.promote(Path(candidate), attempt, consumed, lease, config.keep_models)
    events.promoted(registry.folder.url, promotion.model_dump(mode="json", exclude={"files", "consumed"}))
    return promotion


@task(name="keep", task_run_name="keep-the-old-model", **STAGE)
def keep_old(config: RegistryConfig, attempt: Attempt) -> State:
    """The old model stays; the same is not tried again."""
    Registry(config.url).reject(attempt)
    return Completed(name="Kept", message=attempt.reason)
