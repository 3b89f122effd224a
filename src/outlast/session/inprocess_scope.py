"""The call of a function wrapped by ``outlast.inprocess.Wrapper`` around a session, if there is one.

Such a session lives as long as one call. When the call is left, peers may be gone, so nothing may wait for them. The
training state stays in the process, and the next call's session resumes from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from outlast.config import Config
from outlast.env import WorkerEnv
from outlast.errors import ConfigError, RestartAbort
from outlast.incidents import EventKind
from outlast.inprocess.call import Handle, current_handle
from outlast.monitor.rank_monitor import RankMonitor
from outlast.runtime.journal import Journal
from outlast.runtime.process_groups import ranks_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.inprocess.restore import Restore
    from outlast.policy.recovery_point import Origin


log = logging.getLogger(__name__)
_KEPT = "outlast.session"


class InProcessScope:
    """The session's interface to the call around it; without a call all methods do nothing.

    Args:
        config: Says whether a call is required.

    Raises:
        ConfigError: A call is required but missing, or its wrapper has other settings.

    Thread: the main thread.
    """

    def __init__(self, config: Config) -> None:
        self._call: Handle | None = current_handle()
        self._memory: Restore | None = None
        if config.in_process and self._call is None:
            raise ConfigError(
                "in_process is on, but outlast.init() is not called within a wrapped function: decorate the function "
                "that trains with @outlast.inprocess.Wrapper(), and call it"
            )
        if self._call is None:
            return
        given = {} if config.in_process_restart is None else config.in_process_restart.given
        for name, value in given.items():
            if name != "enabled" and (others := getattr(self._call.config, name)) != value:
                raise ConfigError(
                    f"in_process_restart.{name}={value!r} of the session differs from the Wrapper's {others!r}; give "
                    "the Wrapper the same config: Wrapper(config)"
                )
        from outlast.inprocess.restore import Restore

        self._memory = self._call.keep(_KEPT, Restore)

    @property
    def is_active(self) -> bool:
        """Whether the session lives in a call; otherwise it lives as long as the process."""
        return self._call is not None

    @property
    def call_number(self) -> int:
        """Number of the call: 0 for the first, one more after each in-process restart."""
        return 0 if self._call is None else self._call.iteration

    @property
    def is_left(self) -> bool:
        """Whether the call has ended or must be left, which then explains any failure. Thread: any."""
        return self._call is not None and self._call.is_left

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Register a callback for when the call was left; last in, first called. It must not wait for a peer."""
        if self._call is not None:
            self._call.on_leave(callback)

    def note_failure(self, error: BaseException) -> None:
        """Record the error that ends the session, before its peers detect it and the call must be left."""
        if isinstance(error, Exception) and (call := self._inside()) is not None:
            call.note_failure(error)

    def ping(self) -> None:
        """Report progress to the monitor of the call."""
        if (call := self._inside()) is not None:
            call.ping()

    def undivided(self) -> AbstractContextManager[object]:
        """Return a context of a few milliseconds that no restart interrupts, to open resources that must be closed."""
        return nullcontext() if (call := self._inside()) is None else call.atomic()

    @contextmanager
    def section(self, monitor: RankMonitor, name: str) -> Iterator[None]:
        """Open a section with separate timeouts: those of in-process restarts do not apply within it."""
        call = self._inside()
        with nullcontext() if call is None else call.disable_hang_protection(), monitor.section(name):
            yield

    def _inside(self) -> Handle | None:
        """Return the call while it lasts; a session may outlive a function that returned."""
        return self._call if current_handle() is self._call else None

    # -- the state in memory ---------------------------------------------------------------------------------------

    def resume(
        self,
        state: Mapping[str, Any],
        own: Mapping[str, Any],
        replicas: dist.ProcessGroup | DeviceMesh | None,
        *,
        place: WorkerEnv,
        journal: Journal,
    ) -> int | None:
        """Put ``state`` back to what it was before the in-process restart; return its iteration, or ``None`` to load
        instead.

        Args:
            state: The script's state.
            own: The session's state, by name.
            replicas: Ranks that hold the same tensors; ``None`` = all.

        Raises:
            RuntimeError: A peer left.

        Collective: all ranks.
        """
        if self._memory is None:
            return None
        ranks = None if replicas is None else ranks_of(replicas)
        iteration = self._memory.resume(state, own=own, replicas=ranks, node=place.node)
        last = self._memory.last
        if iteration is None or last is None:
            return None
        num_copied = last.sources.count("peer")
        copied = f", {num_copied} of {len(last.sources)} ranks were given it" if num_copied else ""
        log.info("resuming from memory at iteration %d after %.3f s%s", iteration, last.took_s, copied)
        facts: dict[str, Any] = {"tier": last.source, "load_s": last.took_s, "rejected": []}
        journal.write(EventKind.RESTORED, rank=place.global_rank, iteration=iteration, **facts)
        return iteration

    @property
    def origin(self) -> Origin | None:
        """The checkpoint from which the state in memory descends."""
        return None if self._memory is None else self._memory.has_loaded

    def note_loaded(self, origin: Origin | None) -> None:
        """Record that a checkpoint was loaded; ``None`` = there is none, and training begins.

        Raises:
            RestartAbort: The state was trained before, and there is no checkpoint to replace it.
        """
        if self._memory is None:
            return
        if origin is None and self._memory.is_dirty:
            raise RestartAbort(
                "what this call was to resume from is not whole, nothing is saved yet, and what handle.keep() keeps "
                "cannot begin again; restart the job"
            )
        self._memory.has_loaded = origin

    def note_iteration(self, iteration: int) -> None:
        """Record that the state is that of ``iteration`` optimizer steps."""
        if (call := self._inside()) is not None:
            call.note_iteration(iteration)
        if self._memory is not None:
            self._memory.note(iteration)

    def release(self) -> None:
        """Release the state once the call was left. Blocks: while the state is digested."""
        if self._memory is not None:
            self._memory.release()
