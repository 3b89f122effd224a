"""What a session restores and saves, to which tiers, and when.

A session restores from memory after an in-process restart, else from the newest checkpoint. The script's state and the
session's state (:data:`OWN_STATE`) are saved and loaded as one mapping.

An interval in iterations needs no communication: all ranks count the same. For ``"auto"`` rank 0 measures and decides,
since no two ranks measure the same: it requests the save when a step begins, and all ranks read the request from the
step's reduction.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from outlast import clock
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import DeadlineExceeded, Untrusted
from outlast.policy.checkpoint_plan import GLOBAL_SHARE, failures_per_s, iterations_between
from outlast.policy.recovery_point import Origin
from outlast.runtime.files import in_time
from outlast.runtime.journal import Journal
from outlast.session.environment import has_node_local_tier
from outlast.session.inprocess_scope import InProcessScope
from outlast.wording import count, duration

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.checkpoint import Restored, SaveHandle


log = logging.getLogger(__name__)

_OTHER_CHECKPOINT = re.compile(
    r"(?!step-)(global_?)?(step|iter|epoch|checkpoint)[a-z]*[-_=]?\d+.*|latest.*\.txt|.+\.(ckpt|pt|pth|distcp|safetensors)"
)
"""Checkpoint names of other systems: KempnerForge, Megatron, Hugging Face, Lightning, DeepSpeed, torch."""
NODE_LOCAL_TIERS = ("memory", "local", "replica")
"""The node-local tiers of a save."""
MIN_TIMED_STEPS = 3
"""Steps to time before the first automatic save, which measures the cost of a save."""
WAIT_SLICE_S = 1.0
"""A long wait for a commit is divided into waits of this length, each in a separate section."""
REPORT_S = 60.0
"""A wait for a commit is reported at most this often."""
STEP_WEIGHT = 0.1
"""Weight of the newest step in the mean step time."""


class DueSave(IntEnum):
    """The save after a step; the larger one includes the smaller."""

    NOTHING = 0
    NEAR = 1
    """A save to memory, local tier and replicas."""
    ALL = 2
    """A save to all tiers."""


class SaveSchedule:
    """Decide after which steps the state is saved.

    Args:
        decides: Whether this rank decides about automatic intervals; one rank does.
        has_near: Whether a node-local tier exists.

    Thread: that of the training loop.
    """

    def __init__(self, config: CheckpointConfig, *, decides: bool, world_size: int, has_near: bool) -> None:
        self._decides = decides
        self._intervals = {DueSave.ALL: config.save_interval}
        if has_near:
            self._intervals[DueSave.NEAR] = config.non_persistent_save_interval
        rate = failures_per_s(world_size, config.rank_mttf_hours)
        has_both = self._intervals.get(DueSave.NEAR, 0) != 0
        self._rates = {DueSave.NEAR: rate, DueSave.ALL: rate * GLOBAL_SHARE if has_both else rate}
        self._saved_at = dict.fromkeys(self._intervals, 0)
        self._chosen: dict[DueSave, int] = {}
        self._step_s = 0.0
        self._num_timed = -1  # the first step of a cycle warms up
        self.wanted = DueSave.NOTHING
        """Save that this rank requests for all ranks after the next step, in addition to the intervals."""

    @property
    def is_automatic(self) -> bool:
        return any(interval != 0 for interval in self._intervals.values())

    def start_from(self, iteration: int) -> None:
        self._saved_at = dict.fromkeys(self._intervals, iteration)

    def note_step(self, took_s: float) -> None:
        """Record the duration of a step, without its saves."""
        self._num_timed += 1
        if self._num_timed == 1:
            self._step_s = took_s
        elif self._num_timed > 1:
            self._step_s += STEP_WEIGHT * (took_s - self._step_s)

    def request(self, iteration: int, cost_s: float | None) -> DueSave:
        """Return the save that this rank requests to follow the step that begins.

        Args:
            cost_s: Seconds that a recent save cost training; ``None`` = there was none yet.
        """
        due, self.wanted = self.wanted, DueSave.NOTHING
        for kind, interval in self._intervals.items():
            if interval == "auto" and self._decides and iteration - self._saved_at[kind] >= self._between(kind, cost_s):
                due = max(due, kind)
        return due

    def due(self, iteration: int, agreed: int) -> DueSave:
        due = DueSave(agreed)
        for kind, interval in self._intervals.items():
            if interval != "auto" and interval > 0 and iteration % interval == 0:
                due = max(due, kind)
        return due

    def note_save(self, iteration: int, kind: DueSave) -> None:
        for one in self._saved_at:
            if one <= kind:
                self._saved_at[one] = iteration

    def _between(self, kind: DueSave, cost_s: float | None) -> int:
        if self._num_timed < MIN_TIMED_STEPS:
            return 1 << 62
        if cost_s is None:
            return 1
        number = iterations_between(cost_s, self._step_s, self._rates[kind])
        if (before := self._chosen.get(kind)) is None or not before / 2 <= number <= before * 2:
            self._chosen[kind] = number
            log.info(
                "a save to %s every %s: it costs %.3g s of training, a step takes %.3g s, "
                "and a failure that needs it is expected every %.3g h",
                "all tiers" if kind == DueSave.ALL else "the node-local tiers",
                count(number, "iteration"),
                cost_s,
                self._step_s,
                1 / self._rates[kind] / 3600,
            )
        return number


class Saves:
    """Load a session's state once, and save it on schedule.

    Args:
        scope: The wrapped call around the session: a save that fails because the call was left is abandoned, not
            failed.

    Collective: all ranks create it.
    Thread: that of the training loop.
    """

    def __init__(self, config: CheckpointConfig, place: WorkerEnv, journal: Journal, scope: InProcessScope) -> None:
        from outlast.checkpoint.manager import open_manager

        self._place = place
        is_left = (lambda: scope.is_left) if scope.is_active else None
        self.manager = open_manager(config, env=place, journal=journal, is_left=is_left)
        self.schedule = SaveSchedule(
            config,
            decides=place.global_rank == 0,
            world_size=place.world_size,
            has_near=has_node_local_tier(config, place),
        )
        self.has_loaded = False
        """Whether training continues from a checkpoint."""
        self.newest: SaveHandle | None = None
        """The newest save to all tiers."""
        self.last_stall_s: float | None = None
        """Seconds that the newest save blocked training; ``None`` = no save yet."""
        self._saved_iteration: int | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether no commit that survives the end of the job succeeded for ``max_durable_lag``. Thread: any."""
        return 0 < self.manager.config.max_durable_lag <= self.manager.durable_lag_s

    def wait(self, timeout_s: float, begin_wait: Callable[[], AbstractContextManager[None]]) -> None:
        """Wait until all saves are committed to all of their tiers; log a line each minute.

        Args:
            timeout_s: Seconds after which the wait ends.

        Raises:
            CheckpointError: The newest save failed.
            DeadlineExceeded: A save is still not committed.

        Blocks: up to ``timeout_s``.
        """
        began_ns, reported_s = clock.now_ns(), 0.0
        while True:
            waited_s = (clock.now_ns() - began_ns) / 1e9
            try:
                with begin_wait():
                    return self.manager.wait(max(0.0, min(WAIT_SLICE_S, timeout_s - waited_s)))
            except DeadlineExceeded:
                if waited_s >= timeout_s:
                    raise
            if waited_s - reported_s >= REPORT_S:
                reported_s = waited_s
                log.log(
                    logging.WARNING if self._place.global_rank == 0 else logging.DEBUG,
                    "training is complete, and its last save is not committed after %s; waiting up to %s for it",
                    duration(waited_s),
                    duration(timeout_s),
                )

    @property
    def final_wait_s(self) -> float:
        """Seconds that the end of training waits for commits."""
        config = self.manager.config
        left_s = max(0.0, config.max_durable_lag - self.manager.durable_lag_s)
        return max(2 * config.save_timeout, left_s)

    def load(
        self, state: dict[str, Any], *, suspect_iteration: int | None, missing: str | None = None
    ) -> Restored | None:
        """Load the newest checkpoint into ``state``; return ``None`` if there is none.

        Args:
            suspect_iteration: Iteration of a state saved for diagnosis to load instead if all ranks have it; ``None`` =
                none.

        Raises:
            CheckpointError: There are checkpoints, but none that all ranks can load; or another run uses a directory,
                or saved its content.
            PeerLost: A peer left.

        Collective: all ranks.
        """
        self.manager.claim()
        restored = None if suspect_iteration is None else self.manager.load_suspect(state, suspect_iteration)
        if restored is None:
            restored = self.manager.load_latest(state, missing=missing)
        if restored is None:
            if self._place.is_first:
                self._warn_of_others()
            return None
        self.has_loaded = True
        if self.manager.config.directory is None or set(restored.tiers) == {"global"}:
            self._saved_iteration = restored.iteration
        self.schedule.start_from(restored.iteration)
        return restored

    def _warn_of_others(self) -> None:
        """Log a warning if the directory holds checkpoints of another system, which are not loaded."""
        directory = self.manager.config.directory
        if directory is None or "://" in str(directory):
            return
        try:
            found = sorted(filter(_OTHER_CHECKPOINT.fullmatch, in_time(directory, partial(os.listdir, directory))))
        except OSError:
            return  # if it matters, the load has reported it
        if found:
            log.warning(
                "nothing was loaded: %s holds %s%s, but no checkpoint of outlast; a checkpoint of another system is "
                "not loaded: have the script load it, or name another directory",
                *(directory, ", ".join(found[:3]), ", ..." if len(found) > 3 else ""),
            )

    def resume(self, state: Mapping[str, Any], iteration: int, origin: Origin | None) -> None:
        """Resume from a state that all ranks have in memory.

        Args:
            origin: The checkpoint from which the state descends; ``None`` = none.

        Raises:
            CheckpointError: Another run has taken a directory.
            PeerLost: A peer left.

        Collective: all ranks.
        """
        from outlast.checkpoint import Restored

        self.manager.claim()
        loaded = None
        if origin is not None:
            self.has_loaded = True
            loaded = Restored(
                iteration=iteration,
                checkpoint=origin.checkpoint,
                attempt=origin.attempt,
                tier=origin.tiers[self._place.global_rank],
                tiers=origin.tiers,
                rejected=[],
                load_s=0.0,
                bytes_read={},
            )
        self.manager.go_on(state, iteration, loaded)
        self.schedule.start_from(iteration)

    def is_saved(self, iteration: int) -> bool:
        """Return whether a save of that iteration to all tiers was begun, or was loaded."""
        return self._saved_iteration == iteration

    def save(
        self, state: Mapping[str, Any], iteration: int, *, scope: DueSave = DueSave.ALL, suspect: bool = False
    ) -> SaveHandle:
        """Save ``state`` and return once it is copied.

        Raises:
            CheckpointError: Saving failed too often in a row. A refused save returns a handle that has failed.

        Collective: all ranks, at the same iteration.
        Blocks: while the state is copied; with ``async_save`` off, until it is committed.
        """
        begin_ns = clock.now_ns()
        try:
            tiers = NODE_LOCAL_TIERS if scope == DueSave.NEAR else None
            handle = self.manager.save(state, iteration, tiers=tiers, suspect=suspect)
        except Untrusted as error:
            if self.manager.refusal is None:
                raise
            from outlast.checkpoint import SaveHandle

            handle = SaveHandle(iteration, limit_s=0.0)
            handle.fail(error)  # all ranks exit together, once they have agreed to
        self.last_stall_s = (clock.now_ns() - begin_ns) / 1e9
        if not suspect:
            self.schedule.note_save(iteration, scope)
            if scope == DueSave.ALL:
                self._saved_iteration, self.newest = iteration, handle
        return handle


