"""State as named tensors and one tree of everything else, and back.

The tree is msgpack: plain values are in it directly, tensors are referred to by name, and the rest is ``torch.save``
bytes, which are read with ``weights_only=True``, and test-read at the save: a state that cannot be loaded must not look
saved. A tensor subclass is flattened with its own ``__tensor_flatten__``. The tree also contains the layouts of
distributed tensors (:mod:`outlast.checkpoint.layouts`). :mod:`outlast.checkpoint.fit` loads states into live ones.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import torch

from outlast.checkpoint.layouts import Layout, describe_layout, distribute, is_distributed, own_part
from outlast.checkpoint.shard import DTYPE_NAMES
from outlast.decoding import from_msgpack
from outlast.errors import CheckpointError

log = logging.getLogger(__name__)

SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_MAX_DEPTH = 100
"""Levels of nested containers; deeper ones most likely contain themselves."""
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
SHORT_NAMES = {getattr(torch, name.removeprefix("torch.")): short for name, short in DTYPE_NAMES.items()}
"""safetensors' names of torch's element types."""
_ZEROS = tuple((0,) * dim for dim in range(65))


class NamedTensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One tensor of a rank's shard; a cheap type, since there may be very many."""

    tensor: torch.Tensor
    """This rank's part; not a copy."""
    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatState:
    tensors: list[NamedTensor]
    tree: bytes


@dataclass(frozen=True, slots=True)
class Wrapped:
    kind: str
    """Its class as ``module:name``."""
    dtype: torch.dtype
    """Element type that the subclass reports."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    context: Any
    parts: dict[str, Any]

    def made(self) -> torch.Tensor:
        """Recreate the tensor. Raises: CheckpointError, when its class is unknown or refuses the parts."""
        kind = self._find_kind()
        try:
            made = kind.__tensor_unflatten__(self.parts, self.context, torch.Size(self.shape), self.stride)
        except Exception as error:  # a foreign class may raise anything
            text = f"{self.kind.replace(':', '.')} does not take what it was saved as: {error}"
            raise CheckpointError(text) from error
        return cast(torch.Tensor, made)

    def outline(self) -> torch.Tensor:
        """Return a plain tensor of that shape and type without memory. Raises: CheckpointError, as :meth:`made`."""
        self._find_kind()  # before anything live is overwritten
        return torch.empty((), dtype=self.dtype).expand(self.shape)

    def _find_kind(self) -> Any:
        kind = _find_class(self.kind)
        if kind is None:
            raise CheckpointError(
                f"a tensor was saved as {self.kind.replace(':', '.')}, which this process has not imported; import it "
                "before the state is loaded"
            )
        return kind


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_nested(value: Any) -> bool:
    """Return whether a mapping contains state that is loaded in place, instead of being one plain value."""
    return isinstance(value, Mapping) and any(
        is_stateful(inner) or isinstance(inner, torch.Tensor) or is_nested(inner) for inner in value.values()
    )


def may_be_absent(value: object) -> bool:
    """Return whether a value needs no state from a checkpoint that was saved without it."""
    return is_stateful(value) and getattr(value, "may_be_absent", False) is True


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable the garbage collector, which many small containers would make scan the whole process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace stateful values by their ``state_dict()``. Raises: CheckpointError, when they are nested too deeply."""
    try:
        return {name: _capture(value, 1) for name, value in state.items()}
    except _TooDeepError:
        raise _explain_depth(state, "state") from None


class _TooDeepError(Exception):
    """More containers within one another than can be saved."""


def _capture(value: Any, depth: int) -> Any:
    if type(value) in PLAIN_TYPES:
        return value
    if is_stateful(value):
        return value.state_dict()
    if isinstance(value, Mapping):
        if depth > _MAX_DEPTH:
            raise _TooDeepError
        captured = {
            name: inner if type(inner) in PLAIN_TYPES else _capture(inner, depth + 1) for name, inner in value.items()
        }
        if any(captured[name] is not inner for name, inner in value.items()):
            return captured
    return value


def flatten(value: Any, *, is_live: bool = False) -> FlatState:
    """Flatten a captured state; tensors are referred to, everything else is copied.

    Args:
        is_live: The state is loaded into, not saved: values that could not be saved are left out.

    Raises:
        CheckpointError: A value could not be read back; the text has its path.
    """
    flattener = _Flattener(is_live=is_live)
    try:
        with torch.no_grad():
            tree = msgspec.msgpack.encode(flattener.node(value, ""))
    except (_TooDeepError, RecursionError):
        raise _explain_depth(value, "") from None
    except UnicodeEncodeError:
        raise _explain_text(value) from None
    return FlatState(flattener.tensors, tree)


