"""Who gets which part of a call's arguments, and whose results are the call's.

A *parcel* is the arguments of one call as some actors get them. Each is put into the object store once, however many
actors read it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from outlast.config.base import nearest
from outlast.errors import ConfigError
from outlast.ray.batches import count_samples, cut, keep_whole, pad_weights
from outlast.ray.mesh import Mesh, MeshRank

__all__ = [
    "Dispatch",
    "MeshDispatch",
    "Parcel",
    "PassThroughDispatch",
    "find_dispatch",
    "register_dispatch",
    "takes_weights",
]

Parcel = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class Dispatch(ABC):
    """Divide a call's arguments among the actors of a mesh, and gather what they return.

    One object serves many calls, also after the mesh has changed; it keeps nothing of them. An interrupted call that
    is repeated is divided anew, for the mesh of then.
    """

    @abstractmethod
    def split(
        self, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_weights: bool
    ) -> Sequence[Parcel]:
        """Return the parcels; one that stands in several places, as the same object, is stored once.

        Args:
            mesh: Whom they are for.
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
            takes_weights: Whether the method has a parameter ``weights``.

        Raises:
            ConfigError: The arguments cannot be divided.
        """

    @abstractmethod
    def parcel_of(self, place: MeshRank) -> int:
        """Return which of the parcels the actor at ``place`` gets."""

    def wants_result(self, place: MeshRank) -> bool:
        """Return whether what the actor at ``place`` returns is fetched; what others return is dropped where it is."""
        return True

    @abstractmethod
    def collect(self, mesh: Mesh, results: Mapping[int, Any]) -> Any:
        """Make the call's result from those of all ranks whose result is wanted."""


class MeshDispatch(Dispatch):
    """Cut batches over the data axis; tensor-, context- and pipeline-parallel peers get the same shard.

    See ``outlast.ray.batches`` for what counts as a batch. Shards have equal lengths: if the samples cannot be divided
    so, the last one is repeated, and the method must have a parameter ``weights``. It always gets it, a float32
    tensor with 1 for each real sample and 0 for each repeated one, or with the caller's own weights, which are cut
    like any batch. With ``sum(weights * loss)`` differentiated on each shard, gradients summed over the data axis and
    divided by the sum of all weights are those of one process with the whole batch.

    The result is a list with that of each shard, in their order, from the ranks with ``MeshRank.gives_result``.
    """

    def split(
        self, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_weights: bool
    ) -> Sequence[Parcel]:
        """Return a parcel for each data shard, the same for all if there is no batch."""
        own_weights = kwargs.get("weights") if takes_weights else None
        fields = {f"argument {number}": value for number, value in enumerate(args)} | dict(kwargs)
        num_samples = count_samples(fields)
        if num_samples is None:
            return [_cut_all(args, kwargs, 0, 0)] * mesh.dp
        length = -(-num_samples // mesh.dp)
        if length * mesh.dp != num_samples and not takes_weights:
            raise ConfigError(
                f"{num_samples} samples cannot be divided among dp={mesh.dp}: give the method a parameter 'weights'"
                " (1 for each real sample, 0 for each that was added), or make the batch a multiple of dp"
            )
        if own_weights is not None and not (isinstance(own_weights, torch.Tensor) and own_weights.ndim == 1):
            raise ConfigError("weights must be a tensor with one number for each sample")
        parcels = []
        for start in range(0, length * mesh.dp, length) if length else [0] * mesh.dp:
            parcel = _cut_all(args, kwargs, start, length)
            if takes_weights:
                weights = pad_weights(num_samples, start, length)
                parcel[1]["weights"] = weights if own_weights is None else parcel[1]["weights"] * weights
            parcels.append(parcel)
        return parcels

    def parcel_of(self, place: MeshRank) -> int:
        """Return the number of the data shard."""
        return place.dp

    def wants_result(self, place: MeshRank) -> bool:
        """Return whether the actor speaks for its data shard."""
        return place.gives_result

    def collect(self, mesh: Mesh, results: Mapping[int, Any]) -> list[Any]:
        """Return the results in the order of the data shards."""
        return [results[rank] for rank in mesh.ranks() if mesh.place(rank).gives_result]


class PassThroughDispatch(Dispatch):
    """Give all actors the same arguments; the result is a list with that of each rank, in their order."""

    def split(
        self, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_weights: bool
    ) -> Sequence[Parcel]:
        """Return the arguments as they are."""
        return [(tuple(map(keep_whole, args)), {name: keep_whole(value) for name, value in kwargs.items()})]

    def parcel_of(self, place: MeshRank) -> int:
        """Return 0: there is one parcel."""
        return 0

    def collect(self, mesh: Mesh, results: Mapping[int, Any]) -> list[Any]:
        """Return the results in the order of the ranks."""
        return [results[rank] for rank in mesh.ranks()]


_BUILT_IN: Mapping[str, Dispatch] = {"mesh": MeshDispatch(), "pass_through": PassThroughDispatch()}
_registered: dict[str, Dispatch] = {}


def register_dispatch(name: str, dispatch: type[Dispatch] | Dispatch) -> None:
    """Have ``name`` mean a dispatch of one's own in ``run`` and ``submit`` of this process.

    Args:
        name: What calls say. Registered again, it means the new one.
        dispatch: An object, or a class that is made without arguments.

    Raises:
        ConfigError: The name is one of ours, or what is given is no dispatch.
    """
    if name in _BUILT_IN:
        raise ConfigError(f"dispatch {name!r} is built in; register yours under another name")
    made = dispatch() if isinstance(dispatch, type) else dispatch
    if not isinstance(made, Dispatch):
        raise ConfigError(f"dispatch {name!r}: {dispatch!r} is not a subclass of outlast.ray.Dispatch")
    _registered[name] = made


def find_dispatch(dispatch: str | Dispatch) -> Dispatch:
    """Return the dispatch of a name; an object is taken as it is.

    Raises:
        ConfigError: No dispatch has this name; the nearest one is named.
    """
    if isinstance(dispatch, Dispatch):
        return dispatch
    found = _BUILT_IN.get(dispatch) or _registered.get(dispatch)
    if found is None:
        raise ConfigError(f"unknown dispatch {dispatch!r}; {nearest(str(dispatch), [*_BUILT_IN, *_registered])}")
    return found


def takes_weights(method: Callable[..., Any]) -> bool:
    """Return whether a method can be given ``weights`` by name."""
    parameter = inspect.signature(method).parameters.get("weights")
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _cut_all(args: Sequence[Any], kwargs: Mapping[str, Any], start: int, length: int) -> Parcel:
    positional = tuple(cut(value, start, length) for value in args)
    return positional, {name: cut(value, start, length) for name, value in kwargs.items()}
