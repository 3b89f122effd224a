"""``ft_state.json``: the timeouts that a run has learned, kept for its next cycle and job."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from outlast.config.launching import FaultToleranceConfig
from outlast.decoding import from_json
from outlast.policy import deadlines as policy
from outlast.policy.deadlines import FIELD_OF_SETTING, Expired, Learned, Observation, Timeouts
from outlast.runtime.board import RankState
from outlast.runtime.files import write_atomically

__all__ = ["FILE_NAME", "LearnedTimeouts", "Observation", "observe"]


log = logging.getLogger(__name__)

FILE_NAME = "ft_state.json"
_VERSION = 1


class _LearnedState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    learned: Learned
    """What is in force."""
    cycle: str
    """Names the cycle that was learned from last."""
    before: Learned
    """What was in force before that cycle."""
    seen: Observation
    """What has been seen of that cycle so far: its nodes may report one after the other."""


def observe(states: Iterable[RankState]) -> Observation:
    """Return the longest durations that the ranks of a board have had."""
    return policy.combine(
        Observation(
            longest_s=dict(state.longest_s),
            counts=dict(state.counts),
            restored=state.restored,
            initial_heartbeat_s=state.initial_heartbeat_s,
            heartbeat_gap_s=state.longest_heartbeat_gap_s,
            num_heartbeats=state.num_heartbeats,
        )
        for state in states
        if state.attached
    )


class LearnedTimeouts:
    """What a run has learned about its timeouts. Use :meth:`load`."""

    def __init__(self, run_dir: str | os.PathLike[str], state: _LearnedState) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self._state = state

    @classmethod
    def load(cls, run_dir: str | os.PathLike[str]) -> LearnedTimeouts:
        """Read the run's file; one that is missing, torn or foreign counts as nothing learned (the latter are
        reported)."""
        return cls(run_dir, _read(Path(run_dir) / FILE_NAME))

    @property
    def learned(self) -> Learned:
        """What is in force."""
        return self._state.learned

    def apply(self, config: FaultToleranceConfig) -> FaultToleranceConfig:
        """Return the config with learned timeouts in the place of configured ones; what was not given stays so."""
        timeouts = self.apply_to(Timeouts.from_config(config))
        learned = {name: getattr(timeouts, field) for name, field in FIELD_OF_SETTING.items()}
        changed = {name: value for name, value in learned.items() if value != getattr(config, name)}
        return config.changed(**changed)

    def apply_to(self, timeouts: Timeouts) -> Timeouts:
        """Return timeouts with learned ones in their place."""
        return policy.apply(timeouts, self.learned)

    def merge(
        self,
        observations: Iterable[Observation],
        *,
        cycle: str,
        config: FaultToleranceConfig,
        finished: bool,
        faulted: Iterable[Expired] = (),
    ) -> None:
        """Learn from a cycle's observations; those of one cycle may come in several calls.

        Args:
            observations: Of one or more ranks or nodes.
            cycle: Names the job and cycle. A second call of the same name adds to the first one; it does not
                count as another cycle.
            config: The settings as configured, before anything learned was applied.
            finished: The cycle came to its orderly end.
            faulted: Timeouts that were exceeded in the cycle.
        """
        state = self._state
        again = state.cycle == cycle
        before = state.before if again else state.learned
        seen = policy.combine([*([state.seen] if again else []), *observations])
        learned = policy.learn(
            seen,
            before,
            configured=Timeouts.from_config(config),
            safety_factor=config.safety_factor,
            finished=finished,
            faulted=faulted,
        )
        self._state = _LearnedState(version=_VERSION, learned=learned, cycle=cycle, before=before, seen=seen)

    def save(self) -> None:
        """Write the file: whole and durable, or not at all.

        Raises:
            OSError: The run directory cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, msgspec.json.format(msgspec.json.encode(self._state), indent=2) + b"\n")

    @classmethod
    def update(
        cls,
        run_dir: str | os.PathLike[str],
        observation: Observation,
        *,
        cycle: str,
        config: FaultToleranceConfig,
    ) -> None:
        """Load, merge one rank's finished cycle, and save, while other ranks do the same.

        Blocks: while another process holds the file's lock, for a write of a few hundred bytes.

        Raises:
            OSError: The run directory cannot be written.
        """
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            state = cls.load(run_dir)
            state.merge([observation], cycle=cycle, config=config, finished=True)
            state.save()
        finally:
            os.close(folder)


def _read(path: Path) -> _LearnedState:
    nothing = _LearnedState(version=_VERSION, learned=Learned(), cycle="", before=Learned(), seen=Observation())
    try:
        state = from_json(path.read_bytes(), _LearnedState)
    except FileNotFoundError:
        return nothing
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is ignored, and timeouts are learned again: %s", path, error)
        return nothing
    if state.version != _VERSION:
        log.warning(
            "%s is ignored, and timeouts are learned again: its format is %d, and only %d is supported",
            path,
            state.version,
            _VERSION,
        )
        return nothing
    return state
