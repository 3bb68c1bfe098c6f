"""Which engines serve, and how one that was lost comes back. Pure: no Ray; the clock is given.

    healthy ──lost──► dead ──► restarting ──its vLLM is up──► stale ──a refit gave it weights──► healthy
                       ▲ └ killed, when it hangs ┘  └ too slow: killed again       (an engine that says that it is not stale)
                       └──────── lost ◄─────────────── from any of them; out of restarts ──► given up, for good

What an engine says of itself counts (`EngineHealth`): a process that Ray started again calls itself stale until an update of the weights
has succeeded in it. So no refit that did not contain it, or that began before it was there, can make it serve. Only engines that were
lost are asked; those that serve are watched by the calls that they answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.generation.types import EngineHealth

Standing = Literal["healthy", "dead", "restarting", "stale", "given_up"]
Verdict = Literal["", "restart", "end"]  # nothing; kill its process, and Ray starts it again; kill it for good

MOST_FAILURES = 5  # kills in a row, without serving between them, until an engine is given up
_ASK_EVERY_S = 1.0
_BACK_OFF_S = 5.0  # between the second kill and the third; doubles
_LONGEST_BACK_OFF_S = 60.0


@dataclass(frozen=True)
class Change:
    """An engine is lost, is back, or will not come back. `reason` says why; empty when it is back."""

    engine: str
    standing: Standing
    reason: str = ""


@dataclass
class _Member:
    standing: Standing = "healthy"
    incarnation: str = ""  # of the process that we know; empty: none yet
    condemned: str = ""  # a process that must not serve again
    reason: str = ""  # of the loss
    hangs: bool = False  # lost by silence: if it stays silent it must be killed, while a process that ended is being restarted
    since: float = 0.0  # when the present wait for it began
    failures: int = 0
    next_kill: float = 0.0
    next_question: float = 0.0


class Fleet:
    """Invariant: every engine that is lost becomes healthy again or is given up, as long as it is asked when `due` and refits go on.

    Attributes:
        restarts: fresh processes of lost engines seen so far.
    """

    def __init__(self, engines: Sequence[str], restart_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            restart_s: longest wait for an engine's process and its vLLM to start; it is killed then.
        """
        self._members = {name: _Member() for name in engines}
        self._restart_s, self._clock = restart_s, clock
        self._changes: list[Change] = []
        self.restarts = 0

    def standing(self, name: str) -> Standing:
        """Of one engine."""
        return self._members[name].standing

    def incarnation(self, name: str) -> str:
        """Of the engine's process, as far as known."""
        return self._members[name].incarnation

    def reason(self, name: str) -> str:
        """Why the engine was lost."""
        return self._members[name].reason

    @property
    def returning(self) -> list[str]:
        """Engines that do not serve, but may do so again."""
        return [name for name, member in self._members.items() if member.standing in ("dead", "restarting", "stale")]

    @property
    def stale(self) -> list[str]:
        """Engines that wait for a refit."""
        return [name for name, member in self._members.items() if member.standing == "stale"]

    def changes(self) -> list[Change]:
        """Engines lost, back, and given up since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def due(self) -> list[str]:
        """Engines to ask for their health now; the answer goes to `answered`, its absence to `unanswered`."""
        now = self._clock()
        names = [name for name in self.returning if self._members[name].next_question <= now]
        for name in names:
            self._members[name].next_question = now + _ASK_EVERY_S
        return names

    def seen(self, name: str, incarnation: str) -> bool:
        """A healthy engine took work in this process. False: it is another than before, so it has lost what it had."""
        member = self._members[name]
        if member.incarnation in ("", incarnation):
            member.incarnation = incarnation
            return True
        return False

    def lost(self, name: str, reason: str, *, gone: bool = False, hangs: bool = False) -> None:
        """A call has failed. The first reason of a loss stays.

        Args:
            gone: Ray will not start it again. hangs: it was silent, or its process lives and does not work.
        """
        member = self._members[name]
        if member.standing == "given_up":
            return
        if member.standing == "healthy":
            member.reason, member.failures, member.next_kill = reason, 0, 0.0
            self._changes.append(Change(name, "dead", reason))
        if gone:
            self._give_up(name, reason)
            return
        member.standing, member.hangs, member.condemned = "dead", hangs, member.incarnation
        member.since = member.next_question = self._clock()

    def answered(self, name: str, health: EngineHealth) -> Verdict:
        """What a lost engine says of itself. Returns what must be done with its process."""
        member = self._members[name]
        if member.standing in ("healthy", "given_up"):
            return ""
        if health.incarnation not in (member.incarnation, member.condemned):
            member.incarnation, member.since, member.condemned = health.incarnation, self._clock(), ""
            self.restarts += 1
        if health.state in ("failed", "stopped"):
            member.standing, member.condemned = "dead", health.incarnation
            return self._kill_later(name, health.failure)
        if member.condemned and health.incarnation == member.condemned:
            return self._kill(name, "its process lived on")
        member.hangs = False
        if health.state == "new":
            member.standing = "restarting"
            return self._kill_later(name, f"vLLM was not ready within {self._restart_s:.0f} s") if self._overdue(member) else ""
        if health.stale:
            member.standing = "stale"
        else:
            self._serves(name)
        return ""

    def unanswered(self, name: str, *, ended: bool, gone: bool = False) -> Verdict:
        """A lost engine has not said anything. Returns what must be done with its process.

        Args:
            ended: Ray says that its process ended; otherwise it was silent. gone: and that there will be no other.
        """
        member = self._members[name]
        if member.standing in ("healthy", "given_up"):
            return ""
        if gone:
            self._give_up(name, member.reason)
            return ""
        if member.standing == "stale" and not ended:
            member.standing, member.hangs = "dead", True
        elif ended:
            member.standing, member.hangs = "restarting", False
        if member.hangs:
            return self._kill(name, "it hung")
        return self._kill_later(name, f"silent for {self._restart_s:.0f} s") if self._overdue(member) else ""

    def refitted(self, name: str, incarnation: str) -> None:
        """A refit that found the engine as this process has succeeded in it. Nothing if it was lost since."""
        member = self._members[name]
        if member.standing in ("healthy", "stale") and member.incarnation in ("", incarnation):
            member.incarnation = incarnation
            self._serves(name)

    def _serves(self, name: str) -> None:
        member = self._members[name]
        if member.standing != "healthy":
            self._changes.append(Change(name, "healthy"))
        member.standing, member.reason, member.failures, member.condemned = "healthy", "", 0, ""

    def _overdue(self, member: _Member) -> bool:
        return self._clock() - member.since > self._restart_s

    def _kill_later(self, name: str, why: str) -> Verdict:
        """Of a process that cannot serve: not sooner after the last one than the back-off says."""
        return self._kill(name, why) if self._clock() >= self._members[name].next_kill else ""

    def _kill(self, name: str, why: str) -> Verdict:
        """At once: the process might yet serve with weights that it missed."""
        member, now = self._members[name], self._clock()
        if member.failures == MOST_FAILURES:
            self._give_up(name, f"{member.reason}; it did not come back, {MOST_FAILURES} times in a row (last: {why})")
            return "end"
        member.failures += 1
        member.next_kill = now + (min(_LONGEST_BACK_OFF_S, _BACK_OFF_S * 2 ** (member.failures - 2)) if member.failures > 1 else 0.0)
        member.standing, member.hangs, member.since = "restarting", False, now
        return "restart"

    def _give_up(self, name: str, reason: str) -> None:
        self._members[name].standing, self._members[name].reason = "given_up", reason
        self._changes.append(Change(name, "given_up", reason))
