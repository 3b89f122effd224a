"""Reports of a call of a wrapped function to the agent of the node and to the journal.

The agent reads a mark in the heartbeat memory; rank 0 of each call writes the journal's event.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from outlast import clock, env
from outlast.config.training import InProcessRestartConfig
from outlast.errors import OutlastError
from outlast.incidents import EventKind, IncidentKind
from outlast.policy import inprocess_protocol as p
from outlast.runtime.board import InProcessFault, InProcessMark
from outlast.runtime.journal import Journal

log = logging.getLogger(__name__)

_INCIDENTS = {
    p.RankFaultKind.EXCEPTION: IncidentKind.WORKER_FAILED,
    p.RankFaultKind.DIED: IncidentKind.WORKER_DIED,
    p.RankFaultKind.LINK_LOST: IncidentKind.WORKER_DIED,
    p.RankFaultKind.SOFT_TIMEOUT: IncidentKind.WORKER_HUNG,
    p.RankFaultKind.HARD_TIMEOUT: IncidentKind.WORKER_HUNG,
    p.RankFaultKind.COMPLETION_TIMEOUT: IncidentKind.WORKER_HUNG,
    p.RankFaultKind.BARRIER_TIMEOUT: IncidentKind.WORKER_HUNG,
}
_num_calls = 0


class StatusReporter:
    """Report the progress of one call of a wrapped function.

    Without an agent of ``outlast run`` and without a run directory the methods have no effect.

    Args:
        place: This process's place at its start.
        config: The settings.

    Thread: the main thread; no method blocks.
    """

    def __init__(self, place: env.WorkerEnv, config: InProcessRestartConfig) -> None:
        global _num_calls
        call, _num_calls = _num_calls, _num_calls + 1
        self._place = place
        self.call = call
        """Number of the process's call of a wrapped function, from 0."""
        self._ranks: Mapping[int, int | None] = {}
        self._left_s: float | None = None
        self._journal: Journal | None = None
        self._has_ended = False
        self._mark: InProcessMark | None = None
        if place.board is not None:
            try:
                self._mark = InProcessMark(place.board, place.local_rank)
                self._mark.arm(call, patience_s=config.barrier_timeout + config.hard_timeout)
            except OutlastError as error:
                log.warning("restarts in process cannot be reported to the node's agent: %s", error)
        if call == 0 and place.is_first:
            _log_what_the_launcher_allows(place.launcher)

    def begin(self, go: p.Go) -> None:
        rank = go.ranks.get(self._place.global_rank)
        state = p.InProcessState.SPARE if rank is None else p.InProcessState.ACTIVE
        self._set(state, go.restart_count, go.faults)
        if go.restart_count > 0 and rank == 0:
            self._write_restarted(go)
        self._ranks, self._left_s = go.ranks, None

    def restart(self, restart_count: int, faults: Iterable[p.RankFault] = ()) -> None:
        if self._left_s is None:
            self._left_s = clock.now_s()
        self._set(p.InProcessState.RESTARTING, restart_count, faults)

    def complete(self) -> None:
        self._set(p.InProcessState.COMPLETED)

    def finish(self) -> None:
        self._has_ended = True
        self._set(p.InProcessState.RETURNED)

    def leave(self, exit_code: int) -> None:
        """Report that this rank is permanently removed and about to exit, and that its peers resume."""
        self._has_ended = True
        if self._mark is not None:
            self._mark.set_leaving(exit_code)
        self._set(p.InProcessState.LEFT)

    def close(self) -> None:
        """Report that the call failed, unless its end was reported; idempotent."""
        if self._mark is not None:
            if not self._has_ended:
                self._set(p.InProcessState.GAVE_UP)
            self._mark.close()
            self._mark = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _set(
        self, state: p.InProcessState, restart_count: int | None = None, faults: Iterable[p.RankFault] = ()
    ) -> None:
        if self._mark is not None:
            self._mark.set(state, restart_count, _for_agent(faults))

    def _write_restarted(self, go: p.Go) -> None:
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
            faults=[{"rank": one.initial_rank, "kind": one.kind, "summary": one.text} for one in go.faults],
            active_world_size=go.active_world_size,
            replaced={rank: after[rank] for rank in sorted(before.keys() & after) if before[rank] != after[rank]},
            duration_s=None if self._left_s is None else round(clock.now_s() - self._left_s, 6),
        )


def _for_agent(faults: Iterable[p.RankFault]) -> list[InProcessFault]:
    """Return faults as the agent reads them, possible root causes first."""
    ranked = sorted(faults, key=lambda fault: (fault.is_consequence, fault.is_victims))
    return [
        InProcessFault(
            rank=fault.initial_rank,
            kind=_INCIDENTS[fault.kind],
            summary=fault.text,
            is_consequence=fault.is_consequence,
        )
        for fault in ranked
    ]


def _log_what_the_launcher_allows(launcher: str) -> None:
    if launcher == "torchrun" and env.environ().get("TORCHELASTIC_RUN_ID"):
        log.warning(
            "torchrun ends all ranks when one process ends: exceptions, and hangs that can be interrupted, are "
            "recovered in process, but a rank that dies is not; outlast run keeps the others and takes the same options"
        )
    elif launcher == "srun":
        log.warning(
            "srun may end the step when a task is killed, unless it is started with --kill-on-bad-exit=0 --wait=0 "
            "--no-kill: only then are ranks that die replaced in process"
        )
