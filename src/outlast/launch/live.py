"""How a job is, as its coordinator says: one small JSON document in the control store, for whoever asks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from outlast.decoding import json_decoder
from outlast.errors import RendezvousError
from outlast.policy.ladder import LadderState, Limits

if TYPE_CHECKING:
    from outlast.launch.coordinator import Coordinator

__all__ = ["STATUS_KEY", "LiveBudgets", "LiveLack", "LiveNode", "LiveStatus", "decode_live", "describe_live"]

STATUS_KEY = "status"
"""Where the document lies in the control store."""


class LiveNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node that is there."""

    name: str
    slot: int | None = None
    """The slot that it holds; ``None``: it holds none."""
    first_rank: int | None = None
    nproc: int = 0
    ready: bool = False
    """It waits for a cycle; otherwise it is in one."""


class LiveLack(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are waited for."""

    num_missing: int
    num_needed: int
    waited_s: float
    gives_up_in_s: float


class LiveBudgets(msgspec.Struct, frozen=True, kw_only=True):
    """What was tried, and what is allowed."""

    restarts_without_progress: int = 0
    max_restarts: int = 0
    restarts_total: int = 0
    max_restarts_total: int | None = None
    cycles_without_progress: int = 0
    max_no_progress_cycles: int = 0
    progress_known: bool = False

    @classmethod
    def of(cls, state: LadderState, limits: Limits) -> LiveBudgets:
        """Return the budgets in a ladder's state."""
        return cls(
            restarts_without_progress=state.restarts_without_progress,
            max_restarts=limits.max_restarts,
            restarts_total=state.restarts_total,
            max_restarts_total=limits.max_restarts_total,
            cycles_without_progress=state.cycles_without_progress,
            max_no_progress_cycles=limits.max_no_progress_cycles,
            progress_known=state.progress_known,
        )


class LiveStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job at one moment."""

    time: str
    """When this was written, ISO 8601 in UTC."""
    run_id: str
    job: str
    host: str
    """Node that hosts the coordinator."""
    run_dir: str | None = None
    """Run directory, as the host names it."""
    phase: str
    """One of :class:`outlast.launch.coordinator.JobPhase`."""
    cycle: int
    nodes: tuple[LiveNode, ...] = ()
    num_slots: int = 0
    lack: LiveLack | None = None
    """``None``: no node is waited for."""
    budgets: LiveBudgets = LiveBudgets()
    best_durable: int | None = None
    quarantined: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()
    exit_code: int | None = None
    """Of the job, once it is over."""
    reason: str | None = None

    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)


def decode_live(data: bytes) -> LiveStatus:
    """Return what a coordinator wrote.

    Raises:
        RendezvousError: It is something else.
    """
    try:
        status: LiveStatus = json_decoder(LiveStatus).decode(data)
    except msgspec.DecodeError as error:
        raise RendezvousError(f"its status cannot be read ({error}); use the version of outlast that runs it") from None
    return status


def describe_live(
    coordinator: Coordinator, now_s: float, *, time: str, run_id: str, run_dir: Path | None, host: str
) -> LiveStatus:
    """Return how a coordinator's job is now.

    Args:
        coordinator: The coordinator; asked in its own thread.
        now_s: Monotonic seconds.
        time: The same moment for people.
        run_id: Name of the run.
        run_dir: The run directory on this node.
        host: This node's name.
    """
    nodes, state, lack, stop = coordinator.nodes, coordinator.state, coordinator.lack(now_s), coordinator.stop
    place: dict[str, tuple[int, int]] = {}
    first_rank = 0
    for index, slot in enumerate(nodes.slots):
        if slot.holder is not None:
            place[slot.holder] = index, first_rank
        first_rank += slot.nproc or 0
    return LiveStatus(
        time=time,
        run_id=run_id,
        job=coordinator.settings.job,
        host=host,
        run_dir=None if run_dir is None else str(run_dir),
        phase=str(coordinator.phase),
        cycle=coordinator.cycle,
        nodes=tuple(
            LiveNode(
                name=node.name,
                slot=place.get(node.name, (None, None))[0],
                first_rank=place.get(node.name, (None, None))[1],
                nproc=node.candidate.nproc,
                ready=node.ready,
            )
            for node in nodes
        ),
        num_slots=len(nodes.slots),
        lack=None
        if lack is None
        else LiveLack(
            num_missing=lack.num_missing,
            num_needed=lack.num_needed,
            waited_s=round(lack.waited_s, 1),
            gives_up_in_s=round(lack.gives_up_in_s, 1),
        ),
        budgets=LiveBudgets.of(state, coordinator.settings.limits),
        best_durable=state.best_durable,
        quarantined=state.quarantined,
        held_back=state.held_back,
        exit_code=None if stop is None else stop.exit_code,
        reason=None if stop is None else stop.reason,
    )
