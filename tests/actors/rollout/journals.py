"""Journals for the tests: a life in memory, and the lives that the real ledger leads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from actors.data_plane.meta import KVBatchMeta
from actors.rollout.journal import Began, Cut, Finished, Line, Record, Resumed, as_record
from actors.rollout.ledger import Ledger
from actors.rollout.staleness import build
from actors.rollout.transitions import Admitted, Transition
from configs.staleness import AsyncConfig

ROWS = 2


def meta_of(keys: Sequence[str]) -> KVBatchMeta:
    return KVBatchMeta(partition_id="train", keys=tuple(keys))


def began(sampler: str = "windowed", max_age: int = 1, version: int = 0) -> Began:
    return Began("run-1", "digest", sampler, max_age, 2, version)


def written(records: Iterable[Record | Transition]) -> bytes:
    """A journal of these, a line each."""
    text, prev = [], ""
    for n, record in enumerate(records):
        line, prev = Line(n, n / 4, as_record(record), prev).encoded()
        text.append(line)
    return b"".join(text)


def life(
    seed: int, sampler: str, *, turns: int = 40, max_age: int = 1, finishes: bool = True, resumes: bool = True
) -> list[Record | Transition]:
    """What a ledger's journal holds that was driven at random, with cuts, returns to a cut, and groups issued again after them."""
    luck = Random(seed)
    found: list[Record | Transition] = [began(sampler, max_age)]
    config = AsyncConfig(max_trajectory_age_steps=max_age, sampler=sampler)

    def fresh() -> Ledger:
        return Ledger(
            build(config, 2), capacity=config.capacity(2), max_in_flight=config.capacity(2), version=0, clear=lambda keys: None,
            clock=lambda: 0.0, journal=found.extend,
        )  # fmt: skip

    ledger = fresh()
    saved = [(0, "", ledger.state(), 0)]
    number = 0
    for turn in range(turns):
        now = ledger.state()
        held = {state: [group for group in now["groups"] if group["state"] == state] for state in ("in_flight", "cancelled", "claimed")}
        held["flying"] = held["in_flight"] + held["cancelled"]
        match luck.choice(
            ["reserve"] * 3 + ["commit"] * 3 + ["fail", "claim", "claim", "trained", "release", "drop", "announce", "cut", "back"]
        ):
            case "reserve":
                number += isinstance(ledger.reserve(str(number), ROWS), Admitted)
            case "commit" if held["flying"]:
                group = luck.choice(held["flying"])
                ledger.commit(group["uid"], meta_of(group["keys"]), group["start_version"], now["version"])
            case "fail" if held["flying"]:
                ledger.fail(luck.choice(held["flying"])["uid"], "unlucky")
            case "claim":
                ledger.claim(luck.choice([1, 2]))
            case "trained" if held["claimed"]:
                ledger.trained([luck.choice(held["claimed"])["uid"]])
            case "release" if held["claimed"]:
                ledger.release([luck.choice(held["claimed"])["uid"]])
            case "drop" if held["claimed"]:
                ledger.drop([luck.choice(held["claimed"])["uid"]], "zero_variance")
            case "announce":
                ledger.set_version(now["version"] + 1)
            case "cut":
                saved.append((len(found), f"step-{turn:06d}", now, number))
                found.append(Cut(turn, saved[-1][1], now["version"]))
            case "back" if resumes and luck.random() < 0.5:
                # Mostly the newest; an older one now and then, after which the newer ones are void, and may be come back to all the same.
                after, name, state, number = saved[-1] if luck.random() < 0.8 else luck.choice(saved)
                found += [Resumed(after, name, "the collector died"), began(sampler, max_age, state["version"])]
                ledger = fresh()
                ledger.restore(state)
                ledger.reissue({group["uid"]: group["start_version"] for group in state["groups"] if luck.random() < 0.5})
    if finishes:
        ledger.clear()
        found.append(Finished())
    return found
