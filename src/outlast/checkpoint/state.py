"""State as named tensors and one tree of everything else, and back.

The tree is msgpack: what msgpack can say is said in it, tensors are referred to by name, and the rest is
``torch.save`` bytes, which are read back with ``weights_only=True`` and tried at the save already: state that
could not be loaded must not look saved.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import torch

from outlast.checkpoint.shard import DTYPE_NAMES
from outlast.errors import CheckpointError

__all__ = ["FlatState", "NamedTensor", "capture", "decode", "flatten", "is_stateful", "may_be_absent"]

_SCALARS = (str, int, float, bool, bytes, type(None))
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor of a rank's shard."""

    name: str
    tensor: torch.Tensor
    """This rank's part; not a copy."""
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state, taken apart."""

    tensors: list[NamedTensor]
    tree: bytes


def is_stateful(value: object) -> bool:
    """Return whether a value saves and loads itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def may_be_absent(value: object) -> bool:
    """Return whether a value does without its state in a generation that was saved without it."""
    return is_stateful(value) and getattr(value, "may_be_absent", False) is True


def capture(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with everything that has a state of its own replaced by that state."""
    return {name: _capture(value) for name, value in state.items()}


def _capture(value: Any) -> Any:
    if is_stateful(value):
        return value.state_dict()
    if isinstance(value, Mapping) and _holds_stateful(value):
        return {name: _capture(inner) for name, inner in value.items()}
    return value


def _holds_stateful(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_stateful(inner) for inner in value.values())
    return is_stateful(value)


def flatten(value: Any) -> FlatState:
    """Take a captured state apart; tensors are referred to, not copied, everything else is copied.

    Raises:
        CheckpointError: A value could not be read back; its place is named.
    """
    flattener = _Flattener()
    node = flattener.node(value, "")
    return FlatState(flattener.tensors, msgspec.msgpack.encode(node))


def _is_scalar(value: Any) -> bool:
    kind = type(value)
    return kind in _SCALARS and (kind is not int or _INT_MIN <= value <= _INT_MAX)


class _Flattener:
    def __init__(self) -> None:
        self.tensors: list[NamedTensor] = []
        self._names: set[str] = set()

    def node(self, value: Any, path: str) -> list[Any]:
        kind = type(value)
        if _is_scalar(value):
            return ["v", value]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is dict or kind is collections.OrderedDict:
            if all(_is_scalar(key) for key in value):
                items = [[key, self.node(item, f"{path}.{key}" if path else str(key))] for key, item in value.items()]
                if kind is dict:
                    return ["d", items]
                # A module's state carries the modules' versions beside its items; without them it looks outdated.
                return ["D", items, self.node(getattr(value, "_metadata", None), f"{path}._metadata")]
        elif kind is list or kind is tuple:
            if all(_is_scalar(item) for item in value):
                return ["L" if kind is list else "P", list(value)]
            return ["l" if kind is list else "p", [self.node(item, f"{path}.{i}") for i, item in enumerate(value)]]
        elif kind is np.ndarray and value.dtype.kind in "biuf" and value.dtype.isnative:
            try:
                tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
            except (TypeError, ValueError):  # a dtype that torch lacks, or negative strides
                return self._pickled(value, path)
            node = self._tensor(tensor, path)
            return ["n", node[1]] if node[0] == "T" else self._pickled(value, path)
        elif isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return ["g", value.dtype.str, value.tobytes()]
        return self._pickled(value, path)

    def _tensor(self, value: torch.Tensor, path: str) -> list[Any]:
        value = value.detach()
        layout = None
        global_shape = tuple(value.shape)
        global_offset = (0,) * value.dim()
        if _is_dtensor(value):
            layout = _describe_layout(value, path)
            global_offset = _global_offset(value)
            value = cast(Any, value).to_local()
        plain = value.layout == torch.strided and not value.is_quantized and type(value) is torch.Tensor
        if not plain or str(value.dtype) not in DTYPE_NAMES or value.device.type == "meta":
            if layout is not None:
                raise CheckpointError(f"state {path!r}: a DTensor of {value.dtype} cannot be saved; convert it")
            return self._pickled(value, path)
        name = path
        while name in self._names:
            name += "'"  # keys 1 and "1" of one dict
        self._names.add(name)
        self.tensors.append(NamedTensor(name, value, global_shape, global_offset))
        return ["T", name] if layout is None else ["T", name, layout]

    def _pickled(self, value: Any, path: str) -> list[Any]:
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            _load_pickled(buffer.getvalue())
        except (pickle.PickleError, AttributeError, TypeError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"state {path!r} of type {type(value).__name__} cannot be saved so that it can be loaded safely "
                f"({str(error).splitlines()[0][:200]}); save numbers, texts, lists, dicts and tensors instead"
            ) from error
        return ["o", buffer.getvalue()]


def _load_pickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def decode(tree: bytes, get: Callable[[str], torch.Tensor], meshes: list[Any] | None = None) -> Any:
    """Put a state together again.

    Args:
        tree: As made by :func:`flatten`.
        get: Returns a tensor by name.
        meshes: Device meshes in use by the live state, for its DTensors.

    Raises:
        CheckpointError: The tree is not one, or holds a DTensor over a mesh that the live state does not use.
    """
    try:
        node = msgspec.msgpack.decode(tree)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"the tree of plain values cannot be read ({error})") from error
    return _decode(node, get, meshes or [])


def _decode(node: list[Any], get: Callable[[str], torch.Tensor], meshes: list[Any]) -> Any:
    match node:
        case ["v" | "L", value]:
            return value
        case ["P", items]:
            return tuple(items)
        case ["l", items]:
            return [_decode(item, get, meshes) for item in items]
        case ["p", items]:
            return tuple(_decode(item, get, meshes) for item in items)
        case ["d", items]:
            return {key: _decode(item, get, meshes) for key, item in items}
        case ["D", items, metadata]:
            ordered = collections.OrderedDict((key, _decode(item, get, meshes)) for key, item in items)
            if (found := _decode(metadata, get, meshes)) is not None:
                ordered._metadata = found  # type: ignore[attr-defined]
            return ordered
        case ["T", name]:
            return get(name)
        case ["T", name, layout]:
            return _with_layout(get(name), layout, meshes)
        case ["n", name]:
            return get(name).numpy().copy()
        case ["g", dtype, data]:
            return np.frombuffer(data, dtype=dtype)[0]
        case ["o", data]:
            return _load_pickled(data)
    raise CheckpointError(f"the tree of plain values has an unknown node {str(node)[:80]}")


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "to_local") and hasattr(value, "placements")


def _describe_layout(value: Any, path: str) -> list[Any]:
    placements: list[int | None] = []
    for placement in value.placements:
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise CheckpointError(f"state {path!r}: a DTensor placed as {placement} cannot be saved; reduce it first")
        placements.append(placement.dim if placement.is_shard() else None)
    return [placements, *_describe_mesh(value.device_mesh), list(value.shape), list(value.stride())]


def _global_offset(value: Any) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(int(number) for number in offset)


def _describe_mesh(mesh: Any) -> list[Any]:
    return [list(mesh.mesh.shape), list(mesh.mesh_dim_names or [])]


def _with_layout(local: torch.Tensor, layout: list[Any], meshes: list[Any]) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements, mesh_shape, mesh_names, shape, stride = layout
    for mesh in meshes:
        if _describe_mesh(mesh) == [mesh_shape, mesh_names]:
            return DTensor.from_local(
                local.to(mesh.device_type),
                mesh,
                [Replicate() if dim is None else Shard(dim) for dim in placements],
                run_check=False,
                shape=torch.Size(shape),
                stride=tuple(stride),
            )
    raise CheckpointError(
        f"the generation holds a DTensor over a mesh {mesh_shape} {mesh_names} that the state given does not use; "
        "build the model with the same parallelism"
    )


def meshes_of(value: Any) -> list[Any]:
    """Return the device meshes of all DTensors in a captured state."""
    if isinstance(value, Mapping):
        return [mesh for inner in value.values() for mesh in meshes_of(inner)]
    if isinstance(value, list | tuple):
        return [mesh for inner in value for mesh in meshes_of(inner)]
    return [cast(Any, value).device_mesh] if isinstance(value, torch.Tensor) and _is_dtensor(value) else []
