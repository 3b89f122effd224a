"""The session of a trainer that owns its loop, shared by the adapters for Lightning and Transformers.

An adapter opens a :class:`HostedSession` with the settings of :func:`hosted_config`, replaces methods of the trainer,
and restores them at the end. State is restored early, while the trainer's position can still be set. Since the trainer
draws random numbers afterwards (a data loader's seed, a sanity check), random numbers are kept (:class:`KeptRandom`)
and restored at the point at which the state was saved.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outlast import env
from outlast.config import Config, FaultToleranceConfig
from outlast.config.sources import load_config
from outlast.errors import ConfigError
from outlast.integrations.replacements import Replacements
from outlast.monitor.rank_monitor import open_monitor
from outlast.runtime.random_numbers import capture_random, restore_random
from outlast.session.session import Session, init

log = logging.getLogger(__name__)
HostedConfig = Config | str | os.PathLike[str] | None
"""Type of an adapter's ``config=``."""


def hosted_config(config: HostedConfig) -> Config:
    """Return the settings for an adapter's ``config=``.

    Args:
        config: The settings, or a config file; ``None`` = the file of ``outlast run --config``, else the defaults.

    Raises:
        ConfigError: The file cannot be read, a value is invalid, or the type is wrong.
    """
    if config is None:
        config = env.read_worker().config_file or None
    if isinstance(config, str | os.PathLike):
        return load_config(config)
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config= takes an outlast.Config or the path of a config file, not {type(config).__name__}")
    return config or Config()


def with_fault_tolerance(config: Config, **changes: Any) -> Config:
    """Return ``config`` with changed fault tolerance settings; given settings that are not named stay.

    Raises:
        ConfigError: A value is out of range.
    """
    given = config.fault_tolerance or FaultToleranceConfig()
    return dataclasses.replace(config, fault_tolerance=given.changed(**changes))


def require_directory(config: Config, what: str) -> None:
    """Check that checkpoints can be saved.

    Raises:
        ConfigError: There are no checkpoint settings; the message has the remedy.
    """
    if config.checkpoint is None:
        raise ConfigError(
            f"{what} has nowhere to save to: give it config=outlast.Config(checkpoint=outlast.CheckpointConfig("
            "directory=...)), or a config file with [checkpoint] directory"
        )


class KeptRandom:
    """Random number state of this rank (Python, NumPy, torch, the device), to be restored later, once.

    Thread: the thread of the training loop.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    @property
    def is_kept(self) -> bool:
        return self._state is not None

    def keep(self, state: dict[str, Any] | None = None) -> None:
        """Keep the current state, or a result of :func:`outlast.runtime.random_numbers.capture_random`."""
        self._state = capture_random() if state is None else state

    def put_back(self) -> None:
        """Restore the kept state and drop it; without one do nothing."""
        state, self._state = self._state, None
        if state is not None:
            restore_random(state)


class HostedSession(Replacements):
    """A session in a trainer's own loop, and the trainer's methods that are replaced meanwhile.

    Collective: all ranks.
    Thread: the trainer's thread.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__()
        self.session: Session = init(config, **options)
        self.random = KeptRandom()
        if self.session.global_rank == 0:
            clear_finished_flag()  # written by an earlier training

    @contextmanager
    def outside_step(self, section: str, *, is_in_step: bool) -> Iterator[None]:
        """Open a section; an open step is interrupted: an epoch may end between two micro-batches."""
        monitor = open_monitor() if is_in_step else None
        if monitor is not None:
            monitor.end_section("step")
        with self.session.section(section):
            yield
        if monitor is not None:
            monitor.start_section("step")

    def note_finished(self) -> None:
        """Write the finished flag, on rank 0."""
        if self.session.global_rank == 0:
            touch_finished_flag()


def log_on_rank_0(log: logging.Logger, text: str, *values: object, level: int = logging.WARNING) -> None:
    """Log a line that is the same on all ranks: at ``level`` on rank 0, at DEBUG on the others."""
    log.log(level if env.read_worker().global_rank == 0 else logging.DEBUG, text, *values)


def touch_finished_flag() -> None:
    """Create the file in ``$FAULT_TOL_FINISHED_FLAG_FILE``, which marks the run as finished.

    Job scripts of NeMo-Run and NVRx check the file before they submit the next job. A failure is logged.
    """
    if (name := env.finished_flag_file()) is None:
        return
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    except OSError as error:
        log.error(
            "the finished flag %s cannot be made (%s); the scheduler may start the finished run again", name, error
        )


def clear_finished_flag() -> None:
    """Remove the finished flag, for a process that continues to train."""
    if (name := env.finished_flag_file()) is not None:
        try:
            Path(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("the finished flag %s cannot be removed (%s)", name, error)
