"""The plug-ins of one wrapper, with what stands where none was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outlast.config.in_process_restart import InProcessRestartConfig
from outlast.errors import ConfigError
from outlast.inprocess.assignments import FillGaps
from outlast.inprocess.retry import FaultCounter
from outlast.inprocess.state import State
from outlast.policy.rank_assignment import Rule

__all__ = ["Plugins"]

Plugin = Callable[[State], Any]


def _nothing(state: State) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugins:
    """What is called when; see :class:`outlast.inprocess.Wrapper`."""

    initialize: Plugin
    abort: Plugin
    finalize: Plugin
    health_check: Plugin
    rank_assignment: Rule
    completion: Plugin
    terminate: Plugin

    @classmethod
    def settle(cls, config: InProcessRestartConfig, **given: Callable[[Any], Any] | None) -> Plugins:
        """Return the plug-ins to use.

        Raises:
            ConfigError: One cannot be called.
        """
        for name, plugin in given.items():
            if plugin is not None and not callable(plugin):
                raise ConfigError(f"{name}={plugin!r} cannot be called; pass an instance or a function")
        assignment = given.pop("rank_assignment") or FillGaps(granularity=config.granularity)
        chosen = {name: plugin or _nothing for name, plugin in given.items()}
        own_check, counter = chosen["health_check"], FaultCounter(max_rank_faults=config.max_rank_faults)

        def health_check(state: State) -> None:
            counter(state)
            own_check(state)

        chosen["health_check"] = health_check
        return cls(rank_assignment=assignment, **chosen)
