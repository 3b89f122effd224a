"""Divides a call's arguments among actors and collects the results.

A *parcel* is the arguments for some of the actors; each parcel is put into Ray's object store once.

A *batch* is a tensor or array of at least one dimension, or a list, whose items are samples. Dicts and tuples hold
batches as fields, at any depth. Everything else (numbers, strings, ``None``, 0-d tensors, other objects) has no samples
and is passed whole.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.actor import ActorHandle

from outlast.config.base import nearest
from outlast.errors import ConfigError
from outlast.ray.protocol import Mesh, MeshRank


def copy_for_later(values: Any) -> Any:
    """Return a copy of arguments for a later call; object references and actor handles are not copied.

    Raises: Exception (a value cannot be pickled).
    """
    stream = io.BytesIO()
    handles = _HandlePickler(stream)
    handles.dump(values)
    return _HandleUnpickler(stream.getvalue(), handles.kept).load()


class _HandlePickler(cloudpickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.kept: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, (ray.ObjectRef, ActorHandle)):
            return None
        self.kept.append(value)
        return len(self.kept) - 1


class _HandleUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, kept: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._kept = kept

    def persistent_load(self, number: int) -> Any:
        return self._kept[number]


class Whole:
    """Mark a value that looks like a batch but is passed whole to every actor.

    Args:
        value: Anything; the method receives the value without the mark.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Whole({self.value!r})"


def count_samples(fields: Mapping[str, Any]) -> int | None:
    """Return the number of samples of the batches in ``fields``; ``None`` if there is no batch.

    Args:
        fields: Values by their name in error messages.

    Raises: ConfigError (two batches have different lengths, or a list seems to hold fields).
    """
    first: tuple[str, int] | None = None
    for name, value in fields.items():
        for where, batch in _batches(value, name):
            if first is None:
                first = where, len(batch)
            elif len(batch) != first[1]:
                raise ConfigError(
                    f"{first[0]} has {first[1]} samples, {where} has {len(batch)}: all batches of a call are cut in the"
                    " same way; wrap what every actor is to get as it is in Whole(...)"
                )
    return None if first is None else first[1]


def cut(value: Any, start: int, length: int) -> Any:
    """Return ``length`` samples of every batch in ``value`` from ``start``, in new memory.

    Beyond a batch's end its last sample is repeated. Values without samples are returned as by ``keep_whole``.
    """
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0:
        return keep_whole(_rows(value, start, length))
    if isinstance(value, list):
        part = value[start : start + length]
        return keep_whole(part + value[-1:] * (length - len(part)))
    if isinstance(value, MutableMapping | tuple):
        return _rebuilt(value, lambda field: cut(field, start, length))
    return keep_whole(value)


def keep_whole(value: Any) -> Any:
    """Return ``value`` without ``Whole`` marks; its tensors own their memory.

    A pickled view would include all the memory that it refers to.
    """
    if isinstance(value, Whole):
        return keep_whole(value.value)
    if type(value) is torch.Tensor and value.layout == torch.strided:
        value = value.detach()
        return value.clone() if value.untyped_storage().nbytes() != value.nbytes else value
    if isinstance(value, list):
        return [keep_whole(item) for item in value]
    if isinstance(value, MutableMapping | tuple):
        return _rebuilt(value, keep_whole)
    return value


def concat(results: Sequence[Any], num_samples: int | None = None) -> Any:
    """Join the results of data shards, in shard order, into one result of all samples.

    Args:
        results: The results of the shards, all of one structure.
        num_samples: Samples of the call's batch; samples after these are padding and are dropped. ``None`` = no
            padding.

    Returns:
        The same structure: tensors, arrays and lists joined along the first dimension; a value without samples (a loss)
        becomes a list of the shards' values.

    Raises:
        ValueError: Results have different structures, or fewer samples than ``num_samples``.
    """
    if not results:
        raise ValueError("there are no results to join")
    head = results[0]
    if any(type(result) is not type(head) for result in results):
        kinds = sorted({type(result).__name__ for result in results})
        raise ValueError(f"results of different kinds cannot be joined: {', '.join(kinds)}")
    if isinstance(head, torch.Tensor) and head.ndim > 0:
        return _first(torch.cat(list(results)), num_samples)
    if isinstance(head, np.ndarray) and head.ndim > 0:
        return _first(np.concatenate(results), num_samples)
    if isinstance(head, list):
        return _first([sample for result in results for sample in result], num_samples)
    if isinstance(head, Mapping):
        if any(set(result) != set(head) for result in results):
            raise ValueError("results have different keys and cannot be joined")
        return {key: concat([result[key] for result in results], num_samples) for key in head}
    if isinstance(head, tuple):
        if any(len(result) != len(head) for result in results):
            raise ValueError("results are tuples of different lengths and cannot be joined")
        return _tuple_like(head, [concat(list(parts), num_samples) for parts in zip(*results, strict=True)])
    return list(results)


