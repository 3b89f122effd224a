"""Timeouts that a run learns from its durations, kept for its next cycle and job in ``ft_state.json``.

Ranks without an agent update the file under a lock; the agent of ``outlast run`` writes it for all ranks of a cycle.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from outlast.config.launching import FaultToleranceConfig
from outlast.decoding import MAX_STATE_BYTES, from_json, open_file, read_file
from outlast.policy import deadlines as policy
from outlast.policy.deadlines import FIELD_OF_SETTING, Expired, Learned, Observation, Timeouts
from outlast.runtime.board import RankState
from outlast.runtime.files import in_time, write_atomically

log = logging.getLogger(__name__)

FILE_NAME = "ft_state.json"
_LOCK_NAME = "ft_state.lock"
MERGE_S = 10.0
"""Time limit in seconds for :meth:`LearnedTimeouts.update`, which waits for other ranks and for the disk."""
_VERSION = 1


class _LearnedState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    learned: Learned
    cycle: str
    """Identifies the cycle that was learned from last."""
    before: Learned
    seen: Observation
    """Observations of that cycle so far: its nodes may report one after the other."""
    faulted: tuple[Expired, ...] = ()
    """Timeouts that were exceeded in that cycle."""


class _NvrxHeartbeats(msgspec.Struct, frozen=True, kw_only=True):
    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool | None = None


class _NvrxSections(msgspec.Struct, frozen=True, kw_only=True):
    section: dict[str, float | None] = {}
    out_of_section: float | None = None
    calculated_sections: list[str] = []
    is_out_of_section_calculated: bool = False


class _NvrxTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    heartbeat: _NvrxHeartbeats = _NvrxHeartbeats()
    section: _NvrxSections = _NvrxSections()


class _NvrxState(msgspec.Struct, frozen=True, kw_only=True):
    """The file of the same name of NVIDIA's extension, and of Megatron with it."""

    current_timeouts: _NvrxTimeouts

    def learned(self) -> Learned:
        heartbeats, sections = self.current_timeouts.heartbeat, self.current_timeouts.section
        known = {name: sections.section.get(name) for name in sections.calculated_sections}
        return Learned(
            sections={name: seconds for name, seconds in known.items() if seconds is not None},
            out_of_section_s=sections.out_of_section if sections.is_out_of_section_calculated else None,
            initial_heartbeat_s=heartbeats.initial if heartbeats.were_calculated else None,
            heartbeat_s=heartbeats.subsequent if heartbeats.were_calculated else None,
        )


def read_learned(data: bytes) -> Learned:
    """Return the timeouts in an ``ft_state.json`` of a run or of NVIDIA's extension.

    Raises:
        msgspec.DecodeError: It is neither.
    """
    return _parse(data).learned


def _parse(data: bytes) -> _LearnedState:
    try:
        return from_json(data, _LearnedState)
    except msgspec.ValidationError as error:
        try:
            learned = from_json(data, _NvrxState).learned()
        except msgspec.ValidationError:
            raise error from None
        return _LearnedState(version=_VERSION, learned=learned, cycle="", before=learned, seen=Observation())


