"""Searching nested containers: training states and batches are mappings, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]


def find_nested(value: Any, is_wanted: Callable[[Any], bool], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the wanted objects with their path of keys (as text) and indices; wanted objects are not descended into."""
    if is_wanted(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from find_nested(inner, is_wanted, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from find_nested(inner, is_wanted, (*path, index))


def find_kind(value: Any, kind: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the instances of a class or classes; see :func:`find_nested`."""
    return find_nested(value, lambda one: isinstance(one, kind), path)
