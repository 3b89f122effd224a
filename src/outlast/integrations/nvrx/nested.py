"""``nvidia_resiliency_ext.fault_tolerance.dict_utils``: functions over the leaves of nested dicts and lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each leaf of nested dicts and lists by the result of ``f``; return ``x``."""
    if not isinstance(x, dict | list):
        return f(x)
    for key, value in list(x.items() if isinstance(x, dict) else enumerate(x)):
        x[key] = dict_list_map_inplace(f, value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a copy of nested dicts and lists with each leaf replaced by the result of ``f``."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)
