"""The collectives that this process entered, and the one that it waits in, as torch's own books tell.

Each process group counts its collectives. Which of them has not ended, torch's flight recorder knows: in torch 2.13 it
records gloo's and NCCL's from the start, in earlier versions NCCL's only, and may be off (``TORCH_FR_BUFFER_SIZE=0``).
Without it the name of the function of ``torch.distributed`` that the stack shows has to do.

Nothing here imports torch: a process that has not, has entered no collective.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import msgspec

from outlast.decoding import json_decoder
from outlast.monitor.stacks import Stack
from outlast.policy.causes import Collective

__all__ = ["Books", "count_collectives", "read_books", "waits_in"]

log = logging.getLogger(__name__)

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_SAME_SHAPE = frozenset({"ALLREDUCE", "BROADCAST"})
"""Collectives to which every rank brings the same sizes; others may differ."""


class Books(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process's own books say about its collectives; travels to the examiner as JSON."""

    groups: dict[str, int] = {}
    """Collectives entered, by name of the process group."""
    recorded: bool = False
    """The flight recorder has this process's collectives: where ``pending`` is ``None``, none is under way."""
    pending: Collective | None = None
    """The oldest one that has not ended."""


class _RecordedCollective(msgspec.Struct):
    profiling_name: str = ""
    process_group: tuple[str, str] = ("", "")
    pg_id: int = -1
    collective_seq_id: int = -1
    p2p_seq_id: int = -1
    is_p2p: bool = False
    retired: bool = True
    input_sizes: list[list[int]] = []
    thread_id: str = ""


class _GroupProgress(msgspec.Struct):
    last_completed_collective: str = "-1"


class _Trace(msgspec.Struct):
    entries: list[_RecordedCollective] = []
    pg_status: dict[str, _GroupProgress] = {}


_decoder = json_decoder(_Trace)


def count_collectives() -> int:
    """Return how many collectives this process has entered, over all its groups; -1 = not known."""
    groups = _count_by_group()
    return -1 if groups is None else sum(groups.values())


def read_books(thread: int | None = None) -> Books:
    """Return what the books say.

    Args:
        thread: Identity of the thread that trains; ``None`` = the main thread.

    Blocks: up to a tenth of a second, while the recorder writes out its 2,000 entries.
    """
    groups = _count_by_group() or {}
    entries = _recorded(groups)
    if entries is None:
        return Books(groups=groups)
    ident = str(threading.main_thread().ident if thread is None else thread)
    pending = next((one for one in entries if one.thread_id == ident), entries[0] if entries else None)
    return Books(groups=groups, recorded=True, pending=None if pending is None else _collective(pending))


def waits_in(stack: Stack, books: Books | None) -> tuple[bool | None, Collective | None]:
    """Return whether a rank waits for others, and in what; from its stack, and from its books where they are known."""
    waits = stack.waits_in_collective
    if stack.is_in_agreement:
        return waits, Collective(op="an agreement of outlast", is_own=True)
    if books is not None and books.recorded:
        if books.pending is not None:
            return waits is not False, books.pending
        # A backward pass computes as well, and a checkpoint's code writes files.
        return (False if waits and stack.collective is None else waits), None
    if not waits or stack.collective is None:
        return waits, None
    counts = list(books.groups.values()) if books is not None else []
    return waits, Collective(op=_plain(stack.collective), seq=counts[0] if len(counts) == 1 else -1)


def _count_by_group() -> dict[str, int] | None:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return None
    counts = {}
    for group in list(c10d._world.pg_map):
        try:
            counts[str(group.group_name)] = max(
                group._get_backend(device)._get_sequence_number_for_group() for device in group._device_types
            )
        except (RuntimeError, ValueError, AttributeError) as error:  # a backend without numbers
            log.debug("collectives of group %s are not known: %s", group, error)
            return None
    return counts


def _recorded(groups: dict[str, int]) -> list[_RecordedCollective] | None:
    """Return what these groups have under way, oldest first; ``None`` = nothing is recorded."""
    bindings: Any = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    found: list[_RecordedCollective] | None = None
    for name in _RECORDERS:
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        try:
            trace = _decoder.decode(dump(includeCollectives=True, onlyActive=True))
        except (RuntimeError, TypeError, msgspec.DecodeError) as error:  # of a form that this version does not know
            log.debug("torch's flight recorder cannot be read: %s", error)
            continue
        ended = {group: int(status.last_completed_collective) for group, status in trace.pg_status.items()}
        known = [one for one in trace.entries if one.process_group[0] in groups]
        if known:
            found = (found or []) + [
                one
                for one in known
                if not one.retired and (one.is_p2p or one.collective_seq_id > ended.get(str(one.pg_id), -1))
            ]
    return found


def _collective(entry: _RecordedCollective) -> Collective:
    name, description = entry.process_group
    op = _plain(entry.profiling_name.rpartition(":")[2])
    label = f"{name} ({description})" if description not in ("", "undefined") else name
    return Collective(
        op=op,
        seq=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
        group=name,
        label="" if description == "default_pg" else label,
        shape=str(entry.input_sizes) if op in _SAME_SHAPE and not entry.is_p2p else "",
        is_p2p=entry.is_p2p,
    )


def _plain(name: str) -> str:
    return name.replace("_", "").upper()
