"""Where a session's training goes on: in memory after a restart in process, else from the newest generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.policy.in_place import Origin
from outlast.session.attempts import Attempts
from outlast.session.resuming import Resuming
from outlast.session.saves import Saves

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["restore"]


def restore(
    state: Mapping[str, Any],
    own: Attempts,
    saves: Saves | None,
    resuming: Resuming | None,
    replicas: dist.ProcessGroup | DeviceMesh | None,
) -> int:
    """Make ``state`` what training goes on from; return the number of optimizer steps that it has done.

    Args:
        state: As given to :meth:`Session.steps`.
        own: The session's own state.
        saves: What is saved; ``None`` = nothing.
        resuming: What was kept over a restart in process; ``None`` = there is no such thing here.
        replicas: Ranks that hold the same tensors; ``None`` = all.

    Raises:
        CheckpointError: There are generations, but none that all ranks can load.
        RestartAbort: What was kept is torn, and nothing was saved.
        PeerLost: A peer left.

    Collective: all ranks.
    """
    if resuming is None:
        loaded = saves.restore(state, own) if saves is not None else None
        return loaded.iteration if loaded is not None else 0
    iteration = resuming.resume(state, own, replicas)
    if iteration is not None:
        if saves is not None:
            saves.go_on(state, own, iteration, resuming.origin)
        return iteration
    loaded = saves.restore(state, own) if saves is not None else None
    origin = None
    if loaded is not None:
        origin = Origin(generation=loaded.generation, attempt=loaded.attempt, tiers=loaded.tiers)
    resuming.note_loaded(origin)
    iteration = loaded.iteration if loaded is not None else 0
    resuming.note(iteration)
    return iteration