def observe(states: Iterable[RankState]) -> Observation:
    """Return the longest durations that the attached ranks have had."""
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
    """Timeouts that a run has learned. Use :meth:`load`."""

    def __init__(self, run_dir: str | os.PathLike[str], state: _LearnedState) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self._state = state

    @classmethod
    def load(cls, run_dir: str | os.PathLike[str]) -> LearnedTimeouts:
        """Read the run's file; a missing, torn or foreign one (both logged) counts as nothing learned."""
        return cls(run_dir, _read(Path(run_dir) / FILE_NAME))

    @staticmethod
    def counts_in(config: FaultToleranceConfig, run_dir: str | os.PathLike[str] | None) -> Path | None:
        """Return the folder of the counts of hangs at timeouts that the script calculated, also where nothing is
        learned."""
        return LearnedTimeouts.folder(config, run_dir) or (None if run_dir is None else Path(run_dir))

    @staticmethod
    def folder(config: FaultToleranceConfig, run_dir: str | os.PathLike[str] | None) -> Path | None:
        """Return the folder of the run's file; ``None``: there is none, and nothing is learned."""
        where = config.state_directory or run_dir
        return Path(where) if config.calc_ft_timeouts and where is not None else None

    @classmethod
    def hangs_at_calculated(cls, folder: str | os.PathLike[str] | None) -> Mapping[str, int]:
        """Return the number of unexplained hangs at each timeout that the script calculated.

        Args:
            folder: Folder of the run's file; ``None``: there is none.
        """
        try:
            return {} if folder is None else in_time(folder, partial(cls.load, folder)).learned.num_calculated_hangs
        except TimeoutError as error:
            log.warning("how often calculated timeouts were too short is not known: %s", error)
            return {}

    @property
    def learned(self) -> Learned:
        return self._state.learned

    def apply(self, config: FaultToleranceConfig) -> FaultToleranceConfig:
        """Return the config with learned timeouts in place of configured ones; ``given`` does not change."""
        timeouts = self.apply_to(Timeouts.from_config(config))
        learned = {name: getattr(timeouts, field) for name, field in FIELD_OF_SETTING.items()}
        changed = {name: value for name, value in learned.items() if value != getattr(config, name)}
        return config.changed(**changed)

    def apply_to(self, timeouts: Timeouts) -> Timeouts:
        return policy.apply(timeouts, self.learned)

    def merge(
        self,
        observations: Iterable[Observation],
        *,
        cycle: str,
        config: FaultToleranceConfig,
        finished: bool,
        faulted: Iterable[Expired] = (),
        with_defaults: bool = False,
    ) -> None:
        """Learn from observations of a cycle, which may arrive in several calls.

        Args:
            observations: Of one or more ranks or nodes.
            cycle: Identifies job and cycle. A second call with the same value adds to the first one, and does not count
                as another cycle.
            config: The settings as configured, without learned timeouts.
            finished: The cycle ended in order.
            faulted: Timeouts that were exceeded in the cycle.
            with_defaults: The default timeouts of heartbeats were enforced, as by an agent.
        """
        state = self._state
        again = state.cycle == cycle
        before = state.before if again else state.learned
        seen = policy.combine([*([state.seen] if again else []), *observations])
        late = (*(state.faulted if again else ()), *faulted)
        learned = policy.learn(
            seen,
            before,
            configured=Timeouts.from_config(config, with_defaults=with_defaults),
            safety_factor=config.safety_factor,
            finished=finished,
            faulted=late,
        )
        for kind, nums, old in (
            ("learned", learned.num_hangs, state.learned.num_hangs),
            ("calculated", learned.num_calculated_hangs, state.learned.num_calculated_hangs),
        ):
            for key in sorted(key for key, num in nums.items() if num != old.get(key)):
                log.warning(
                    "the %s timeout of %s was exceeded, and nothing shows a hang: %s",
                    *(kind, key, "it is doubled" if nums[key] < policy.MAX_HANGS else "it is not used any more"),
                )
        self._state = _LearnedState(
            version=_VERSION, learned=learned, cycle=cycle, before=before, seen=seen, faulted=late
        )

    def log_suggestion(self) -> None:
        if options := self.learned.suggest():
            log.info("suggested timeouts, from the durations of this run: %s (learned in %s)", options, self.path)

    def save(self) -> None:
        """Write the file atomically and durably.

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
        finished: bool = False,
        faulted: Sequence[Expired] = (),
    ) -> LearnedTimeouts:
        """Load, merge one rank's cycle, save, and return the result, under a lock.

        Args:
            run_dir: The folder of the file.
            observation: Of the rank.
            cycle: As for :meth:`merge`.
            config: As for :meth:`merge`.
            finished: As for :meth:`merge`.
            faulted: Timeouts that the rank exceeded.

        Blocks: while other processes hold the file's lock, each for a write of a few hundred bytes; a caller that must
        not wait for a hung disk gives it :data:`MERGE_S`.

        Raises:
            OSError: The run directory cannot be written.
        """
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        # A separate file, open for writing: NFS refuses flock() on anything else.
        lock = open_file(Path(run_dir) / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = cls.load(run_dir)
            state.merge([observation], cycle=cycle, config=config, finished=finished, faulted=faulted)
            state.save()
        finally:
            os.close(lock)
        return state


def enforceable(timeouts: Timeouts, text: str, *, rank: int, folder: str | os.PathLike[str] | None) -> Timeouts:
    """Return timeouts with those of the script in their place.

    Args:
        timeouts: Configured and learned timeouts.
        text: Of :meth:`outlast.runtime.board.Board.timeouts`.
        rank: Rank of the script, for the log.
        folder: Folder of the run's learned timeouts; ``None``: there is none.
    """
    if not text:
        return timeouts
    try:
        calculated = from_json(text.encode(), Learned)
        return policy.override(timeouts, calculated, LearnedTimeouts.hangs_at_calculated(folder))
    except msgspec.DecodeError as error:
        log.warning("the timeouts that local rank %d calculated are not enforced: %s", rank, error)
        return timeouts


def _read(path: Path) -> _LearnedState:
    nothing = _LearnedState(version=_VERSION, learned=Learned(), cycle="", before=Learned(), seen=Observation())
    try:
        state = _parse(read_file(path, max_bytes=MAX_STATE_BYTES))
        if state.version == _VERSION:
            return state
        why = f"its format is {state.version}, and only {_VERSION} is supported"
    except FileNotFoundError:
        return nothing
    except (OSError, msgspec.DecodeError) as error:
        why = str(error)
    log.warning("%s is ignored, and timeouts are learned again: %s", path, why)
    return nothing
