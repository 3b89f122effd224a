"""Check that a saved state fits a live one, and load it: in place, since the script may hold references."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from outlast.checkpoint.layouts import OtherLayout, in_words, meshes_of
from outlast.checkpoint.state import PLAIN_TYPES, SCALARS, flatten, is_nested, is_stateful, layouts_of, may_be_absent
from outlast.errors import Mismatch
from outlast.runtime.device_copies import as_bytes

log = logging.getLogger(__name__)
_MAX_LISTED = 20


def check_layouts(tree: bytes, live: Mapping[str, Any]) -> None:
    """Check that a tree's tensors are distributed as those of the captured live state. Raises: OtherLayout."""
    saved = layouts_of(tree)
    if not any(saved.values()) and not meshes_of(live):
        return
    present = layouts_of(flatten({"state": live}, is_live=True).tree)
    for name in sorted(saved.keys() & present.keys()):
        before, now = saved[name], present[name]
        if (before and before[:4]) != (now and now[:4]):
            raise OtherLayout(
                f"tensor {name!r} was saved as {in_words(before)}, here it is {in_words(now)}; build the model with "
                "the same parallelism, or load it from the global tier"
            )


KEEP_HINT = (
    'to keep the present values of what the checkpoint lacks, set missing="keep" (in a config: checkpoint.missing)'
)


def check_fit(live: Mapping[str, Any], saved: Any, path: str = "state", *, keeps_missing: bool = False) -> None:
    """Check that a saved state fits the live one. Raises: Mismatch, before anything is changed."""
    if not isinstance(saved, dict):
        raise Mismatch(f"{path} was saved as a {type(saved).__name__}, not as a mapping")
    missing = [str(name) for name, value in live.items() if name not in saved and not may_be_absent(value)]
    if missing and not keeps_missing:
        raise Mismatch(f"{path} was saved without {', '.join(missing)}; give the state that was saved; {KEEP_HINT}")
    for name, value in live.items():
        here = f"{path}.{name}"
        if name not in saved or is_stateful(value):
            continue
        if isinstance(value, torch.Tensor):
            found = saved[name]
            if not isinstance(found, torch.Tensor) or _kind_of(found) != _kind_of(value):
                kind = _kind_of(found) if isinstance(found, torch.Tensor) else type(found)
                raise Mismatch(f"{here} was saved as {kind}, here it is {_kind_of(value)}")
        elif is_nested(value):
            check_fit(value, saved[name], here, keeps_missing=keeps_missing)
        elif not isinstance(live, MutableMapping):
            raise Mismatch(f"{here} is a plain value in a mapping that takes none back; give a dict")


