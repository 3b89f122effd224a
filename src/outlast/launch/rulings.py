"""Rulings: what the ladder decides in a job, remembered before anybody hears of it, and written down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from outlast.incidents import EventKind, Rung, Verdict
from outlast.launch.ending import copy_untrusted
from outlast.policy import ladder
from outlast.policy.ladder import CycleEnd, LadderState, Limits
from outlast.policy.quarantine import Distrusted

__all__ = ["Record", "Rulings"]

log = logging.getLogger(__name__)

Record = Callable[[EventKind, int, dict[str, object]], None]
"""Takes an event for the journal: kind, cycle, data."""


class Rulings:
    """Ask the ladder.

    Args:
        state: What it remembers of the run.
        limits: What is allowed.
        record: Called with every event for the journal.
        remember: Called with the new state whenever it changed.
        tell_time: Returns the time for people, as the journal writes it; no decision reads it.

    Thread: the coordinator's.
    """

    def __init__(
        self,
        state: LadderState,
        limits: Limits,
        *,
        record: Record,
        remember: Callable[[LadderState], None],
        tell_time: Callable[[], str] = str,
    ) -> None:
        self.state, self.limits = state, limits
        self._record, self._remember, self._tell_time = record, remember, tell_time

    def rule(self, end: CycleEnd) -> Verdict:
        """Return the verdict on a cycle's end, or on what its workers went on after."""
        before = self.state.distrusted
        state, verdict = ladder.decide(self.state, end, self.limits)
        state = self._with_time(state)
        self._keep(state)
        for one in state.distrusted:
            if one not in before and not one.settled:
                self._record(EventKind.INCIDENT, end.cycle, {"incident": copy_untrusted(one, end.incident)})
        data: dict[str, object] = {"verdict": verdict}
        if end.incident is not None:
            data["incident"] = end.incident
            # A job's last line says why it stops.
            level = logging.DEBUG if verdict.rung == Rung.STOP else logging.WARNING
            what = "continues" if verdict.rung == Rung.RESTART_IN_PROCESS else "ended"
            log.log(level, "cycle %d %s: %s", end.cycle, what, verdict.reason)
        self._record(EventKind.VERDICT, end.cycle, data)
        return verdict

    def would_replace(self, end: CycleEnd) -> bool:
        """Return whether the node would be replaced if a cycle ended so; nothing is decided by asking."""
        return ladder.decide(self.state, end, self.limits)[1].rung == Rung.REPLACE_NODE

    def bar(self, node: str) -> None:
        """Give a node no slot any more in this job."""
        if node not in self.state.quarantined:
            self._keep(msgspec.structs.replace(self.state, quarantined=(*self.state.quarantined, node)))

    def admit(self, node: str) -> None:
        """Take back that a node was barred."""
        if node in self.state.quarantined:
            others = tuple(name for name in self.state.quarantined if name != node)
            self._keep(msgspec.structs.replace(self.state, quarantined=others))

    def drop_replay(self, why: str) -> None:
        """Let the next cycle train as usual, because the node that was to replay is gone."""
        log.warning("%s: the next cycle trains without the replay", why)
        self._keep(ladder.drop_replay(self.state))

    def learn_distrusted(self, told: Sequence[Distrusted]) -> None:
        """Take over what an agent was told not to load by a coordinator whose memory may be out of reach."""
        known = {(one.attempt, one.tier) for one in self.state.distrusted}
        if new := tuple(one for one in told if (one.attempt, one.tier) not in known):
            self._keep(msgspec.structs.replace(self.state, distrusted=self.state.distrusted + new))

    def _with_time(self, state: LadderState) -> LadderState:
        """Return the state with the time at its newest step, if that is new."""
        if not state.history or state.history[-1].time or state.history == self.state.history:
            return state
        newest = msgspec.structs.replace(state.history[-1], time=self._tell_time())
        return msgspec.structs.replace(state, history=(*state.history[:-1], newest))

    def _keep(self, state: LadderState) -> None:
        self.state = state
        self._remember(state)
