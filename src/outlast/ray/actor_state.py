"""An actor's state: its iteration, whether it is consistent, saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from outlast import clock
from outlast.config import CheckpointConfig
from outlast.decoding import from_json
from outlast.env import WorkerEnv
from outlast.errors import OutlastError
from outlast.monitor.examination import count_collectives
from outlast.runtime.consensus import Consensus
from outlast.runtime.interruption import AsyncInterruption
from outlast.runtime.process_groups import gather_bytes
from outlast.runtime.random_numbers import RandomSnapshot
from outlast.session.environment import has_node_local_tier
from outlast.session.saves import NODE_LOCAL_TIERS, DueSave, SaveSchedule, unwrap_ddp

if TYPE_CHECKING:
    from outlast.checkpoint import Restored, SaveHandle
    from outlast.checkpoint.manager import CheckpointEngine
    from outlast.runtime.journal import Journal


HeldState = tuple[tuple[int, str] | None, bool]
"""What ranks compare: iteration and attempt of the held state, and whether the state is as set up."""


class StartingState(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: int | None = None
    """The checkpoint that all ranks agreed on; ``None`` = none."""
    origin: str = "kept"
    """``kept``; ``new`` = all ranks begin at 0; or the tier that was read."""
    is_as_set_up: bool = True
    """With ``new``: whether all ranks are as set up; otherwise all have to be set up again."""


class StateTracker:
    """Saves and loads an actor's state, if configured, and tracks which state it is.

    A state is *held* if it is consistent and the attempt that saved it is known: it need not be loaded from there.
    Thread: the working thread, except where a method names another.
    """

    def __init__(self, config: CheckpointConfig | None, interruption: AsyncInterruption) -> None:
        self._config, self._interruption = config, interruption
        self.count = 0
        """Optimizer steps of the state, consistent or not."""
        self._is_torn = False
        self.has_state = False
        """Whether there is a state to lose."""
        self._attempt: str | None = None
        self._random = RandomSnapshot()
        self._manager: CheckpointEngine | None = None
        self._schedule: SaveSchedule | None = None
        self._consensus: Consensus | None = None
        self._origin: Restored | None = None
        self._incarnation, self._world_size = 0, 1
        self._stepped_ns = 0

    # -- identity of the state ------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int | None:
        """Optimizer steps of the state; ``None`` = torn, or no state. Thread: any."""
        return None if self._is_torn or not self.has_state else self.count

    @property
    def is_new(self) -> bool:
        return not self._is_torn and self.count == 0

    def start_over(self, *, has_state: bool) -> None:
        """Record that the state was just set up."""
        self.count, self._is_torn, self._attempt, self._origin = 0, False, None, None
        self.has_state = has_state
        self._random.take()

    @contextmanager
    def update(self, iteration: int) -> Iterator[None]:
        """Context of the change from ``iteration - 1`` to ``iteration``. Raises OutlastError at another iteration."""
        self._check_whole()
        if iteration != self.count + 1:
            raise OutlastError(
                f"update({iteration}), but the state has done {self.count} steps: the next update is "
                f"{self.count + 1}; take the iteration from the group after RolledBack",
                iteration=self.count,
            )
        with self._interruption.update():
            num_collectives = count_collectives()
            self._is_torn = True
            yield
            if self._interruption.is_wanted and count_collectives() != num_collectives:
                self._interruption.check()  # a collective may have returned garbage meanwhile: the state is torn
            self.count, self._attempt = iteration, f"unsaved-{self._incarnation}"
            self._random.take()
            self._is_torn = False

    @contextmanager
    def whole_call(self) -> Iterator[None]:
        """Context of a call of an actor with unknown state: any call may change it, and none can be undone."""
        self._is_torn = True
        yield
        self.count, self._is_torn = self.count + 1, False

    def _check_whole(self) -> None:
        if self._is_torn:
            raise OutlastError("the state was left in the middle of an update: it has to be loaded first")

    # -- incarnations ------------------------------------------------------------------------------------------

    def open(self, place: WorkerEnv, journal: Journal) -> None:
        """Begin an incarnation.

        Raises: CheckpointError (a folder cannot be used); PeerLost (a peer was lost). Collective: all ranks.
        """
        from outlast.checkpoint.manager import open_manager

        self._incarnation, self._world_size = place.cycle, place.world_size
        if self._config is None:
            return
        self._manager = open_manager(
            self._config, env=place, journal=journal, is_left=lambda: self._interruption.is_left(place.cycle)
        )
        self._schedule = SaveSchedule(
            self._config,
            decides=place.global_rank == 0,
            world_size=place.world_size,
            has_near=has_node_local_tier(self._config, place),
        )
        if "auto" in (self._config.save_interval, self._config.non_persistent_save_interval):
            self._consensus = Consensus(["save"], world_size=place.world_size)

    def restore(
        self, state: Mapping[str, Any], has: int | None, take: Callable[[dict[str, Any]], None] | None
    ) -> StartingState:
        """Load, or keep, the state that all ranks continue from.

        Args:
            state: The values to save, by name.
            has: The iteration whose state may be kept; ``None`` = load.
            take: Called with the loaded plain values; ``None`` = never loads.

        Raises: CheckpointError (there are checkpoints, but none that all ranks can load); PeerLost (a peer was lost).
        Collective: all ranks.
        """
        held = None
        if self._attempt is not None and self.iteration is not None and has == self.iteration:
            held = (self.count, self._attempt)
        if self._manager is not None:
            self._manager.claim()
        all_hold, are_new = self._compare(held)
        if all_hold:
            if self._manager is not None:
                self._manager.go_on(unwrap_ddp(state), self.count, self._origin)
            return self._resume(StartingState())
        given = unwrap_ddp(state)
        loaded = dict(given)
        restored = self._manager.load_latest(loaded, has=held) if self._manager is not None else None
        if restored is None:
            return self._resume(StartingState(origin="new", is_as_set_up=are_new))
        self._origin = restored
        self.count, self._is_torn, self._attempt = restored.iteration, False, restored.attempt
        if restored.tier != "kept":
            assert take is not None
            take({name: value for name, value in loaded.items() if value is not given[name]})
            self._random.take()
        return self._resume(StartingState(checkpoint=restored.checkpoint, origin=restored.tier))

    def _resume(self, begin: StartingState) -> StartingState:
        self._random.restore()  # a failed call has used some
        if self._schedule is not None:
            self._schedule.start_from(self.count)
        return begin

    def _compare(self, held: tuple[int, str] | None) -> tuple[bool, bool]:
        """Return whether all ranks hold the same state, and whether all are as set up. Collective: all ranks."""
        facts = [msgspec.json.encode((held, self.is_new))]
        if self._world_size > 1:
            from torch.distributed.distributed_c10d import _get_default_group

            facts = gather_bytes(_get_default_group(), facts[0])
        of_all = [from_json(one, HeldState) for one in facts]
        all_hold = held is not None and all(one == held for one, _ in of_all)
        return all_hold, all(is_new for _, is_new in of_all)

    def save(self, state: Mapping[str, Any], iteration: int, *, now: bool) -> SaveHandle | None:
        """Save the state if that is due.

        Raises: OutlastError (the state is not at ``iteration``); CheckpointError (saving failed too often in a row).
        Collective: all ranks, at the same iteration. Blocks: while the state is copied.
        """
        self._check_whole()
        if iteration != self.count:
            raise OutlastError(f"save({iteration}), but the state has done {self.count} steps", iteration=self.count)
        if self._manager is None or self._schedule is None or not self.has_state:
            return None
        due = DueSave.ALL if now else self._due(iteration)
        if due == DueSave.NOTHING:
            return None
        with self._interruption.update():
            self._random.take()
            handle = self._manager.save(
                unwrap_ddp(state), iteration, tiers=NODE_LOCAL_TIERS if due == DueSave.NEAR else None
            )
            self._attempt = handle.attempt
            self._schedule.note_save(iteration, due)
        return handle

    def _due(self, iteration: int) -> DueSave:
        """Return the tiers due after a step. Collective: all ranks, if an interval is automatic."""
        assert self._manager is not None
        assert self._schedule is not None
        now_ns = clock.now_ns()
        if self._stepped_ns:
            self._schedule.note_step((now_ns - self._stepped_ns) / 1e9)
        agreed = 0
        if self._consensus is not None:
            agreed = self._consensus.agree([self._schedule.request(iteration, self._manager.save_cost_s)])[0]
        self._stepped_ns = clock.now_ns()
        return self._schedule.due(iteration, agreed)

    def give_up(self) -> None:
        """Abandon the saves that the working thread waits for; :meth:`close` follows. Blocks: never. Thread: any."""
        if (manager := self._manager) is not None:
            manager.give_up()

    def close(self) -> None:
        """End the incarnation; uncommitted saves are abandoned. Idempotent.

        Blocks: up to 10 s, independent of peers. Thread: any, once the working thread has left the call.
        """
        manager, self._manager = self._manager, None
        if self._consensus is not None:
            self._consensus.close()
            self._consensus = None
        if manager is not None:
            manager.close()
