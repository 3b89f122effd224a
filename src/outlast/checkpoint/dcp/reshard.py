"""Loads a checkpoint into another layout than that of the save: each rank reads its current parts.

The saved structure (containers, plain values, a placeholder for each tensor) is compared with the live state, then the
rank's parts are read into new CPU tensors. The live state is not modified before :meth:`Resharded.apply`. Plain values,
and tensors that differed between ranks, are those of rank 0; random numbers are not loaded.
"""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import torch

from outlast.checkpoint.dcp.items import ROOT, TORCH_TYPES, Path
from outlast.checkpoint.dcp.manifest import GlobalManifest, Item
from outlast.checkpoint.dcp.reader import Wanted, fill, read_tree, tensors_of
from outlast.checkpoint.fit import KEEP_HINT, check_fit, restore_into
from outlast.checkpoint.layouts import as_distributed, own_part
from outlast.checkpoint.missing import complete, find_missing
from outlast.checkpoint.state import Wrapped, decode, decoded_tree, is_nested, is_stateful, may_be_absent
from outlast.checkpoint.verification import VerifiedFiles
from outlast.errors import CheckpointError, Mismatch
from outlast.runtime.nested import find_kind
from outlast.wording import count

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """Placeholder for a tensor in the saved structure."""

    item: Item | None
    wrapped: Wrapped | None = None
    """For a tensor subclass of several parts: its construction, with :class:`Stored` parts."""


def saved_structure(files: VerifiedFiles) -> dict[str, Any]:
    """Return the state as rank 0 saved it, with :class:`Stored` in place of tensors."""
    tree = read_tree(files, 0)
    mine = tensors_of(files.manifest, 0, tree)
    shared = {item.name: item for item in files.manifest.items}
    _, entries = decoded_tree(tree)
    root = dict(entries).get(ROOT, ["d", []])

    def get(name: str) -> torch.Tensor:
        item = mine[name]
        if name in arrays:
            assert item.dtype is not None
            (piece,) = item.pieces
            tensor = torch.empty(piece.shape, dtype=TORCH_TYPES[item.dtype])
            fill(files, [Wanted(item, piece.offset, tensor)])
            return tensor
        return cast(torch.Tensor, Stored(shared.get(item.name, item)))

    arrays: set[str] = set()
    stripped = _without_layouts(root, arrays)
    return dict(decode(msgspec.msgpack.encode(stripped), get, rewrap=lambda wrapped: Stored(None, wrapped)))


def _without_layouts(node: Any, arrays: set[str]) -> Any:
    """Return a tree without distributed tensors; adds the names of former arrays to ``arrays``.

    Raises: CheckpointError (the tree holds a sharded tensor subclass, which no other layout can load).
    """
    match node:
        case ["w", *_, [[_, tensor]], True, _]:
            return tensor
        case ["w", kind, dtype, shape, stride, context, parts, False, layout]:
            if layout is not None:
                name = str(parts[0][1][1]).removeprefix(f"{ROOT}.").rpartition(".")[0] if parts else ""
                raise CheckpointError(
                    f"tensor {name} was saved in shards of {kind.replace(':', '.')}, which only as many ranks with the "
                    "same parallelism can load; load it there, and save it dequantized"
                )
            stripped = [[key, _without_layouts(part, arrays)] for key, part in parts]
            return ["w", kind, dtype, shape, stride, context, stripped, False, None]
        case ["T", name, *_]:
            return ["T", name]
        case ["n", name]:
            arrays.add(name)
            return node
        case ["d" | "D" as kind, items, *rest]:
            return [kind, [[key, _without_layouts(item, arrays)] for key, item in items], *rest]
        case ["l" | "p" as kind, items]:
            return [kind, [_without_layouts(item, arrays) for item in items]]
    return node


def replace_all(value: Any, change: Callable[[Any, Path], Any], kind: type, path: Path) -> Any:
    """Return a copy of nested containers with all values of a kind replaced."""
    if isinstance(value, kind):
        return change(value, path)
    if isinstance(value, dict | collections.OrderedDict):
        changed = copy.copy(value)
        for key, inner in value.items():
            changed[key] = replace_all(inner, change, kind, (*path, str(key)))
        return changed
    if type(value) in (list, tuple):
        return type(value)(replace_all(inner, change, kind, (*path, index)) for index, inner in enumerate(value))
    return value


