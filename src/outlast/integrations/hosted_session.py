"""The session of a trainer that owns its loop: what the adapters for Lightning and Transformers share.

An adapter opens a :class:`HostedSession` with the settings of :func:`hosted_config`, which knows the file that
``outlast run`` was given. It puts stand-ins in the place of the trainer's methods, and gives them back at the end. It
restores early, where the trainer's position can still be set; but the trainer then draws random numbers (a data
loader's seed, a sanity check) before it trains. So the numbers are kept as they were restored (:class:`KeptRandom`) and
put back where they were when the state was saved.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outlast import env
from outlast.config import Config, FaultToleranceConfig
from outlast.config.sources import load_config
from outlast.errors import ConfigError
from outlast.monitor.rank_monitor import open_monitor
from outlast.runtime.random_numbers import capture_random, restore_random
from outlast.session.session import Session, init

log = logging.getLogger(__name__)
HostedConfig = Config | str | os.PathLike[str] | None
"""How a user gives settings to an adapter."""


def hosted_config(config: HostedConfig) -> Config:
    """Return the settings that an adapter's ``config=`` stands for.

    Args:
        config: The settings, or a file of them; ``None`` = the file that ``outlast run --config`` was given, else the
            defaults.

    Raises:
        ConfigError: The file cannot be read, or a value in it is wrong; or it is none of these.
    """
    if config is None:
        config = env.read_worker().config_file or None
    if isinstance(config, str | os.PathLike):
        return load_config(config)
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config= takes an outlast.Config or the path of a config file, not {type(config).__name__}")
    return config or Config()


def with_fault_tolerance(config: Config, **changes: Any) -> Config:
    """Return ``config`` with other fault tolerance settings; those that it gives and that are not named stay.

    Raises:
        ConfigError: A value is out of range.
    """
    given = config.fault_tolerance or FaultToleranceConfig()
    return dataclasses.replace(config, fault_tolerance=given.changed(**changes))


def require_directory(config: Config, what: str) -> None:
    """Check that there is somewhere to save to.

    Raises:
        ConfigError: There is not; the message is the remedy.
    """
    if config.checkpoint is None:
        raise ConfigError(
            f"{what} has nowhere to save to: give it config=outlast.Config(checkpoint=outlast.CheckpointConfig("
            "directory=...)), or a config file with [checkpoint] directory"
        )


class KeptRandom:
    """Random numbers of this rank (python's, numpy's, torch's, the device's) that are put back later, once.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether there is something to put back."""
        return self._state is not None

    def keep(self, state: dict[str, Any] | None = None) -> None:
        """Keep the generators' present state, or one that
        :func:`outlast.runtime.random_numbers.capture_random` returned."""
        self._state = capture_random() if state is None else state

    def put_back(self) -> None:
        """Set the generators to what is kept, and keep it no longer. Nothing kept: do nothing."""
        state, self._state = self._state, None
        if state is not None:
            restore_random(state)


class HostedSession:
    """A session in a trainer's own loop.

    Collective: all ranks.
    Thread: that of the trainer.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        self.session: Session = init(config, **options)
        self.random = KeptRandom()
        self._replaced: list[tuple[Any, str, bool, Any]] = []
        """Owner and name of a method, whether the owner itself had it, and what was there."""
        if self.session.global_rank == 0:
            clear_finished_flag()  # of an earlier training

    def replace(self, owner: Any, name: str, stand_in: Callable[..., Any]) -> Any:
        """Put a stand-in in the place of a method of an object; return the method."""
        before = getattr(owner, name)
        self._replaced.append((owner, name, name in vars(owner), before))
        setattr(owner, name, stand_in)
        return before

    def give_back(self) -> None:
        """Put all methods back. Idempotent."""
        while self._replaced:
            owner, name, was_own, before = self._replaced.pop()
            if was_own:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)

    @contextmanager
    def outside_step(self, section: str, *, is_in_step: bool) -> Iterator[None]:
        """Be in a section that interrupts the step, where one is open: between two micro-batches an epoch may end."""
        monitor = open_monitor() if is_in_step else None
        if monitor is not None:
            monitor.end_section("step")
        with self.session.section(section):
            yield
        if monitor is not None:
            monitor.start_section("step")

    def note_finished(self) -> None:
        """Make the finished flag, on the first rank."""
        if self.session.global_rank == 0:
            touch_finished_flag()


def log_on_rank_0(log: logging.Logger, text: str, *values: object, level: int = logging.WARNING) -> None:
    """Log a line that is the same on all ranks: at ``level`` on rank 0, at DEBUG on the others."""
    log.log(level if env.read_worker().global_rank == 0 else logging.DEBUG, text, *values)


def touch_finished_flag() -> None:
    """Make the file that says that the run has finished, where ``$FAULT_TOL_FINISHED_FLAG_FILE`` names one.

    Job scripts of NeMo-Run and NVRx look for it before they submit the next job. One that cannot be made is logged.
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
    """Remove that file, where this process trains on after it was made."""
    if (name := env.finished_flag_file()) is not None:
        try:
            Path(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("the finished flag %s cannot be removed (%s)", name, error)
