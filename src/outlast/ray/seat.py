"""An actor's seat in the group: the user's object, and all that it gets from one incarnation to the next."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outlast import clock
from outlast.config import FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.monitor.rank_monitor import RankMonitor
from outlast.policy.deadlines import Timeouts
from outlast.ray.keeping import Begin, Keeping
from outlast.ray.membership import Membership
from outlast.ray.mesh import MeshRank
from outlast.ray.train_actor import TrainActor
from outlast.ray.words import Assignment, Joined, ShellSettings
from outlast.runtime import device
from outlast.runtime.board import Board, RankState
from outlast.runtime.interruption import AsyncInterruption
from outlast.runtime.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from outlast.checkpoint import SaveHandle

__all__ = ["Seat"]

log = logging.getLogger(__name__)


class Seat:
    """Host a user's actor through incarnations.

    Args:
        make: Makes the user's object. One that is no :class:`TrainActor` begins anew with each recovery: its calls
            are counted, and nothing else is known of its state.
        settings: What the group was made with.
        node: Name of this node.
        interruption: Gets the working thread out of the user's code.

    Thread: the working thread, except where a method says otherwise.
    """

    def __init__(
        self, make: Callable[[], Any], settings: ShellSettings, node: str, interruption: AsyncInterruption
    ) -> None:
        self._make, self._settings, self._node, self._interruption = make, settings, node, interruption
        self.actor = make()
        self.keeping = Keeping(settings.checkpoint, interruption)
        self.membership = Membership(
            settings.backend or device.training_backend(), use_gpu=settings.use_gpu, name=settings.group
        )
        self.timeouts = Timeouts.from_config(self._fault_tolerance)
        self._place: MeshRank | None = None
        self._is_set_up = self._is_half_set_up = False
        self._board: Board | None = None
        self._monitor: RankMonitor | None = None
        self._looking = threading.Lock()
        self._journal: Journal | None = None

    @property
    def place(self) -> MeshRank:
        """The actor's place in the mesh."""
        assert self._place is not None
        return self._place

    @property
    def monitor(self) -> RankMonitor:
        """Takes heartbeats and sections; another one in each incarnation."""
        assert self._monitor is not None
        return self._monitor

    def look(self) -> RankState | None:
        """Return what the board shows of this rank; ``None`` = it is in no incarnation. Thread: any."""
        with self._looking:
            return self._monitor.board_state if self._monitor is not None else None

    @property
    def device(self) -> torch.device:
        """What the actor computes on."""
        import torch

        return device.training_device() if self._settings.use_gpu else torch.device("cpu")

    def join(self, assignment: Assignment) -> Joined:
        """Take a place in an incarnation: groups, set-up, state.

        Raises:
            OutlastError: It cannot be taken; or whatever the user's methods raise.

        Collective: all ranks of the incarnation.
        Blocks: until all ranks have come and loaded.
        """
        phases: dict[str, float] = {}
        place = assignment.mesh.place(assignment.rank)
        env = self._describe(assignment)
        with self._timed(phases, "groups"), self._interruption.update():
            self._watch(env)
            self.membership.form(assignment, self._interruption.check)
        with self._timed(phases, "setup"), self.monitor.section("setup"):
            if self._is_half_set_up or (self._is_set_up and place != self._place):
                self._begin_anew()
            self._place = place
            if not self._is_set_up:
                self._set_up()
        with self._timed(phases, "load"), self.monitor.section("setup"):
            begin = self._take_state(env, assignment.has)
        with self._timed(phases, "setup"), self.monitor.section("setup"):
            self._call_if_there("regroup")
        self.note_iteration()
        return Joined(
            pid=os.getpid(),
            iteration=self.keeping.iteration,
            generation=begin.generation,
            loaded=begin.origin not in ("kept", "new"),
            origin=begin.origin,
            phases=phases,
        )

    def end_sections(self) -> None:
        """Leave what an exception left open."""
        if self._monitor is not None:
            self._monitor.end_all_sections()

    def begin_call(self) -> None:
        """Have the times outside of sections and between heartbeats begin now: nobody has to say anything in between.

        The time to the first heartbeat goes on from the beginning of the incarnation.
        """
        with self.monitor.section("call"):
            pass
        if self.monitor.board_state.last_heartbeat_ns:
            self.monitor.heartbeat()

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the user's; return what it returns."""
        function = getattr(self.actor, method)
        if isinstance(self.actor, TrainActor):
            value = function(*args, **kwargs)
        else:
            with self.keeping.whole_call():
                value = function(*args, **kwargs)
        self.note_iteration()
        return value

    def save(self, iteration: int, *, now: bool) -> SaveHandle | None:
        """Save the actor's state if that is due; see :meth:`TrainActor.save`."""
        with self.monitor.section("checkpointing"):
            return self.keeping.save(self.actor.state(), iteration, now=now)

    def note_iteration(self) -> None:
        """Have the board show how far the state is."""
        self.monitor.set_iteration(self.keeping.count)

    def leave(self) -> None:
        """End the incarnation. Idempotent.

        Raises:
            OutlastError: A collective does not end: this process must not go on.

        Blocks: some 10 ms; up to 20 s when a collective does not end, or a store does not answer.
        Thread: any, once the working thread is out.
        """
        self.keeping.close()
        with self._looking:
            monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self.membership.leave()

    # -- details -----------------------------------------------------------------------------------------------

    @property
    def _fault_tolerance(self) -> FaultToleranceConfig:
        return self._settings.fault_tolerance or FaultToleranceConfig()

    def _describe(self, assignment: Assignment) -> WorkerEnv:
        self._board = Board.create_anonymous(num_ranks=1)
        return WorkerEnv(
            global_rank=assignment.rank,
            local_rank=0,
            world_size=assignment.mesh.size,
            local_world_size=assignment.local_world_size,
            node_rank=assignment.node_rank,
            run_id=self._settings.group,
            job=self._settings.group,
            cycle=assignment.incarnation,
            node=self._node,
            run_dir=self._settings.run_dir,
            names=(f"directory {self._settings.run_dir}",) if self._settings.run_dir is not None else (),
            board=self._board.path,
            launcher="ray",
            fault_tolerance=self._fault_tolerance.to_json(),
            writer=assignment.writer,
            master_addr=assignment.store_addr,
        )

    def _watch(self, env: WorkerEnv) -> None:
        self._monitor = RankMonitor(env)
        self._journal = Journal(env.run_dir, run_id=env.run_id, job=env.job, node=env.node, proc=f"actor-{os.getpid()}")
        self._journal.cycle = env.cycle

    def _set_up(self) -> None:
        is_ours = isinstance(self.actor, TrainActor)
        if is_ours:
            self.actor._seat = self
        self._is_half_set_up = True
        self._call_if_there("setup")
        self._is_set_up, self._is_half_set_up = True, False
        self.keeping.begin_anew(has_state=not is_ours or bool(self.actor.state()))

    def _call_if_there(self, name: str) -> None:
        if callable(function := getattr(self.actor, name, None)):
            function()

    def _take_values(self, values: dict[str, Any]) -> None:
        self.actor.take_state(values)

    def _begin_anew(self) -> None:
        """Make a new object in place of the one that has trained, which is of no use any more."""
        self.actor = self._make()
        self._is_set_up = self._is_half_set_up = False

    def _take_state(self, env: WorkerEnv, has: int | None) -> Begin:
        """Have the state that all ranks go on from."""
        assert self._journal is not None
        state = self.actor.state() if isinstance(self.actor, TrainActor) else {}
        if not self.keeping.has_state:
            return Begin(origin="new" if self.keeping.is_new else "kept")
        with self._interruption.update():
            self.keeping.open(env, self._journal)
            begin = self.keeping.restore(state, has, self._take_values)
        if begin.origin == "new" and not begin.is_as_set_up:
            self._begin_anew()
            self._set_up()
        return begin

    @contextmanager
    def _timed(self, phases: dict[str, float], name: str) -> Iterator[None]:
        begin_ns = clock.now_ns()
        try:
            yield
        finally:
            phases[name] = phases.get(name, 0.0) + (clock.now_ns() - begin_ns) / 1e9
