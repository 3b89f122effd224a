"""Groups of training actors on Ray that replace lost actors and continue."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if importlib.util.find_spec("ray") is None:
    raise ImportError("outlast.ray needs Ray, which is not installed: pip install 'outlast[ray]'", name="ray")

if TYPE_CHECKING:
    from outlast.config import RecoveryConfig
    from outlast.ray.actor_group import ActorGroup, GroupStep, Pending
    from outlast.ray.dispatch import Dispatch, MeshDispatch, PassThroughDispatch, Whole, concat, register_dispatch
    from outlast.ray.protocol import Mesh, MeshRank
    from outlast.ray.recovery import RecoveryReport
    from outlast.ray.train_actor import TrainActor
    from outlast.ray.watch import LossKind, LostActor

_HOMES = {
    "outlast.config": ("RecoveryConfig",),
    "outlast.ray.actor_group": ("ActorGroup", "GroupStep", "Pending"),
    "outlast.ray.dispatch": ("Dispatch", "MeshDispatch", "PassThroughDispatch", "Whole", "concat", "register_dispatch"),
    "outlast.ray.protocol": ("Mesh", "MeshRank"),
    "outlast.ray.recovery": ("RecoveryReport",),
    "outlast.ray.train_actor": ("TrainActor",),
    "outlast.ray.watch": ("LossKind", "LostActor"),
}

__all__ = [
    "ActorGroup",
    "Dispatch",
    "GroupStep",
    "LossKind",
    "LostActor",
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

# Lazy, so that importing only Mesh loads neither torch nor Ray.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
