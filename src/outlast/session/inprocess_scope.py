"""The call of a function wrapped by ``outlast.inprocess.Wrapper`` around a session, if there is one.

Such a session lives as long as one call of the function. When the call is left, its peers may be gone, and nothing may
wait for them. What training had reached stays in the process, and the next call's session resumes from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
    """What a session needs of the call around it; without a call no method does anything.

    Args:
        config: Whether there has to be a call.

    Raises:
        ConfigError: There has to be one and there is none, or its wrapper has other settings.

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
        """Whether the session lives in a call; else it lives as long as the process."""
        return self._call is not None

    @property
    def call_number(self) -> int:
        """Number of the call: 0 for the first, one more after each restart in process."""
        return 0 if self._call is None else self._call.iteration

    @property
    def is_left(self) -> bool:
        """Whether the call has ended or has to be left: what fails now fails because of that. Thread: any."""
        return self._call is not None and self._call.is_left

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Have something called once the call was left; the last one given is called first. It waits for no peer."""
        if self._call is not None:
            self._call.on_leave(callback)

    def note_failure(self, error: BaseException) -> None:
        """Record what ends the session, before its peers notice and the call has to be left."""
        if isinstance(error, Exception) and (call := self._inside()) is not None:
            call.note_failure(error)

    def ping(self) -> None:
        """Report progress to the watch over the call."""
        if (call := self._inside()) is not None:
            call.ping()

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Return a context of a few milliseconds that no restart interrupts, to open what must be closed."""
        with ExitStack() as stack:
            if (call := self._inside()) is not None:
                stack.enter_context(call.atomic())
            yield

    @contextmanager
    def section(self, monitor: RankMonitor, name: str) -> Iterator[None]:
        """Open a section that has timeouts of its own: those of restarts in process do not apply within it."""
        with ExitStack() as stack:
            if (call := self._inside()) is not None:
                stack.enter_context(call.disable_hang_protection())
            stack.enter_context(monitor.section(name))
            yield

    def _inside(self) -> Handle | None:
        """Return the call as long as it lasts; a session may outlive it when the function returned."""
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
        """Make ``state`` what it was before the restart in process; return its iteration, ``None``: load it.

        Args:
            state: The script's state.
            own: The session's own state, by name.
            replicas: Ranks that hold the same tensors; ``None`` = all.
            place: This worker's place.
            journal: Where the resumption is recorded.

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
        journal.write(
            EventKind.RESTORED,
            rank=place.global_rank,
            iteration=iteration,
            tier=last.source,
            load_s=last.took_s,
            rejected=[],
        )
        return iteration

    @property
    def origin(self) -> Origin | None:
        """The generation that the state in memory goes back to."""
        return None if self._memory is None else self._memory.has_loaded

    def note_loaded(self, origin: Origin | None) -> None:
        """Record that a generation was loaded; ``None``: there is none, and training begins.

        Raises:
            RestartAbort: The state was trained before, and there is nothing to put in its place.
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
        """Record that the state is that of ``iteration`` optimizer steps, and how far a call has come."""
        if (call := self._inside()) is not None:
            call.note_iteration(iteration)
        if self._memory is not None:
            self._memory.note(iteration)

    def release(self) -> None:
        """Release the state, as the call has been left. Blocks: while it is digested."""
        if self._memory is not None:
            self._memory.release()
