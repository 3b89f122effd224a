"""The wrapper: it calls the function again, in the same processes, until it has returned on all active ranks."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from outlast.config import Config
from outlast.config.sources import load_config
from outlast.config.training import InProcessRestartConfig
from outlast.errors import ConfigError
from outlast.inprocess.call import handle_parameter
from outlast.inprocess.plugins import Plugins
from outlast.inprocess.rank import WrappedRank

__all__ = ["Wrapper"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Wrapper:
    """Restart a function on all ranks, in their processes, when one of them fails.

    A decorator::

        @outlast.inprocess.Wrapper(InProcessRestartConfig(soft_timeout=60))
        def train(steps, call: outlast.inprocess.Handle):
            torch.distributed.init_process_group("gloo")
            ...

    The function runs on every active rank. When it raises on one, when a rank dies or hangs, it is left on all of them
    and called again with the same arguments, on the ranks that live; spares take the places of those that do not.
    For each call RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and process groups are made in the function;
    they are gone when it is called again, and when the call returns. That is once the function has returned on all
    active ranks: with its value there, with ``None`` on spares. ``SystemExit`` ends the function like a return, and
    is raised again at the end.

    Args:
        config: Timeouts and the like; also the whole config of a session, or the path of its file, of which
            ``in_process_restart`` counts; ``None`` = the defaults. With ``enabled=False`` the function is called as
            it is.
        initialize: Called with :class:`~outlast.inprocess.State` before each call of the function, on active ranks, as
            if it were the function's first line: it may be interrupted, and what it raises is a fault.
        abort: Called with the state on the monitor thread while the main thread is still in the function that it has to
            leave; ends what outlast does not know of and the main thread may wait on.
        finalize: Called with the state after each call that was left; a rank whose call fails is permanently removed.
        health_check: Called with the state before each further call; a rank whose call fails is permanently removed.
        rank_assignment: Decides who is which rank; ``None`` = ``FillGaps`` with the configured granularity.
        completion: Called with the state once, when all active ranks have returned.
        terminate: Called with the state once, when this rank is permanently removed or restarting has come to its end.

    Raises:
        ConfigError: A setting is wrong. By the call: not on the main thread, or within another wrapped function.
        RestartAbort: By the call, on all ranks: they cannot be restarted in process.
        RankLeft: By the call: this rank is permanently removed, and the others resume. A ``SystemExit`` with code 0.

    Collective: the call, all ranks that the launcher started.
    """

    def __init__(
        self,
        config: InProcessRestartConfig | Config | str | os.PathLike[str] | None = None,
        *,
        initialize: Callable[[Any], Any] | None = None,
        abort: Callable[[Any], Any] | None = None,
        finalize: Callable[[Any], Any] | None = None,
        health_check: Callable[[Any], Any] | None = None,
        rank_assignment: Callable[[Any], Any] | None = None,
        completion: Callable[[Any], Any] | None = None,
        terminate: Callable[[Any], Any] | None = None,
    ) -> None:
        if isinstance(config, str | os.PathLike):
            config = load_config(config)
        if isinstance(config, Config):
            config = config.in_process_restart
        self.config = config if config is not None else InProcessRestartConfig()
        self._plugins = Plugins.settle(
            self.config,
            initialize=initialize,
            abort=abort,
            finalize=finalize,
            health_check=health_check,
            rank_assignment=rank_assignment,
            completion=completion,
            terminate=terminate,
        )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Return the function, protected.

        Raises:
            ConfigError: It is not to be protected, and needs a :class:`~outlast.inprocess.Handle`.
        """
        if self.config.given.get("enabled") is False:
            _check_needs_no_handle(function)
            return function

        @functools.wraps(function)
        def protected(*args: P.args, **kwargs: P.kwargs) -> R | None:
            value: R | None = WrappedRank(self.config, self._plugins).run(function, args, kwargs)
            return value

        return protected


def _check_needs_no_handle(function: Callable[..., Any]) -> None:
    name = handle_parameter(function)
    if name is not None and inspect.signature(function).parameters[name].default is inspect.Parameter.empty:
        raise ConfigError(
            f"in_process_restart.enabled is off, but {function.__qualname__}() takes a Handle, which only a protected "
            f"call has; give {name} a default of None, or leave enabled out"
        )