@dataclass(frozen=True, slots=True)
class _Shadow:
    """This rank's part of a tensor, read into new memory."""

    local: torch.Tensor
    like: Any
    """The live distributed tensor with the same layout; ``None`` = the whole tensor."""
    shape: tuple[int, ...]

    def outline(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.local.dtype, device="meta")

    def tensor(self) -> torch.Tensor:
        if self.like is None:
            return self.local
        stride = torch.empty(self.shape, device="meta").stride()
        return as_distributed(self.local, self.like.device_mesh, self.like.placements, self.shape, stride)


@dataclass(frozen=True, slots=True)
class _WrappedShadow(_Shadow):
    """A whole tensor subclass; its parts are shadows."""

    wrapped: Wrapped

    def outline(self) -> torch.Tensor:
        return self.wrapped.outline()

    def tensor(self) -> torch.Tensor:
        parts = {
            name: part.tensor() if isinstance(part, _Shadow) else part for name, part in self.wrapped.parts.items()
        }
        return replace(self.wrapped, parts=parts).made()


@dataclass(frozen=True, slots=True)
class Resharded:
    """A verified checkpoint in tensors separate from the live ones."""

    state: Mapping[str, Any]
    saved: dict[str, Any]
    """The values to be loaded."""
    num_bytes_read: int
    """Bytes read from the global tier."""
    missing: Sequence[str] = ()
    """Names in the live state that were not saved and keep their present value."""

    def apply(self) -> None:
        """Load the values into the live state.

        Raises: CheckpointError (a ``load_state_dict`` refused them; the live state is then unusable).
        """
        restore_into(self.state, replace_all(self.saved, lambda value, _: value.tensor(), _Shadow, ()))


def load_resharded(files: VerifiedFiles, state: Mapping[str, Any], *, keeps_missing: bool = False) -> Resharded:
    """Read what this rank needs of a checkpoint, for any world size and layout.

    Optimizers need not have taken a step: their states are created as saved, in the layout of the parameters.

    Args:
        state: The live state: plain, DDP or ``fully_shard`` modules, optimizers, anything with a ``state_dict``.

    Raises: CheckpointError (a byte differs from its digest or is missing, or the checkpoint does not fit ``state``).
    Blocks: until everything is read. Does not communicate, but a ``state_dict()`` in ``state`` may.
    """
    planner = _Planner(files, keeps_missing=keeps_missing)
    saved = planner.plan(state)
    check_fit(state, replace_all(saved, lambda shadow, _: shadow.outline(), _Shadow, ()), keeps_missing=keeps_missing)
    fill(files, planner.wanted)
    _warn_of_differences(files.manifest)
    return Resharded(state, saved, files.num_bytes_read, planner.missing)


