"""Restoring what training goes on from: from memory after a restart in process, else from the newest generation.

The script's state is saved and loaded together with the session's own (:data:`OWN_STATE`), as one mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from outlast.env import WorkerEnv
from outlast.policy.recovery_point import Origin
from outlast.runtime.journal import Journal
from outlast.session.attempts import Attempts
from outlast.session.inprocess_scope import InProcessScope
from outlast.session.saves import Saves

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.checkpoint import Restored

__all__ = ["OWN_STATE", "restore", "saved_state", "unwrap_ddp"]

OWN_STATE = "outlast"
"""Name under which the session saves what it resumes from itself."""


def unwrap_ddp(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with each DDP-wrapped module replaced by the module within.

    So a checkpoint does not depend on whether DDP was used, and loads with and without it.
    """
    from torch.nn.parallel import DistributedDataParallel

    return {
        name: value.module if isinstance(value, DistributedDataParallel) else value for name, value in state.items()
    }


def saved_state(state: Mapping[str, Any], own: Attempts) -> dict[str, Any]:
    """Return the mapping that is saved: the script's state and the session's own."""
    return {**unwrap_ddp(state), OWN_STATE: own}


def restore(
    state: Mapping[str, Any],
    own: Attempts,
    saves: Saves | None,
    scope: InProcessScope,
    replicas: dist.ProcessGroup | DeviceMesh | None,
    *,
    place: WorkerEnv,
    journal: Journal,
) -> int:
    """Make ``state`` what training goes on from; return the number of optimizer steps that it has done.

    Args:
        state: As given to :meth:`Session.restore`.
        own: The session's own state; its replay, if any, says which suspect state to load.
        saves: What is saved; ``None`` = nothing.
        scope: The call around the session; it may hold the state in memory.
        replicas: Ranks that hold the same tensors; ``None`` = all.
        place: This worker's place.
        journal: Where a resumption from memory is recorded.

    Raises:
        CheckpointError: There are generations, but none that all ranks can load; or another run uses a directory,
            or has saved what is there.
        RestartAbort: What was kept in memory is torn, and nothing was saved.
        PeerLost: A peer left.

    Collective: all ranks.
    """
    iteration = scope.resume(state, {OWN_STATE: own}, replicas, place=place, journal=journal)
    if iteration is not None:
        if saves is not None:
            saves.go_on(saved_state(state, own), iteration, scope.origin)
        return iteration
    loaded = None if saves is None else _load(state, own, saves)
    if loaded is None:
        scope.note_loaded(None)
    else:
        scope.note_loaded(Origin(generation=loaded.generation, attempt=loaded.attempt, tiers=loaded.tiers))
    iteration = 0 if loaded is None else loaded.iteration
    scope.note_iteration(iteration)
    return iteration


def _load(state: Mapping[str, Any], own: Attempts, saves: Saves) -> Restored | None:
    """Load into the script's state and the session's own; give loaded plain values back to the script's mapping.

    Raises:
        TypeError: There are plain values to give back, and the mapping cannot take any.
    """
    given = unwrap_ddp(state)
    loaded = {**given, OWN_STATE: own}
    restored = saves.load(loaded, suspect_iteration=None if own.replay is None else own.replay.iteration)
    if restored is None:
        return None
    replaced = {name: value for name, value in loaded.items() if name != OWN_STATE and value is not given.get(name)}
    if not replaced:
        return restored
    if not isinstance(state, MutableMapping):
        raise TypeError(
            f"state holds plain values ({', '.join(sorted(replaced))}), which are loaded into a dict only; give one"
        )
    state.update(replaced)
    return restored