def _batches(value: Any, where: str) -> Iterator[tuple[str, Sequence[Any] | torch.Tensor | np.ndarray[Any, Any]]]:
    if isinstance(value, Whole):
        return
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim > 0:
            yield where, value
    elif isinstance(value, list):
        _refuse_fields(value, where)
        yield where, value
    elif isinstance(value, MutableMapping):
        for key, field in value.items():
            yield from _batches(field, f"{where}[{key!r}]")
    elif isinstance(value, tuple):
        for number, field in enumerate(value):
            yield from _batches(field, f"{where}[{number}]")


def _refuse_fields(samples: list[Any], where: str) -> None:
    # A DataLoader's [inputs, targets] is a list of two fields; cut as two samples, one actor would get the inputs and
    # another the targets.
    if len(samples) > 1 and all(isinstance(sample, torch.Tensor | np.ndarray) and sample.ndim for sample in samples):
        kinds = {(type(sample), sample.dtype, sample.ndim) for sample in samples}
        if len(kinds) > 1:
            raise ConfigError(
                f"{where} is a list of tensors of different kinds: a list is cut as samples; give fields as a tuple"
                f" or a dict, such as tuple({where.split('[', maxsplit=1)[0]})"
            )


def _rows(batch: Any, start: int, length: int) -> Any:
    part = batch[start : start + length]
    missing = length - len(part)
    if missing == 0:
        return part
    if isinstance(batch, torch.Tensor):
        return torch.cat([part, batch[-1:].expand(missing, *batch.shape[1:])])
    return np.concatenate([part, np.repeat(batch[-1:], missing, axis=0)])


def _rebuilt(value: MutableMapping[Any, Any] | tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return _tuple_like(value, [change(field) for field in value])
    # A shallow copy keeps the attributes of a mapping subclass, such as a default factory.
    result = copy.copy(value)
    for key, field in value.items():
        result[key] = change(field)
    return result


def _tuple_like(value: tuple[Any, ...], fields: list[Any]) -> tuple[Any, ...]:
    return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)


def _first(joined: Any, num_samples: int | None) -> Any:
    if num_samples is None:
        return joined
    if len(joined) < num_samples:
        raise ValueError(f"the results have {len(joined)} samples in all, not {num_samples}")
    return joined[:num_samples]


Parcel = tuple[tuple[Any, ...], dict[str, Any]]


class Dispatch(ABC):
    """Divides a call's arguments among the actors of a mesh and collects their results.

    One stateless object serves many calls, also after the mesh has changed. A repeated call is divided again for the
    current mesh.
    """

    @abstractmethod
    def split(
        self, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_weights: bool
    ) -> Sequence[Parcel]:
        """Return the parcels; the same object in several places is stored once.

        Args:
            mesh: The receiving mesh.
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
            takes_weights: Whether the method has a parameter ``weights``.

        Raises:
            ConfigError: The arguments cannot be divided.
        """

    @abstractmethod
    def parcel_of(self, place: MeshRank) -> int:
        """Return the index of the parcel for the actor at ``place``."""

    def wants_result(self, place: MeshRank) -> bool:
        """Return whether the result of the actor at ``place`` is fetched; other results are dropped in the actor."""
        return True

    @abstractmethod
    def collect(self, mesh: Mesh, results: Mapping[int, Any]) -> Any:
        """Combine the fetched results, by rank, into the call's result."""


