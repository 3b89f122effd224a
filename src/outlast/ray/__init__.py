"""Groups of training actors on Ray that replace what dies and go on."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if importlib.util.find_spec("ray") is None:
    raise ImportError("outlast.ray needs Ray, which is not installed: pip install 'outlast[ray]'", name="ray")

if TYPE_CHECKING:
    from outlast.config import RecoveryConfig
    from outlast.ray.actor_group import ActorGroup
    from outlast.ray.batches import Whole, concat
    from outlast.ray.dispatch import Dispatch, MeshDispatch, PassThroughDispatch, register_dispatch
    from outlast.ray.mesh import Mesh, MeshRank
    from outlast.ray.pending import Pending
    from outlast.ray.report import RecoveryReport
    from outlast.ray.train_actor import TrainActor

_HOMES = {
    "ActorGroup": "outlast.ray.actor_group",
    "Dispatch": "outlast.ray.dispatch",
    "Mesh": "outlast.ray.mesh",
    "MeshDispatch": "outlast.ray.dispatch",
    "MeshRank": "outlast.ray.mesh",
    "PassThroughDispatch": "outlast.ray.dispatch",
    "TrainActor": "outlast.ray.train_actor",
    "Pending": "outlast.ray.pending",
    "RecoveryConfig": "outlast.config",
    "RecoveryReport": "outlast.ray.report",
    "Whole": "outlast.ray.batches",
    "concat": "outlast.ray.batches",
    "register_dispatch": "outlast.ray.dispatch",
}

__all__ = [
    "ActorGroup",
    "Dispatch",
    "Mesh",
    "MeshDispatch",
    "MeshRank",
    "PassThroughDispatch",
    "Pending",
    "RecoveryConfig",
    "RecoveryReport",
    "TrainActor",
    "Whole",
    "concat",
    "register_dispatch",
]

# On first use, so that what needs only a mesh waits neither for torch nor for Ray.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