def _is_scalar(value: Any) -> bool:
    kind = type(value)
    return kind in SCALARS and (kind is not int or _INT_MIN <= value <= _INT_MAX)


def _are_scalars(values: Sequence[Any]) -> bool:
    if set(map(type, values)) == {int}:
        values = min(values), max(values)
    return all(map(_is_scalar, values))


class _Flattener:
    def __init__(self, *, is_live: bool) -> None:
        self._is_live = is_live
        self.tensors: list[NamedTensor] = []
        self._names: set[str] = set()
        self._depth = 0
        self._places: dict[Any, tuple[Layout, tuple[int, ...], tuple[int, ...]]] = {}
        self._tried: set[type] = set()

    def node(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in PLAIN_TYPES and (name := self._add(value, path)) is not None:
            return "T", name
        if _is_scalar(value):
            return "v", value
        if kind is dict or kind is collections.OrderedDict or kind is list or kind is tuple:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise _TooDeepError
            node = self._container(value, kind, path)
            self._depth -= 1
            return node
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray and not value.dtype.hasobject:
            return self._array(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in "biufcSUMm" and value.dtype.itemsize:
            return "g", value.dtype.str, value.tobytes()
        if kind is torch.dtype:
            return "t", str(value).removeprefix("torch.")
        return self._pickled(value, path)

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if kind is list or kind is tuple:
            if _are_scalars(value):
                return "L" if kind is list else "P", list(value)
            return "l" if kind is list else "p", [self.node(item, f"{path}.{i}") for i, item in enumerate(value)]
        items, before = [], f"{path}." if path else ""
        for key, item in value.items():
            if type(key) is not str and not _is_scalar(key):
                return self._pickled(value, path)
            here = f"{before}{key}"
            if type(item) in PLAIN_TYPES and (name := self._add(item, here)) is not None:
                items.append((key, ("T", name)))  # as node() does, since there may be very many
            else:
                items.append((key, self.node(item, here)))
        if kind is dict:
            return "d", items
        # A module's state_dict also carries the modules' versions; without them it looks outdated.
        return "D", items, self.node(getattr(value, "_metadata", None), f"{path}._metadata")

    def _array(self, value: Any, path: str) -> Any:
        if value.dtype.kind in "biufc" and value.dtype.isnative:
            try:
                is_plain = value.flags.writeable and all(stride >= 0 for stride in value.strides)
                tensor = torch.from_numpy(value if is_plain else value.copy(order="C"))
            except (TypeError, ValueError):  # a type that torch lacks
                pass
            else:
                if (name := self._add(tensor, path)) is not None:
                    return "n", name
        buffer = io.BytesIO()
        np.save(buffer, value, allow_pickle=False)
        return "a", buffer.getvalue()

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if (why := _why_without_bytes(value)) is not None:
            if self._is_live:
                return "v", None
            raise CheckpointError(f"state {path!r}: {why}")
        layout, shape, offset = None, tuple(value.shape), (0,) * value.dim()
        if is_distributed(value):
            layout, part, offset = self._place(value, path)
            value = cast(Any, value).to_local()
            if tuple(value.shape) != part:
                raise CheckpointError(
                    f"state {path!r}: this rank's part of a DTensor of {shape} is {tuple(value.shape)}, its placement "
                    f"means {part}; give it a first dimension that the ranks divide evenly"
                )
        value = value.detach()
        if type(value).__name__ == "AsyncCollectiveTensor":
            value = cast(Any, value).wait()
        if type(value) in PLAIN_TYPES and (name := self._add(value, path, shape, offset)) is not None:
            return ("T", name) if layout is None else ("T", name, layout)
        if hasattr(value, "__tensor_flatten__") and all(type(number) is int for number in value.shape):
            return self._wrapped(value, path, layout, shape, offset)
        if layout is not None:
            raise CheckpointError(
                f"state {path!r}: a DTensor of {_type_name(value)} with {value.dtype} elements cannot be saved; "
                "convert its elements, or save its to_local()"
            )
        return self._pickled(value, path)

    def _place(self, value: Any, path: str) -> tuple[Layout, tuple[int, ...], tuple[int, ...]]:
        key = (id(value.device_mesh), value.placements, value.shape, value.stride())
        if key not in self._places:
            self._places[key] = (describe_layout(value, path), *own_part(value, path))
        return self._places[key]

    def _wrapped(
        self, value: Any, path: str, layout: Layout | None, shape: tuple[int, ...], offset: tuple[int, ...]
    ) -> Any:
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _find_class(name) is not kind:
            raise CheckpointError(
                f"state {path!r}: {_type_name(value)} cannot be found again by its name when it is loaded; define the "
                "class at the top of a module"
            )
        attributes, context = value.__tensor_flatten__()
        found = {attribute: getattr(value, attribute) for attribute in attributes}
        first = found[attributes[0]]
        is_same_kind = type(first) in PLAIN_TYPES and (first.shape, first.dtype) == (value.shape, value.dtype)
        own = self._add(first, path, shape, offset) if is_same_kind and len(attributes) == 1 else None
        if is_whole := own is not None:  # its only part can be read as a plain tensor, too
            parts = [(attributes[0], ("T", own))]
        else:
            parts = [(attribute, self.node(part, f"{path}.{attribute}")) for attribute, part in found.items()]
        described = self.node(context, f"{path}.<{kind.__name__}>")
        if kind not in self._tried:
            self._tried.add(kind)
            again = decode(
                msgspec.msgpack.encode(described), {one.name: one.tensor for one in self.tensors}.__getitem__
            )
            Wrapped(name, value.dtype, value.shape, value.stride(), again, found).made()
        dtype = str(value.dtype).removeprefix("torch.")
        return "w", name, dtype, list(value.shape), list(value.stride()), described, parts, is_whole, layout

    def _add(
        self, tensor: torch.Tensor, path: str, whole: tuple[int, ...] | None = None, offset: tuple[int, ...] = ()
    ) -> str | None:
        """Name a plain tensor, or this rank's part of ``whole``; ``None`` = its bytes cannot be stored directly."""
        dtype = tensor.dtype
        if dtype not in SHORT_NAMES or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            return None
        while path in self._names:
            path += "'"  # keys 1 and "1" of one dict
        self._names.add(path)
        shape = tensor.shape
        if whole is None:
            whole, offset = shape, _ZEROS[len(shape)]
        self.tensors.append(NamedTensor(tensor, path, dtype, tensor.device, shape, whole, offset))
        return path

    def _pickled(self, value: Any, path: str) -> Any:
        if self._is_live:
            return "v", None
        buffer = io.BytesIO()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's deprecation warnings about types
                torch.save(value, buffer)
                _load_pickled(buffer.getvalue())
        except Exception as error:  # any class may raise anything when it is pickled
            raise CheckpointError(
                f"state {path!r} of type {_type_name(value)} cannot be saved so that it can be loaded safely; "
                f"{_remedy(value)}"
            ) from error
        return "o", buffer.getvalue()


def _why_without_bytes(value: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(value):
        return "the parameter of a lazy module is not initialised yet; call the module once before the first save"
    if value.is_nested:
        return "a nested tensor cannot be saved; save the list of its tensors, as unbind() returns it"
    if value.is_meta:
        return "a tensor on the meta device has no content; initialise it before the first save"
    return None


def _load_pickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _type_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _remedy(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"save a plain tensor instead: dequantize it, or convert its {value.dtype} elements"
    if is_stateful(value):
        return "save its state_dict(), or make it a separate entry of a dict of the state"
    if type(value) in (dict, collections.OrderedDict):
        return "save a dict whose keys are texts or numbers instead"
    kinds: tuple[tuple[Any, str], ...] = (
        (enum.Enum, "save its .value or .name instead"),
        (torch.Generator, "save its get_state() instead"),
        (np.ndarray, "save a plain array of numbers instead, made with numpy.asarray() or tolist()"),
        (os.PathLike, "save str() of it instead"),
        ((datetime.date, datetime.time), "save its isoformat() instead"),
        (datetime.timedelta, "save its total_seconds() instead"),
        (collections.abc.Set, "save a sorted list of numbers or texts instead"),
        (Mapping, "save dict() of it instead"),
        ((collections.deque, range), "save list() of it instead"),
    )
    for kind, remedy in kinds:
        if isinstance(value, kind):
            return remedy
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "save its _asdict() or tuple() instead"
    if isinstance(value, list | tuple):
        return "save list() of it instead"
    if dataclasses.is_dataclass(value):
        return "save dataclasses.asdict() of it instead"
    return "save numbers, texts, lists, dicts and tensors instead"


def _explain_depth(value: Any, path: str) -> CheckpointError:
    stack, above = [(0, path, value)], list[int]()
    while stack:
        depth, here, one = stack.pop()
        del above[depth:]
        if id(one) in above:
            return CheckpointError(f"state {here!r} contains itself; save each part in one place")
        if depth > _MAX_DEPTH:
            short = here if len(here) <= 80 else f"{here[:80]}..."
            return CheckpointError(
                f"state {short!r} is nested more than {_MAX_DEPTH} levels deep; save it in fewer levels"
            )
        above.append(id(one))
        stack += [(depth + 1, inner_path, inner) for inner_path, inner in _children(one, here)]
    return CheckpointError("the state is nested too deeply for this call stack; save it in fewer levels")


def _explain_text(value: Any) -> CheckpointError:
    found = next(_find_bad_text(value, "", 0), "")
    return CheckpointError(
        f"state {ascii(found)[1:-1]!r} has text with lone surrogates, which is not Unicode; "
        'save its encode("utf-8", "surrogateescape") instead'
    )


def _find_bad_text(value: Any, path: str, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            yield path
    elif depth <= _MAX_DEPTH:
        for here, inner in _children(value, path):
            yield from _find_bad_text(here, here, depth + 1)
            yield from _find_bad_text(inner, here, depth + 1)


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    before = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return [(f"{before}{key}", inner) for key, inner in value.items()]
    if type(value) in (list, tuple):
        return [(f"{before}{index}", inner) for index, inner in enumerate(value)]
    return []


@contextlib.contextmanager
def reading_tree() -> Iterator[None]:
    """Convert errors of malformed nodes, which :func:`flatten` did not write, in the body. Raises: CheckpointError."""
    try:
        yield
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"the tree of plain values is malformed ({type(error).__name__}: {error})") from error


@reading_tree()
def decode(
    tree: bytes,
    get: Callable[[str], torch.Tensor],
    meshes: Sequence[Any] = (),
    *,
    rewrap: Callable[[Wrapped], Any] = Wrapped.made,
) -> Any:
    """Rebuild a state from its tree.

    Raises:
        CheckpointError: The tree is malformed, or contains a tensor subclass that this process does not know.
        OtherLayout: It contains a DTensor over a mesh that the live state does not use.
    """

    def value(node: list[Any]) -> Any:
        match node:
            case ["v" | "L", plain]:
                return plain
            case ["P", items]:
                return tuple(items)
            case ["l", items]:
                return [value(item) for item in items]
            case ["p", items]:
                return tuple([value(item) for item in items])
            case ["d", items]:
                return {key: value(item) for key, item in items}
            case ["D", items, metadata]:
                ordered = collections.OrderedDict((key, value(item)) for key, item in items)
                if (found := value(metadata)) is not None:
                    ordered._metadata = found  # type: ignore[attr-defined]
                return ordered
            case ["T", name]:
                return get(name)
            case ["T", name, layout]:
                return distribute(get(name), layout, meshes)
            case ["w", kind, dtype, shape, stride, context, parts, _, layout]:
                found = {attribute: value(part) for attribute, part in parts}
                local = rewrap(Wrapped(kind, _dtype(dtype), tuple(shape), tuple(stride), value(context), found))
                return local if layout is None else distribute(local, layout, meshes)
            case ["n", name]:
                return get(name).numpy().copy()
            case ["a", data]:
                return np.load(io.BytesIO(data), allow_pickle=False)
            case ["g", dtype, data]:
                return np.frombuffer(data, dtype=dtype)[0]
            case ["t", name]:
                return _dtype(name)
            case ["o", data]:
                return _load_pickled(data)
        raise CheckpointError(f"the tree of plain values has an unknown node {str(node)[:80]}")

    return value(decoded_tree(tree))


def decoded_tree(tree: bytes) -> Any:
    """Return the nodes of a tree that :func:`flatten` made. Raises: CheckpointError, when it is malformed."""
    try:
        return from_msgpack(tree, Any)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"the tree of plain values cannot be read ({error})") from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the tree of plain values has an unknown element type {name[:80]!r}")
    return found


@reading_tree()
def layouts_of(tree: bytes) -> dict[str, Layout | None]:
    """Return the layout of each tensor of a tree; ``None`` = not distributed. Raises: CheckpointError, if malformed."""
    found: dict[str, Layout | None] = {}

    def visit(node: Any) -> None:
        match node:
            case ["T", name, *layout]:
                found[name] = layout[0] if layout else None
            case ["w", *_, [[_, ["T", name]]], True, layout]:
                found[name] = layout
            case ["w", *_, parts, False, layout]:
                for _, part in parts:
                    visit([*part[:2], layout] if layout is not None and part[0] == "T" else part)
            case ["d" | "D" | "l" | "p" as kind, items, *_]:
                for item in items:
                    visit(item[1] if kind in "dD" else item)

    visit(decoded_tree(tree))
    return found


def _find_class(name: str) -> Any:
    """Return the tensor subclass of this name if this process has imported it; imports nothing."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    is_known = isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")
    return found if is_known else None