class _Planner:
    """Maps each part of the live state to saved values and the regions to read."""

    def __init__(self, files: VerifiedFiles, *, keeps_missing: bool) -> None:
        self._keeps_missing = keeps_missing
        self.missing: list[str] = []
        self.wanted: list[Wanted] = []
        self._files = files
        self._items = {item.name: item for item in files.manifest.items if item.path and item.dtype is not None}
        self._shadows: dict[tuple[str, int], _Shadow] = {}
        self._wrapped: dict[Path, Stored] = {}

    def plan(self, state: Mapping[str, Any]) -> dict[str, Any]:
        saved = saved_structure(self._files)
        if self._keeps_missing:
            self.missing, saved = find_missing(state, saved), complete(state, saved)
        self._wrapped = {path: stored for path, stored in find_kind(saved, Stored) if stored.wrapped is not None}
        return {
            name: self._any(value, saved.get(name, _MISSING), (name,))
            for name, value in state.items()
            if name in saved or not (self._keeps_missing or may_be_absent(value))
        }

    def _any(self, live: Any, saved: Any, path: Path) -> Any:
        if is_stateful(live):
            return self._stateful(live, saved, path)
        if isinstance(live, torch.Tensor):
            return self._shadow(path, live)
        if is_nested(live):
            inner = saved if isinstance(saved, Mapping) else {}
            return {
                name: self._any(value, inner.get(name, _MISSING), (*path, str(name)))
                for name, value in live.items()
                if name in inner or not self._keeps_missing
            }
        return self._value(saved, path)

    def _stateful(self, live: Any, saved: Any, path: Path) -> Any:
        content = live.state_dict()
        templates = dict(find_kind(content, torch.Tensor, path))
        if isinstance(live, torch.optim.Optimizer):
            return self._as_saved(saved, path, {**templates, **_optimizer_templates(live, content, saved, path)})
        stored = {stored_path for stored_path, _ in find_kind(saved, Stored, path)}
        if isinstance(live, torch.nn.Module) or (templates and set(templates) != stored):
            return self._as_live(content, saved, path)
        return self._as_saved(saved, path, templates)

    def _as_saved(self, saved: Any, path: Path, templates: Mapping[Path, torch.Tensor]) -> Any:
        """Return the saved values, with tensors in the layout of the live ones."""
        self._value(saved, path)
        return replace_all(saved, lambda stored, at: self._make(stored, templates.get(at)), Stored, path)

    def _as_live(self, live: Any, saved: Any, path: Path) -> Any:
        if isinstance(saved, torch.Tensor):
            return saved  # not saved: keeps its live value
        if isinstance(live, torch.Tensor):
            return self._shadow(path, live)
        if isinstance(live, Mapping):
            inner = saved if isinstance(saved, Mapping) else {}
            filled = copy.copy(live)
            for name, value in live.items():
                cast(Any, filled)[name] = self._as_live(value, inner.get(name, _MISSING), (*path, str(name)))
            return filled
        if isinstance(live, list) and any(True for _ in find_kind(live, torch.Tensor)):
            inner_list = saved if isinstance(saved, list) and len(saved) == len(live) else [_MISSING] * len(live)
            pairs = enumerate(zip(live, inner_list, strict=True))
            return [self._as_live(value, found, (*path, index)) for index, (value, found) in pairs]
        return live if saved is _MISSING else self._as_saved(saved, path, {})

    def _value(self, saved: Any, path: Path) -> Any:
        if saved is _MISSING:
            raise Mismatch(f"{_name(path)} was not saved; give the state that was saved; {KEEP_HINT}")
        return saved

    def _shadow(self, path: Path, live: torch.Tensor) -> _Shadow:
        if (stored := self._wrapped.get(path)) is not None:
            return self._make(stored, live)
        item = self._items.get(_name(path))
        if item is None:
            raise Mismatch(f"tensor {_name(path)} was not saved; give the state that was saved; {KEEP_HINT}")
        if item.shape != tuple(live.shape):
            raise Mismatch(f"tensor {item.name} was saved as {item.shape}, here it is {tuple(live.shape)}")
        return self._make(Stored(item), live)

    def _make(self, stored: Stored, template: torch.Tensor | None) -> _Shadow:
        if stored.wrapped is not None:
            parts = {
                name: self._make(part, None) if isinstance(part, Stored) else part
                for name, part in stored.wrapped.parts.items()
            }
            wrapped = replace(stored.wrapped, parts=parts)
            return _WrappedShadow(torch.empty(0), None, wrapped.shape, wrapped)
        item = stored.item
        assert item is not None
        like: Any = template if hasattr(template, "device_mesh") and tuple(template.shape) == item.shape else None  # type: ignore[union-attr]
        if (item.name, id(like)) in self._shadows:
            return self._shadows[item.name, id(like)]
        shape, offset = item.shape, (0,) * len(item.shape)
        if like is not None:
            shape, offset = own_part(like, item.name)
        assert item.dtype is not None
        shadow = _Shadow(torch.empty(shape, dtype=TORCH_TYPES[item.dtype]), like, item.shape)
        self._shadows[item.name, id(like)] = shadow
        self.wanted.append(Wanted(item, offset, shadow.local))
        return shadow


_MISSING = object()


def _optimizer_templates(
    optimizer: torch.optim.Optimizer, content: dict[str, Any], saved: Any, path: Path
) -> dict[Path, torch.Tensor]:
    """Return the parameter for the path of each state; a state of a parameter's shape has its layout.

    Raises: Mismatch (the optimizer has other parameters).
    """
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not isinstance(saved.get("state"), Mapping):
        raise Mismatch(f"{_name(path)} was not saved as an optimizer's state; give the state that was saved")
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise Mismatch(f"{_name(path)} was saved with parameter groups of {sizes[0]}, here they are {sizes[1]}")
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        (*path, "state", str(number), str(key)): parameter
        for number, parameter in zip(numbers, parameters, strict=True)
        for key in saved["state"].get(number, ())
    }


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _warn_of_differences(manifest: GlobalManifest) -> None:
    prefix = f"{ROOT}."
    names = sorted({t.name for entry in manifest.ranks for t in entry.tensors if t.name.startswith(prefix)})
    if names:
        more = ", ..." if len(names) > 3 else ""
        log.warning(
            "%s differed between ranks when saved (%s%s); all ranks now take the lowest rank's",
            count(len(names), "tensor"),
            ", ".join(name.removeprefix(prefix) for name in names[:3]),
            more,
        )
