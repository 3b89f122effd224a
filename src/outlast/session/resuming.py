"""Going on from memory, where a session lives in a call of a wrapped function that was called again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.env import WorkerEnv
from outlast.errors import RestartAbort
from outlast.incidents import EventKind
from outlast.inprocess.call import Handle
from outlast.runtime.journal import Journal
from outlast.session.attempts import OWN_STATE, Attempts

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.inprocess.restore import Restore
    from outlast.policy.in_place import Origin

__all__ = ["Resuming"]

log = logging.getLogger(__name__)
_KEPT = "outlast.session"


class Resuming:
    """Keep a session's state over calls, and go on from it where all ranks can.

    Args:
        call: The call that the session lives in.
        place: This worker's place.
        journal: Where it is written how training went on.

    Thread: the main thread.
    """

    def __init__(self, call: Handle, place: WorkerEnv, journal: Journal) -> None:
        from outlast.inprocess.restore import Restore

        self._place, self._journal = place, journal
        self._restore: Restore = call.keep(_KEPT, Restore)

    def resume(
        self, state: Mapping[str, Any], own: Attempts, replicas: dist.ProcessGroup | DeviceMesh | None
    ) -> int | None:
        """Make ``state`` what it was before the restart; return its iteration, or ``None``: it has to be loaded.

        Raises:
            RuntimeError: A peer left.

        Collective: all ranks.
        """
        iteration = self._restore.resume(state, own={OWN_STATE: own}, replicas=_ranks(replicas), node=self._place.node)
        last = self._restore.last
        if iteration is None or last is None:
            return None
        num_given = last.sources.count("peer")
        given = f", {num_given} of {len(last.sources)} ranks were given it" if num_given else ""
        log.info("resuming from memory at iteration %d after %.3f s%s", iteration, last.took_s, given)
        self._journal.write(
            EventKind.RESTORED,
            rank=self._place.global_rank,
            iteration=iteration,
            tier=last.source,
            load_s=last.took_s,
            rejected=[],
        )
        return iteration

    @property
    def origin(self) -> Origin | None:
        """The generation that the state goes back to."""
        return self._restore.has_loaded

    def note_loaded(self, origin: Origin | None) -> None:
        """Take in that a generation was loaded; ``None``: there is none, and training begins.

        Raises:
            RestartAbort: The state was trained before, and there is nothing to put in its place.
        """
        if origin is None and self._restore.is_dirty:
            raise RestartAbort(
                "what this call was to go on from is not whole, nothing is saved yet, and what handle.keep() keeps "
                "cannot begin again; restart the job"
            )
        self._restore.has_loaded = origin

    def note(self, iteration: int) -> None:
        """Say that the state is that of ``iteration`` steps."""
        self._restore.note(iteration)

    def release(self) -> None:
        """Let go of the state, as the call has been left. Blocks: while it is digested."""
        self._restore.release()


def _ranks(replicas: dist.ProcessGroup | DeviceMesh | None) -> tuple[int, ...] | None:
    """Return the ranks of a group or mesh."""
    if replicas is None:
        return None
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(replicas, DeviceMesh):
        return tuple(sorted(replicas.mesh.reshape(-1).tolist()))
    return tuple(sorted(dist.get_process_group_ranks(replicas)))
