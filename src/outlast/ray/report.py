"""The report of a recovery: who was lost, on what evidence, who was kept, and how long each phase took."""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = ["LossKind", "Lost", "RecoveryReport"]


class LossKind(StrEnum):
    """How an actor failed."""

    DIED = "died"
    """Its process or its node ended."""
    SILENT = "silent"
    """It did not answer: stopped, holding the interpreter's lock, or cut off."""
    HUNG = "hung"
    """It exceeded the timeout of a section, and the others waited for it."""
    STUCK = "stuck"
    """It did not leave the interrupted call, or did not join in time."""
    RAISED = "raised"
    """Its call raised; its process is kept."""


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Who failed, and how that is known."""

    rank: int
    node: str
    pid: int
    kind: LossKind
    evidence: str
    """For people."""
    detected_after_s: float | None = None
    """Seconds from its last sign of life, or from the begin of the section that it hung in; ``None``: not known."""


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tell what one recovery did."""

    incarnation: int
    """The one that it ended with."""
    method: str
    """The call that was interrupted; empty: none was."""
    lost: tuple[Lost, ...]
    """Who failed, failures within the recovery included; those that only raised were kept."""
    kept: dict[int, int]
    """Rank to process id of those that went on in their processes."""
    replaced: dict[int, int]
    """Rank to process id of those that took a seat."""
    loaded: tuple[int, ...]
    """Ranks that loaded their state; the others kept it."""
    generation: int | None
    """Iteration of the generation that was loaded; ``None``: nobody loaded."""
    begun_at: int | None
    """Iteration at which the interrupted call began; ``None``: the actors keep no state."""
    iteration: int | None
    """Iteration at which the group stands now."""
    mesh_before: dict[str, int]
    mesh_after: dict[str, int]
    rounds: int
    """Attempts; more than one where something failed within the recovery."""
    phases_s: dict[str, float]
    """Seconds by phase: ``detect`` (from the last sign of life to the evidence, where known), ``abort``, ``fill``,
    ``store``, ``join`` (which includes ``connect`` and ``load``, as the slowest actor measured them)."""
    total_s: float
    """Seconds from the evidence to the new incarnation."""
    repeated: bool
    """The interrupted call is repeated; else the group went back to another iteration, or there was no call."""

    def describe(self) -> str:
        """Return one line for people."""
        who = "; ".join(
            f"rank {one.rank} (pid {one.pid}, node {one.node[:8]}) {one.kind}: {one.evidence}" for one in self.lost
        )
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        kept = ", ".join(map(str, sorted(self.kept))) or "none"
        replaced = ", ".join(f"{rank} (pid {pid})" for rank, pid in sorted(self.replaced.items())) or "none"
        loaded = "nothing was loaded"
        if self.loaded:
            loaded = f"rank{'s' * (len(self.loaded) > 1)} {', '.join(map(str, self.loaded))} loaded"
        return (
            f"{who or 'nobody was lost'} -> ranks kept: {kept}; replaced: {replaced}; {loaded}; "
            f"iteration {self.iteration}; {self.total_s:.3f} s ({phases})"
        )
