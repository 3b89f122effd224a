"""Clean-up after a call of the wrapped function: exceptions, frames, child processes, hooks and process groups.

The next call runs in the same process: an object of this call that survives holds memory or connections, or a group
without its peers.
"""

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
from outlast.runtime.device_collectives import await_aborts, is_aborting

log = logging.getLogger(__name__)

_AT_REST_S = 5.0
_CHILD_S = 1.0
_LOST_WORDS = ("connection closed", "connection reset", "broken pipe", "connection refused", "socket closed", "remote")


def describe(error: BaseException) -> str:
    """Return an exception in one line, with the place where it was raised."""
    text = str(error).strip().split("\n")[0][:300]
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):  # extract_tb() would read each frame's source file
        where = f" (at {frame.f_code.co_filename}:{line})"
    return f"{type(error).__name__}: {text}{where}"


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception only means that another rank is gone."""
    import torch.distributed as dist

    if isinstance(error, PeerLost | ConnectionError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    is_from_group = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
    return is_from_group and any(words in text for words in _LOST_WORDS)


def clear_frames(error: BaseException | None) -> list[BaseException]:
    """Clear the frames of an exception and of its causes; return all of these exceptions.

    Their tracebacks still show where they were raised.
    """
    found: list[BaseException] = []
    pending = [error]
    while pending:
        one = pending.pop()
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        pending += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
    return found


def drop(error: BaseException | None) -> None:
    for one in clear_frames(error):
        one.__traceback__ = None


class Background:
    def __init__(self) -> None:
        self._excepthook = sys.excepthook
        self._children = set(multiprocessing.active_children())

    def restore(self) -> None:
        """Restore the hooks that process groups replaced, and end the data loaders' workers that are left."""
        sys.excepthook = self._excepthook  # torch puts another layer around it for every default group
        end_children(set(multiprocessing.active_children()) - self._children)


def leave(callbacks: Iterable[Callable[[], None]], error: BaseException | None, background: Background) -> None:
    """Clean up after a call: its callbacks, exception, child processes and groups.

    An error in a callback is logged.

    Raises:
        OutlastError: A collective of the call does not end: this process must not continue.

    Blocks: about 10 ms; up to 5 s when a collective does not end.
    """
    connections.cut_all()
    for callback in callbacks:
        if not str(getattr(callback, "__module__", "")).startswith("outlast."):
            await_aborts()  # a callback of the script may shut groups down
        try:
            callback()
        except (Exception, SystemExit):
            log.exception("a function given to on_leave() failed")
    background.restore()
    drop(error)
    end_groups()


def end_groups() -> None:
    """Destroy all process groups once nothing runs in them.

    Destroying a group while one of its threads still frees a collective's tensors deadlocks: the destructor waits for
    the thread, and the thread for the interpreter's lock (torch 2.13).

    Raises:
        OutlastError: A collective does not end: this process must not continue.

    Blocks: about 10 ms; up to 5 s when a collective does not end.
    """
    connections.cut_all()
    if not connections.wait_until_at_rest(_AT_REST_S):
        raise OutlastError("a collective of the call that was left does not end; this rank cannot continue")
    _destroy_groups()
    gc.collect()
    # Destroying a group closes the remaining connections of gloo, unless another object still holds the group.
    if connections.num_open() and not connections.wait_until_at_rest(_AT_REST_S, patience_s=_AT_REST_S):
        raise OutlastError(
            "a process group of the call that was left is still in use and its connections do not close; this "
            "rank cannot continue: let the function hold its groups and DistributedDataParallel itself"
        )
    connections.forget()


def _destroy_groups() -> None:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if dist.is_initialized() and not is_aborting():
        dist.destroy_process_group()
        return
    # The function was left while it made the default group, or its communicators are being aborted: a shutdown would
    # wait for that.
    world: Any = c10d._world
    c10d._update_default_pg(None)
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(world, name).clear()
    world.pg_coalesce_state.clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    # The count is part of a group's name: ranks that count differently would wait for each other forever.
    world.group_count = 0


def end_children(children: Iterable[BaseProcess]) -> None:
    """End the daemonic processes among these, such as a data loader's workers, without waiting for their work.

    A data loader whose iterator is dropped waits up to five seconds for each worker, and gets a signal from the kernel
    when a worker that it still counts was killed; so iterators are detached from their workers first.
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