class MeshDispatch(Dispatch):
    """Cut batches along the data axis; tensor-, context- and pipeline-parallel peers get the same shard.

    See ``outlast.ray.dispatch`` for the definition of a batch. Shards have equal lengths: if the samples cannot be
    divided evenly, the last one is repeated, and the method must have a parameter ``weights``. A method with
    ``weights`` always receives a float32 tensor with 1 for each real sample and 0 for each repeated one, or the
    caller's own weights, cut like a batch. With ``sum(weights * loss)`` differentiated on each shard, gradients summed
    over the data axis and divided by the sum of all weights equal those of one process with the whole batch.

    The result is a list with one result for each shard, in order, from slice 0 of the pipeline stage that has results.
    That is the last stage, including Megatron's interleaved schedule. In a V-shaped schedule the last virtual stage is
    on the first actor: use ``dispatch=MeshDispatch(result_stage=0)``.

    Args:
        result_stage: The actor along ``pp`` whose results are used; negative counts from the end.
    """

    def __init__(self, result_stage: int = -1) -> None:
        self._result_stage = result_stage

    def split(
        self, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_weights: bool
    ) -> Sequence[Parcel]:
        """Return a parcel for each data shard; the same parcel for all if there is no batch."""
        if not -mesh.pp <= self._result_stage < mesh.pp:
            raise ConfigError(
                f"invalid result_stage={self._result_stage}: a mesh with pp={mesh.pp} has the stages "
                f"{-mesh.pp} to {mesh.pp - 1}"
            )
        arguments = tuple(args), dict(kwargs)
        own_weights = kwargs.get("weights") if takes_weights else None
        fields = {f"argument {number}": value for number, value in enumerate(args)} | dict(kwargs)
        num_samples = count_samples(fields)
        if num_samples is None:
            return [keep_whole(arguments)] * mesh.dp
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
            parcel = cut(arguments, start, length)
            if takes_weights:
                weights = (torch.arange(start, start + length) < num_samples).to(torch.float32)
                parcel[1]["weights"] = weights if own_weights is None else parcel[1]["weights"] * weights
            parcels.append(parcel)
        return parcels

    def parcel_of(self, place: MeshRank) -> int:
        """Return the data shard's number."""
        return place.dp

    def wants_result(self, place: MeshRank) -> bool:
        """Return whether the actor's result represents its data shard."""
        return place.tp == 0 and place.cp == 0 and place.pp == self._result_stage % place.pp_size

    def collect(self, mesh: Mesh, results: Mapping[int, Any]) -> list[Any]:
        """Return the results in shard order."""
        return [results[rank] for rank in mesh.ranks() if self.wants_result(mesh.place(rank))]


class PassThroughDispatch(Dispatch):
    """Give all actors the same arguments; the result is a list with one result for each rank, in order."""

    def split(
        self, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], *, takes_weights: bool
    ) -> Sequence[Parcel]:
        """Return the arguments unchanged."""
        return [keep_whole((tuple(args), dict(kwargs)))]

    def parcel_of(self, place: MeshRank) -> int:
        """Return 0, the only parcel."""
        return 0

    def collect(self, mesh: Mesh, results: Mapping[int, Any]) -> list[Any]:
        """Return the results in rank order."""
        return [results[rank] for rank in mesh.ranks()]


_BUILT_IN: Mapping[str, Dispatch] = {"mesh": MeshDispatch(), "pass_through": PassThroughDispatch()}
_registered: dict[str, Dispatch] = {}


def register_dispatch(name: str, dispatch: type[Dispatch] | Dispatch) -> None:
    """Register a dispatch under a name for ``run`` and ``submit`` in this process.

    Args:
        name: The name in calls; registering it again replaces the dispatch.
        dispatch: An object, or a class that is instantiated without arguments.

    Raises:
        ConfigError: The name is built in, or the value is not a dispatch.
    """
    if name in _BUILT_IN:
        raise ConfigError(f"dispatch {name!r} is built in; register yours under another name")
    made = dispatch() if isinstance(dispatch, type) else dispatch
    if not isinstance(made, Dispatch):
        raise ConfigError(f"dispatch {name!r}: {dispatch!r} is not a subclass of outlast.ray.Dispatch")
    _registered[name] = made


def find_dispatch(dispatch: str | Dispatch) -> Dispatch:
    """Return the dispatch of a name; an object is returned unchanged.

    Raises: ConfigError (no dispatch has this name; the error suggests the nearest one).
    """
    if isinstance(dispatch, Dispatch):
        return dispatch
    found = _BUILT_IN.get(dispatch) or _registered.get(dispatch)
    if found is None:
        raise ConfigError(f"unknown dispatch {dispatch!r}; {nearest(str(dispatch), [*_BUILT_IN, *_registered])}")
    return found


def takes_weights(method: Callable[..., Any]) -> bool:
    """Return whether a method accepts ``weights`` by keyword."""
    parameter = inspect.signature(method).parameters.get("weights")
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
