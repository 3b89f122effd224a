"""A saved state put back into the live one, in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from outlast.checkpoint.state import is_stateful, may_be_absent
from outlast.errors import Mismatch

__all__ = ["check_fit", "restore_into"]

log = logging.getLogger(__name__)


def check_fit(live: Mapping[str, Any], saved: Any, path: str = "state") -> None:
    """Check that a saved state can be put into the live one.

    Raises:
        Mismatch: Something is missing, or has another shape; nothing was changed.
    """
    if not isinstance(saved, dict):
        raise Mismatch(f"{path} was saved as a {type(saved).__name__}, not as a mapping")
    missing = [str(name) for name, value in live.items() if name not in saved and not may_be_absent(value)]
    if missing:
        raise Mismatch(f"{path} was saved without {', '.join(missing)}; give the state that was saved")
    for name, value in live.items():
        here = f"{path}.{name}"
        if name not in saved or is_stateful(value):
            continue
        if isinstance(value, torch.Tensor):
            found = saved[name]
            if not isinstance(found, torch.Tensor) or found.shape != value.shape or found.dtype != value.dtype:
                shape = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found)
                raise Mismatch(f"{here} was saved as {shape}, here it is {value.dtype} {tuple(value.shape)}")
        elif _is_nested(value):
            check_fit(value, saved[name], here)
        elif not isinstance(live, MutableMapping):
            raise Mismatch(f"{here} is a plain value in a mapping that takes none back; give a dict")


def restore_into(live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Put a saved state, which fits, into the live one: in place, or, plain values, into their mapping.

    Raises:
        Mismatch: A ``load_state_dict`` refused what was saved.
    """
    for name, value in live.items():
        if name not in saved:
            continue  # check_fit() let it pass
        found = saved[name]
        if is_stateful(value):
            try:
                value.load_state_dict(found)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise Mismatch(
                    f"state {name!r} ({type(value).__name__}) does not take what was saved: {_in_one_line(error)}"
                ) from error
        elif isinstance(value, torch.Tensor):
            if not _is_same_memory(value, found):
                with torch.no_grad():
                    value.copy_(found)
        elif _is_nested(value):
            restore_into(value, found)
        else:
            assert isinstance(live, MutableMapping)
            live[name] = found
    if extra := [str(name) for name in saved if name not in live]:
        log.warning(
            "the checkpoint holds state that the script has no place for; it is not loaded: %s", ", ".join(extra)
        )


def _is_nested(value: Any) -> bool:
    """Whether a mapping is walked into, instead of being a plain value as a whole."""
    if not isinstance(value, Mapping):
        return False
    return any(is_stateful(inner) or isinstance(inner, torch.Tensor) or _is_nested(inner) for inner in value.values())


def _is_same_memory(live: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether what was saved was read straight into the live tensor."""
    if type(live) not in (torch.Tensor, torch.nn.Parameter):
        return False  # a DTensor or a subclass: its memory is that of its parts
    return live.device.type == "cpu" and live.data_ptr() == found.data_ptr() and live.stride() == found.stride()


def _in_one_line(error: Exception) -> str:
    """Return an exception's text in one line; of a list of mismatches the first, and how many more there are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) <= 2:
        return " ".join(lines)
    return f"{lines[1]} (and {len(lines) - 2} more)"
