"""What a rank reports beyond its peers: to the agent of its node, the journal, and the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from outlast import clock, env
from outlast.config.training import InProcessRestartConfig
from outlast.errors import OutlastError
from outlast.incidents import EventKind, IncidentKind
from outlast.inprocess import protocol as m
from outlast.policy.inprocess_protocol import InProcessState
from outlast.runtime.board import InProcessFault, InProcessMark
from outlast.runtime.journal import Journal

__all__ = ["StatusReporter"]


log = logging.getLogger(__name__)

_HUNG = (
    m.RankFaultKind.SOFT_TIMEOUT,
    m.RankFaultKind.HARD_TIMEOUT,
    m.RankFaultKind.COMPLETION_TIMEOUT,
    m.RankFaultKind.BARRIER_TIMEOUT,
)
_num_calls = 0


class StatusReporter:
    """Report how one call of a wrapped function goes.

    Without an agent of ours and without a run directory there is nobody to report to; the calls then do nothing.

    Args:
        place: This process's place at its start.
        config: The settings.

    Thread: the main thread; nothing here blocks.
    """

    def __init__(self, place: env.WorkerEnv, config: InProcessRestartConfig) -> None:
        global _num_calls
        call, _num_calls = _num_calls, _num_calls + 1
        self._place = place
        self._ranks: Mapping[int, int | None] = {}
        self._left_s: float | None = None
        self._journal: Journal | None = None
        self._has_ended = False
        self._mark = self._open_mark()
        if self._mark is not None:
            self._mark.arm(call, patience_s=config.barrier_timeout + config.hard_timeout)
        if call == 0 and place.is_first:
            _say_what_the_launcher_allows(place.launcher)

    def begin(self, go: m.Go) -> None:
        """Report that a call begins, which this rank takes part in or waits through as a spare."""
        rank = go.ranks.get(self._place.global_rank)
        if self._mark is not None:
            state = InProcessState.SPARE if rank is None else InProcessState.ACTIVE
            self._mark.set(state, go.restart_count, _for_agent(go.faults))
        if go.restart_count > 0 and rank == 0:
            self._write_restarted(go)
        self._ranks, self._left_s = go.ranks, None

    def restart(self, restart_count: int, faults: Iterable[m.RankFault] = ()) -> None:
        """Report that the running call is left, for the one named."""
        if self._left_s is None:
            self._left_s = clock.now_s()
        if self._mark is not None:
            self._mark.set(InProcessState.RESTARTING, restart_count, _for_agent(faults))

    def complete(self) -> None:
        """Report that the function returned here."""
        if self._mark is not None:
            self._mark.set(InProcessState.COMPLETED)

    def finish(self) -> None:
        """Report that it returned on all active ranks."""
        self._has_ended = True
        if self._mark is not None:
            self._mark.set(InProcessState.RETURNED)

    def leave(self) -> None:
        """Report that this rank is permanently removed, and its peers resume."""
        self._has_ended = True
        if self._mark is not None:
            self._mark.set(InProcessState.LEFT)

    def close(self) -> None:
        """Report, unless the call came to one of the ends above, that it was given up; idempotent."""
        if self._mark is not None:
            if not self._has_ended:
                self._mark.set(InProcessState.GAVE_UP)
            self._mark.close()
            self._mark = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _open_mark(self) -> InProcessMark | None:
        if self._place.board is None:
            return None
        try:
            return InProcessMark(self._place.board, self._place.local_rank)
        except OutlastError as error:
            log.warning("restarts in process cannot be reported to the node's agent: %s", error)
            return None

    def _write_restarted(self, go: m.Go) -> None:
        place = self._place
        if self._journal is None:
            name = f"inprocess-{place.global_rank}"
            try:
                self._journal = Journal(place.run_dir, run_id=place.run_id, job=place.job, node=place.node, proc=name)
            except OSError as error:
                log.warning("restarts in process are not written to the journal: %s", error)
                return
        before = {rank: initial for initial, rank in self._ranks.items() if rank is not None}
        after = {rank: initial for initial, rank in go.ranks.items() if rank is not None}
        self._journal.write(
            EventKind.RESTARTED_IN_PROCESS,
            cycle=place.cycle,
            rank=0,
            restart_iteration=go.restart_count,
            faults=[{"rank": one.initial_rank, "kind": one.kind, "summary": one.summary} for one in go.faults],
            active_world_size=go.active_world_size,
            replaced={rank: after[rank] for rank in sorted(before.keys() & after) if before[rank] != after[rank]},
            duration_s=None if self._left_s is None else round(clock.now_s() - self._left_s, 6),
        )


def _for_agent(faults: Iterable[m.RankFault]) -> list[InProcessFault]:
    """Return faults as the agent knows them, what may be a cause first: who waits for a rank that hangs hangs, too."""
    ranked = sorted(faults, key=lambda fault: (fault.is_consequence, fault.is_victims))
    return [
        InProcessFault(
            rank=fault.initial_rank,
            kind=_kind(fault.kind),
            summary=fault.summary or str(fault.kind).replace("_", " "),
            is_consequence=fault.is_consequence,
        )
        for fault in ranked
    ]


def _kind(kind: m.RankFaultKind) -> IncidentKind:
    if kind in _HUNG:
        return IncidentKind.WORKER_HUNG
    dead = kind in (m.RankFaultKind.DIED, m.RankFaultKind.LINK_LOST)
    return IncidentKind.WORKER_DIED if dead else IncidentKind.WORKER_FAILED


def _say_what_the_launcher_allows(launcher: str) -> None:
    if launcher == "torchrun" and env.environ().get("TORCHELASTIC_RUN_ID"):
        log.warning(
            "torchrun ends all ranks when one process ends: exceptions, and hangs that can be interrupted, are "
            "recovered in process, but a rank that dies is not; outlast run keeps the others and takes the same options"
        )
    elif launcher == "srun":
        log.warning(
            "srun ends the step when a task is killed, unless it is started with --kill-on-bad-exit=0 and --no-kill: "
            "only then are ranks that die replaced in process"
        )
