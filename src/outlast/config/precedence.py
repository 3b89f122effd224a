"""Fault tolerance settings from several sources, put together field by field.

An option of ``outlast run`` comes before its config file, that before the script's own config, and that before the
defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast.config.base import from_mapping
from outlast.config.fault_tolerance import FaultToleranceConfig

__all__ = ["DEFAULT", "SCRIPT", "LayeredSettings", "merge_under"]

SCRIPT = "script's config"
OPTION = "option"
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredSettings:
    """What each source gives, by field, and what is in force."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``outlast run``."""
    file: Mapping[str, Any] = field(default_factory=dict)
    """Its config file."""
    file_name: str = ""
    script: Mapping[str, Any] = field(default_factory=dict)
    """The config that the script gave to its session, or its ``RankMonitor``; empty until it runs."""

    @property
    def launcher(self) -> FaultToleranceConfig:
        """What ``outlast run`` was given."""
        return from_mapping(FaultToleranceConfig, {**self.file, **self.options}, where="outlast run")

    @property
    def config(self) -> FaultToleranceConfig:
        """What is in force.

        Raises:
            ConfigError: A value of one source contradicts that of another.
        """
        values = {"enable_ft_package": True, **self.script, **self.file, **self.options}
        return from_mapping(FaultToleranceConfig, values, where=self._describe())

    def with_script(self, text: str) -> LayeredSettings:
        """Return the same with what the script's config gives, as ``FaultToleranceConfig.to_json`` wrote it.

        Raises:
            ConfigError: It contradicts itself, or what another source gives.
        """
        own = FaultToleranceConfig.from_json(text)
        layered = dataclasses.replace(self, script=own.given)
        _ = layered.config
        return layered

    def source(self, name: str) -> str:
        """Return where the value of a field comes from, in words."""
        places = ((OPTION, self.options), (self.file_name, self.file), (SCRIPT, self.script))
        return next((place for place, values in places if name in values), DEFAULT)

    def _describe(self) -> str:
        given = ((OPTION + "s", self.options), (self.file_name, self.file), (SCRIPT, self.script))
        return "fault tolerance settings from " + " and ".join(place for place, values in given if values)


def merge_under(text: str | None, config: FaultToleranceConfig | None) -> FaultToleranceConfig:
    """Return a script's settings with those of its launcher in their place, field by field.

    Args:
        text: What the launcher was given, as ``FaultToleranceConfig.to_json`` wrote it; ``None`` = nothing.
        config: The script's own; ``None`` = it has none.

    Raises:
        ConfigError: Both contradict each other, or the launcher's text was cut or comes from another version.
    """
    own = {} if config is None else config.given
    first = FaultToleranceConfig.from_json(text).given if text else {}
    if not first:
        return config if config is not None else FaultToleranceConfig()
    return from_mapping(FaultToleranceConfig, {**own, **first}, where="the script's config and outlast run's")
