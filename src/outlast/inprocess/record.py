"""A member's record of what it was ordered and what it reported, so that a new hub or monitor process can go on.

Nothing here imports torch.
"""

from __future__ import annotations

import msgspec

from outlast.policy.restart_orders import Completed, Fault, Go, Left, Order, Ready, Report, Restart, Standing

__all__ = ["Record"]


class Record:
    """Note orders and reports; say where the member stands.

    Args:
        standing: Where it stood before.
    """

    def __init__(self, standing: Standing | None = None) -> None:
        self.standing = Standing() if standing is None else standing

    def reports(self) -> tuple[Report, ...]:
        """Return what the rank reported that may still matter; a hub may hear it twice."""
        standing = self.standing
        completed = () if standing.completed < 0 else (Completed(iteration=standing.completed),)
        ready = () if standing.ready is None else (standing.ready,)
        return (*standing.faults, *completed, *ready)

    def note_order(self, order: Order) -> None:
        """Note an order that the rank got."""
        match order:
            case Go():
                self.standing = msgspec.structs.replace(
                    self.standing,
                    iteration=order.iteration,
                    ranks=order.ranks,
                    fault_counts=order.fault_counts,
                    ready=None,
                    faults=(),
                )
            case Restart():
                self.standing = msgspec.structs.replace(self.standing, restart=order.iteration)

    def note_report(self, report: Report) -> None:
        """Note what the rank reported."""
        match report:
            case Ready():
                self.standing = msgspec.structs.replace(self.standing, ready=report)
            case Completed():
                self.standing = msgspec.structs.replace(self.standing, completed=report.iteration)
            case Fault() if len(self.standing.faults) < 8:
                self.standing = msgspec.structs.replace(self.standing, faults=(*self.standing.faults, report))
            case Left():
                pass  # its own last words; see Reconnect