def restore_into(live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Load a saved state that fits, in place where possible. Raises: Mismatch, if a ``load_state_dict`` refuses it."""
    for name, value in live.items():
        if name not in saved:
            continue  # check_fit() accepted it
        found = saved[name]
        if is_stateful(value):
            try:
                value.load_state_dict(found)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise Mismatch(
                    f"state {name!r} ({type(value).__name__}) does not take what was saved: {_in_one_line(error)}"
                    f"{_describe_missing(value, found)}"
                ) from error
        elif isinstance(value, torch.Tensor):
            if not _copy_into(value, found):
                if value.layout is torch.strided or not isinstance(live, MutableMapping):
                    raise Mismatch(
                        f"state {name!r}: a tensor of shape {tuple(value.shape)} and strides {value.stride()} cannot "
                        "take what was saved; give a tensor whose elements do not share memory"
                    )
                live[name] = found  # a sparse tensor with another number of elements
        elif is_nested(value):
            restore_into(value, found)
        else:
            assert isinstance(live, MutableMapping)
            live[name] = filled(value, found)
    if extra := [str(name) for name in saved if name not in live]:
        log.warning(
            "the checkpoint holds state that the script has no place for; it is not loaded: %s", ", ".join(extra)
        )


def _describe_missing(live: Any, saved: Any) -> str:
    """Describe the module keys or optimizer parameters that were not saved, with the remedy; empty = none."""
    if isinstance(live, torch.nn.Module) and isinstance(saved, Mapping):
        missing = [key for key in live.state_dict() if key not in saved]
        if missing and any(key in saved for key in live.state_dict()):
            return f"; the checkpoint lacks {listed(missing)}; {KEEP_HINT}"
    if isinstance(live, torch.optim.Optimizer) and isinstance(saved, Mapping):
        num_saved = sum(len(group["params"]) for group in saved.get("param_groups", ()))
        if sum(len(group["params"]) for group in live.param_groups) > num_saved:
            return f"; {KEEP_HINT}"
    return ""


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def filled(live: Any, saved: Any) -> Any:
    """Return a plain value after a load: a dict, list, array or tensor stays the same object, filled in place.

    The script may hold a reference to it. Any other value is replaced.
    """
    return _filled(live, saved, {})


def _filled(live: Any, saved: Any, done: dict[int, Any]) -> Any:
    if not isinstance(live, type(saved)):
        return saved
    if type(live) is tuple and len(live) == len(saved):
        parts = tuple([_filled(one, other, done) for one, other in zip(live, saved, strict=True)])
        return live if all(map(operator.is_, parts, live)) else parts
    if not isinstance(live, dict | list | set | bytearray | np.ndarray | torch.Tensor):
        return saved
    if id(live) in done:  # the state holds it twice; it may have been saved as two
        return live if _is_same(done[id(live)], saved) else saved
    done[id(live)] = saved
    if isinstance(live, dict):
        has_inner = not SCALARS.issuperset(map(type, live.values()))
        if has_inner:
            saved = {name: _filled(live[name], value, done) if name in live else value for name, value in saved.items()}
        live.clear()
        live.update(saved)
    elif isinstance(live, list):
        has_inner = not SCALARS.issuperset(map(type, live))
        inner = [_filled(one, other, done) for one, other in zip(live, saved, strict=False)] if has_inner else []
        live[:] = inner + saved[len(inner) :]
    elif isinstance(live, set):
        live.clear()
        live.update(saved)
    elif isinstance(live, bytearray):
        live[:] = saved
    elif isinstance(live, np.ndarray):
        if live.shape != saved.shape or live.dtype != saved.dtype or not live.flags.writeable:
            return saved
        np.copyto(live, saved)
    elif _kind_of(live) != _kind_of(saved) or not _copy_into(live, saved):
        return saved
    return live


def _kind_of(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{layout}"


def _copy_into(live: torch.Tensor, found: torch.Tensor) -> bool:
    """Copy a tensor into a live one; return whether its memory layout allows that."""
    if _is_same_memory(live, found):
        return True
    with torch.no_grad():
        try:
            live.copy_(found)
        except RuntimeError:
            if live.layout is not torch.strided or 0 not in live.stride():
                return False
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in live.stride())
            if not _is_same(found[once].expand_as(found), found):
                return False
            live[once].copy_(found[once])
    return True


def _is_same(one: Any, other: Any) -> bool:
    flat, other_flat = flatten(one), flatten(other)
    if flat.tree != other_flat.tree:
        return False
    pairs = zip(flat.tensors, other_flat.tensors, strict=True)
    return all(one.dtype == other.dtype and as_bytes(one.tensor).equal(as_bytes(other.tensor)) for one, other in pairs)


def _is_same_memory(live: torch.Tensor, found: torch.Tensor) -> bool:
    if type(live) not in PLAIN_TYPES or live.layout is not torch.strided:
        return False  # a DTensor or a subclass: its memory is that of its parts
    return live.device.type == "cpu" and live.data_ptr() == found.data_ptr() and live.stride() == found.stride()


def _in_one_line(error: Exception) -> str:
    """Return an exception's text in one line; of a list of mismatches the first, and the number of the others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) <= 2:
        return " ".join(lines)
    return f"{lines[1]} (and {len(lines) - 2} more)"
