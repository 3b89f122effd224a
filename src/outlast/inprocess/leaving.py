"""Leaving no trace of an iteration: no exception, frame, process group, child process or hook of it survives."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any

from outlast.errors import OutlastError, PeerLost
from outlast.runtime import connections

__all__ = ["Background", "describe", "drop", "end_groups", "is_consequence", "leave"]

log = logging.getLogger(__name__)

_AT_REST_S = 5.0
_CHILD_S = 1.0
_LOST_WORDS = ("connection closed", "connection reset", "broken pipe", "connection refused", "socket closed", "remote")


def describe(error: BaseException) -> str:
    """Return an exception in one line, with where it was raised."""
    text = str(error).strip().split("\n")[0][:300]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


def is_consequence(error: BaseException) -> bool:
    """Say whether an exception only tells that another rank is gone."""
    import torch.distributed as dist

    if isinstance(error, PeerLost | ConnectionError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    is_from_group = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
    return is_from_group and any(words in text for words in _LOST_WORDS)


def drop(error: BaseException | None) -> None:
    """Let go of what the frames hold that an exception went through, and of those of its causes."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        pending += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


class Background:
    """What was there before the function ran, to get back to."""

    def __init__(self) -> None:
        self._excepthook = sys.excepthook
        self._children = _children()

    def freeze(self) -> None:
        """Spare the collector the objects that live anyway: it takes 100 times as long to look through them all."""
        gc.collect()
        gc.freeze()

    def thaw(self) -> None:
        """Undo :meth:`freeze`."""
        gc.unfreeze()

    def restore(self) -> None:
        """Take back the hooks that process groups put in, and end the data loaders' workers that are left."""
        sys.excepthook = self._excepthook  # torch puts another layer around it for every default group
        end_children(_children() - self._children)


def leave(callbacks: Iterable[Callable[[], None]], error: BaseException | None, background: Background) -> None:
    """Get rid of an iteration: its callbacks, exception, child processes and groups.

    What fails in a callback is logged: the iteration is over all the same.

    Raises:
        OutlastError: A collective of the iteration does not end: this process must not go on.

    Blocks: about 10 ms; up to 5 s when a collective does not end.
    """
    connections.cut_all()
    for callback in callbacks:
        try:
            callback()
        except Exception:
            log.exception("a function given to on_leave() failed")
    background.restore()
    drop(error)
    end_groups()


def end_groups() -> None:
    """Destroy all process groups, when nothing in them runs any more.

    Destroyed while one of its threads still lets go of a collective's tensors, a group waits for that thread, which
    waits for the interpreter's lock (torch 2.13).

    Raises:
        OutlastError: A collective does not end: this process must not go on.

    Blocks: about 10 ms; up to 5 s when a collective does not end.
    """
    connections.cut_all()
    if not connections.wait_until_at_rest(_AT_REST_S):
        raise OutlastError("a collective of the iteration that was left does not end; this rank cannot go on")
    _destroy_groups()
    gc.collect()
    # Destroying a group closes what gloo did not close by itself, unless somebody still holds the group.
    if connections.num_open() and not connections.wait_until_at_rest(_AT_REST_S, patience_s=_AT_REST_S):
        raise OutlastError(
            "a process group of the iteration that was left is still in use and its connections do not close; this "
            "rank cannot go on: let the function hold its groups and DistributedDataParallel itself"
        )
    connections.forget()


def _destroy_groups() -> None:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if dist.is_initialized():
        dist.destroy_process_group()
        return
    world: Any = c10d._world
    if world.pg_map:  # the function was left while it made the default group
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
            getattr(world, name).clear()
        world.pg_coalesce_state.clear()
        c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    # Counted before anything is connected. Ranks that count differently would give their next group different names,
    # and wait for each other for ever.
    world.group_count = 0


def _children() -> set[BaseProcess]:
    return set(multiprocessing.active_children())


def end_children(children: Iterable[BaseProcess]) -> None:
    """End the daemonic processes among these, such as a data loader's workers, without waiting for what they do.

    A data loader whose iterator is dropped waits up to five seconds for each worker; it must not be left to do so, nor
    be told by the kernel that a worker that it still counts on was killed.
    """
    children = [child for child in children if child.daemon]
    if not children:
        return
    _detach_loaders()
    for child in children:
        child.kill()
    for child in children:
        child.join(_CHILD_S)
        if child.is_alive():
            log.warning("child process %s does not end", child.pid)


def _detach_loaders() -> None:
    """Have the iterators of data loaders let go of their workers."""
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return
    import torch

    kind = loading._MultiProcessingDataLoaderIter
    for iterator in [found for found in gc.get_objects() if type(found) is kind]:
        if getattr(iterator, "_shutdown", True):
            continue
        iterator._shutdown = True
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        for pending in [*getattr(iterator, "_index_queues", ()), getattr(iterator, "_worker_result_queue", None)]:
            if pending is not None and hasattr(pending, "cancel_join_thread"):
                pending.cancel_join_thread()
                pending.close()
