"""Slurm's short forms: node lists such as ``gpu[07-09,12],login1`` and counts such as ``4(x2),3``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlast.errors import ConfigError

__all__ = ["expand_counts", "expand_nodes"]

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_NODES = 1_000_000


def expand_counts(text: str) -> tuple[int, ...]:
    """Return one number for each node.

    Args:
        text: As in ``SLURM_TASKS_PER_NODE``: ``4``, ``4(x2)``, ``4(x2),3``.

    Raises:
        ConfigError: It is another text.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MAX_NODES:
            raise ConfigError(f"{text!r} is not a list of counts such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the names in a node list, in its order.

    Args:
        text: As in ``SLURM_JOB_NODELIST``: ``n1``, ``n[1-3,7]``, ``gpu[07-09],login1``, ``rack[1-2]n[01-16]``.

    Raises:
        ConfigError: It is another text.
    """
    names: list[str] = []
    for part in _split(text):
        names += _expand(part, text)
        if len(names) > _MAX_NODES:
            raise ConfigError(f"{text!r} names more than {_MAX_NODES} nodes")
    return tuple(names)


def _split(text: str) -> Iterator[str]:
    """Yield what commas outside of brackets separate."""
    start = depth = 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ConfigError(f"{text!r} is not a node list: its brackets do not match")
        if character == "," and not depth:
            yield text[start:position].strip()
            start = position + 1
    if depth:
        raise ConfigError(f"{text!r} is not a node list: its brackets do not match")
    if text[start:].strip():
        yield text[start:].strip()


def _expand(part: str, whole: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not head and not bracket:
        raise ConfigError(f"{whole!r} is not a node list: a name is empty")
    if not bracket:
        return [part]
    inner, _, tail = rest.partition("]")
    middles: list[str] = []
    for piece in inner.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise ConfigError(f"{whole!r} is not a node list: {piece!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < _MAX_NODES:
            raise ConfigError(f"{whole!r} is not a node list: {piece!r} is not a range")
        middles += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    tails = _expand(tail, whole) if tail else [""]
    return [f"{head}{middle}{end}" for middle in middles for end in tails]
