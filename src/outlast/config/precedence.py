"""Fault tolerance settings from several sources, put together field by field.

An option of ``outlast run`` comes before its config file, that before the script's own config, and that before the
defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast.config.base import as_written, from_mapping
from outlast.config.fault_tolerance import FaultToleranceConfig
from outlast.config.flags import ft_option
from outlast.errors import ConfigError

__all__ = ["DEFAULT", "SCRIPT", "LayeredSettings", "merge_under"]

SCRIPT = "script's config"
OPTION = "option"
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredSettings:
    """What each source gives, by field, and what is in force."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``outlast run``."""
    typed: Mapping[str, str] = field(default_factory=dict)
    """How they were written, such as ``--ft-safety-factor=3``, for errors."""
    file: Mapping[str, Any] = field(default_factory=dict)
    """Its config file."""
    file_name: str = ""
    script: Mapping[str, Any] = field(default_factory=dict)
    """The config that the script gave to its session, or its ``RankMonitor``; empty until it runs."""

    @property
    def launcher(self) -> FaultToleranceConfig:
        """What ``outlast run`` was given."""
        return self._put_together({**self.file, **self.options})

    @property
    def config(self) -> FaultToleranceConfig:
        """What is in force.

        Raises:
            ConfigError: A value of one source contradicts that of another.
        """
        return self._put_together({"enable_ft_package": True, **self.script, **self.file, **self.options})

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

    def _put_together(self, values: Mapping[str, Any]) -> FaultToleranceConfig:
        try:
            return FaultToleranceConfig(**values)
        except ConfigError as error:
            told = as_written(str(error), self._written)
            raise ConfigError(told if told != str(error) else f"{self._describe()}: {told}") from None

    def written(self, name: str) -> str:
        """Return how a field that is in force was given: ``--ft-min-nodes=3``, or ``min_nodes=3 (run.toml)``."""
        value = getattr(self.config, name)
        return self._written(name, str(value)) or f"{name}={value}"

    def _written(self, name: str, value: str) -> str | None:
        if name in self.options:
            return self.typed.get(name, f"{ft_option(name)}={value}")
        where = self.source(name)
        return None if where == DEFAULT else f"{name}={value} ({where})"

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
