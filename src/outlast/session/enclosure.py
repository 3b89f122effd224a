"""The call of a wrapped function that a session lives in, if it does: what it asks of that call, and is told by it.

A session within ``outlast.inprocess.Wrapper`` lives as long as one call of the function. When the call is left, its
peers may be gone, and nothing may wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from outlast.config import Config
from outlast.errors import ConfigError
from outlast.inprocess.call import Handle, current_handle
from outlast.monitor.rank_monitor import RankMonitor

__all__ = ["Enclosure"]


class Enclosure:
    """What a session has to do with the call around it; without one nothing happens.

    Args:
        config: Whether there has to be a call.

    Raises:
        ConfigError: There has to be one, and there is none, or it has other settings.

    Thread: the main thread.
    """

    def __init__(self, config: Config) -> None:
        self.call: Handle | None = current_handle()
        """The call; ``None``: the session lives as long as the process."""
        if config.in_process and self.call is None:
            raise ConfigError(
                "in_process is on, but outlast.init() is not called within a wrapped function: decorate the function "
                "that trains with @outlast.inprocess.Wrapper(), and call it"
            )
        restart = config.in_process_restart
        if self.call is None or restart is None:
            return
        for name, value in restart.given.items():
            if name != "enabled" and (others := getattr(self.call.config, name)) != value:
                raise ConfigError(
                    f"in_process_restart.{name}={value!r} of the session differs from the Wrapper's {others!r}; give "
                    "the Wrapper the same config: Wrapper(config)"
                )

    @property
    def is_restart(self) -> bool:
        """Whether the function is called again, after a fault."""
        return self.call is not None and self.call.iteration > 0

    def ping(self) -> None:
        """Say that training goes on."""
        if (call := self._inside()) is not None:
            call.ping()

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Have a few milliseconds that no restart interrupts, to take what must be given back."""
        with ExitStack() as stack:
            if (call := self._inside()) is not None:
                stack.enter_context(call.atomic())
            yield

    @contextmanager
    def section(self, monitor: RankMonitor, name: str) -> Iterator[None]:
        """Open a section that has deadlines of its own: those of restarts in process do not hold in it."""
        with ExitStack() as stack:
            if (call := self._inside()) is not None:
                stack.enter_context(call.disable_hang_protection())
            stack.enter_context(monitor.section(name))
            yield

    def _inside(self) -> Handle | None:
        """Return the call as long as it lasts; a session may outlive it when the function returned."""
        return self.call if current_handle() is self.call else None