OWN_STATE = "outlast"
"""Name under which the session saves its state."""


def unwrap_ddp(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with each DDP-wrapped module replaced by the inner module.

    So a checkpoint loads with and without DDP.
    """
    from torch.nn.parallel import DistributedDataParallel

    return {
        name: value.module if isinstance(value, DistributedDataParallel) else value for name, value in state.items()
    }


def saved_state(state: Mapping[str, Any], own: object) -> dict[str, Any]:
    return {**unwrap_ddp(state), OWN_STATE: own}


def restore(
    state: Mapping[str, Any],
    own: object,
    saves: Saves | None,
    scope: InProcessScope,
    replicas: dist.ProcessGroup | DeviceMesh | None,
    *,
    suspect_iteration: int | None,
    place: WorkerEnv,
    journal: Journal,
    missing: str | None = None,
) -> int:
    """Restore ``state`` from memory or a checkpoint; return the number of optimizer steps that it has done.

    Args:
        own: The session's state, with ``state_dict()`` and ``load_state_dict()``.
        replicas: Ranks that hold the same tensors; ``None`` = all.
        suspect_iteration: As for :meth:`Saves.load`.

    Raises:
        CheckpointError: As for :meth:`Saves.load`.
        RestartAbort: The state in memory is torn, and nothing was saved.
        PeerLost: A peer left.
        TypeError: The checkpoint has plain values, and the mapping is not mutable.

    Collective: all ranks.
    """
    iteration = scope.resume(state, {OWN_STATE: own}, replicas, place=place, journal=journal)
    if iteration is not None:
        if saves is not None:
            saves.resume(saved_state(state, own), iteration, scope.origin)
        return iteration
    given = unwrap_ddp(state)
    loaded = {**given, OWN_STATE: own}
    restored = None if saves is None else saves.load(loaded, suspect_iteration=suspect_iteration, missing=missing)
    if restored is None:
        scope.note_loaded(None)
        scope.note_iteration(0)
        return 0
    replaced = {name: value for name, value in loaded.items() if name != OWN_STATE and value is not given.get(name)}
    if replaced:
        if not isinstance(state, MutableMapping):
            raise TypeError(
                f"state holds plain values ({', '.join(sorted(replaced))}), which are loaded into a dict only; give one"
            )
        state.update(replaced)
    scope.note_loaded(Origin(checkpoint=restored.checkpoint, attempt=restored.attempt, tiers=restored.tiers))
    scope.note_iteration(restored.iteration)
    return restored.iteration
