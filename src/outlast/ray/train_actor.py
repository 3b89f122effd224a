"""What a user's actor derives from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from outlast.errors import OutlastError
from outlast.ray.mesh import MeshRank

if TYPE_CHECKING:
    import torch
    import torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.checkpoint import SaveHandle
    from outlast.monitor.rank_monitor import SectionTimer
    from outlast.ray.seat import Seat

__all__ = ["TrainActor"]


class TrainActor:
    """Train as one rank of an :class:`~outlast.ray.ActorGroup`.

    ``__init__`` runs in spares, too: imports and data belong there, there are no groups and no rank yet. Everything
    else, and ``__init__`` where all begin anew, runs in one thread of the actor, which is not the main one.

    An exception leaves a call with the state as it was, unless it went through :meth:`update`. What is part of
    :meth:`state` must therefore change within ``update`` alone.
    """

    _seat: Seat | None = None

    # -- to be overridden --------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Make model, optimizer and the like; called once, when the actor has its place.

        Those that replace dead actors are set up alone: nothing in here may wait for other ranks. Where all have to
        begin anew, a new object is made and set up in each process.
        """

    def regroup(self) -> None:
        """Make what holds process groups, such as ``DistributedDataParallel``.

        Called in each incarnation, the first included, on every rank, once it has the state that all go on from.
        """

    def state(self) -> Mapping[str, Any]:
        """Return what is saved and loaded, by name: modules, optimizers, tensors, plain values, mappings of these.

        The same names on every rank; nothing = this group has no state to lose.
        """
        return {}

    def take_state(self, values: Mapping[str, Any]) -> None:
        """Take back the plain values of :meth:`state` after a load; each goes to the attribute of its name.

        Args:
            values: By name; modules, optimizers and tensors have been loaded in place and are not among them.

        Raises:
            OutlastError: There is no such attribute; override this method.
        """
        for name, value in values.items():
            if not hasattr(self, name):
                raise OutlastError(
                    f"state() holds the plain value {name!r}, but there is no attribute of that name to load it "
                    "into; name it so, or override take_state()"
                )
            setattr(self, name, value)

    # -- to be used --------------------------------------------------------------------------------------------

    @property
    def place(self) -> MeshRank:
        """This actor's place in the mesh."""
        return self._seated.place

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks by axis: ``pp``, ``dp``, ``cp``, ``tp``; another one in each incarnation."""
        return self._seated.membership.mesh

    @property
    def device(self) -> torch.device:
        """What this actor computes on."""
        return self._seated.device

    @property
    def iteration(self) -> int:
        """Number of optimizer steps that the state has done."""
        return self._seated.keeping.count

    def group(self, axis: str) -> torch.distributed.ProcessGroup:
        """Return the group of this actor's peers along an axis; another one in each incarnation.

        Args:
            axis: ``pp``, ``dp``, ``cp`` or ``tp``.
        """
        return self._seated.membership.group(axis)

    def section(self, name: str) -> SectionTimer:
        """Return the marker of a section, for ``with self.section("step"):``; its timeout is watched.

        Sections that are longer than ``FaultToleranceConfig.rank_section_timeouts`` says are hangs. A marker serves
        its incarnation only: ask for it in each call.
        """
        return self._seated.monitor.section(name)

    def heartbeat(self) -> None:
        """Say that this actor is alive, for ``FaultToleranceConfig.rank_heartbeat_timeout``."""
        self._seated.monitor.heartbeat()

    def update(self, iteration: int) -> AbstractContextManager[None]:
        """Return the context in which the state goes from ``iteration - 1`` to ``iteration``.

        A state that is left in the middle of it, by an exception, is of no use and is loaded again.

        Raises:
            OutlastError: The state has not done ``iteration - 1`` steps.
        """
        return self._seated.keeping.update(iteration)

    def save(self, iteration: int, *, now: bool = False) -> SaveHandle | None:
        """Save the state if that is due after ``iteration`` (``CheckpointConfig.save_interval`` and the like).

        Args:
            iteration: Number of optimizer steps that the state has done.
            now: Save it to all tiers whether it is due or not.

        Returns:
            The save, which goes on beside training; ``None`` = none was due, or nothing is kept.

        Raises:
            OutlastError: The state has not done ``iteration`` steps.
            CheckpointError: Saving failed too often in a row.

        Collective: all ranks, at the same iteration.
        Blocks: while the state is copied.
        """
        return self._seated.save(iteration, now=now)

    @property
    def _seated(self) -> Seat:
        if self._seat is None:
            raise OutlastError(
                f"{type(self).__name__} has no place in a group yet: use this in setup() and calls, not in __init__()"
            )
        return self._seat
