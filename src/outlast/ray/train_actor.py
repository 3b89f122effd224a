"""What a user's actor derives from, and the host that takes it from one incarnation to the next.

The process groups of an incarnation are made over a store, and left at any time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outlast import clock
from outlast.config import FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import ConfigError, OutlastError, RendezvousError
from outlast.inprocess.call import end_groups
from outlast.monitor.rank_monitor import PlacedRankMonitor, RankMonitor
from outlast.policy.deadlines import Timeouts
from outlast.ray.actor_state import StartingState, StateTracker
from outlast.ray.protocol import AXES, ActorAssignment, Joined, MeshRank, ShellSettings
from outlast.runtime import connections, device
from outlast.runtime.addresses import Endpoint
from outlast.runtime.board import Board, RankState
from outlast.runtime.interruption import AsyncInterruption
from outlast.runtime.journal import Journal
from outlast.runtime.store import TCPStore, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    import torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.checkpoint import SaveHandle
    from outlast.monitor.rank_monitor import SectionTimer

_CONNECT_S = 1.0
"""Of connecting to the store: between two tries the wait can be interrupted."""


class TrainActor:
    """Train as one rank of an :class:`~outlast.ray.ActorGroup`.

    ``__init__`` runs in spares, too: imports and data belong there, there are no groups and no rank yet. Everything
    else, and ``__init__`` where all start over, runs in one thread of the actor, which is not the main one.

    An exception leaves a call with the state as it was, unless it went through :meth:`update`. What is part of
    :meth:`state` must therefore change within ``update`` alone.
    """

    _host: ActorHost | None = None

    # -- to be overridden --------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Make model, optimizer and the like; called once, when the actor has its place.

        Those that replace dead actors are set up alone: nothing in here may wait for other ranks. Where all have to
        start over, a new object is made and set up in each process.
        """

    def regroup(self) -> None:
        """Make what holds process groups, such as ``DistributedDataParallel``.

        Called in each incarnation, the first included, on every rank, once it has the state that all go on from.
        """

    def state(self) -> Mapping[str, Any]:
        """Return what is saved and loaded, by name: modules, optimizers, tensors, plain values, mappings of these.

        The same names on every rank; nothing = this group has no state to lose.
        """
        return {}

    def take_state(self, values: Mapping[str, Any]) -> None:
        """Take back the plain values of :meth:`state` after a load; each goes to the attribute of its name.

        Args:
            values: By name; modules, optimizers and tensors have been loaded in place and are not among them.

        Raises:
            OutlastError: There is no such attribute; override this method.
        """
        for name, value in values.items():
            if not hasattr(self, name):
                raise OutlastError(
                    f"state() holds the plain value {name!r}, but there is no attribute of that name to load it "
                    "into; name it so, or override take_state()"
                )
            setattr(self, name, value)

    # -- to be used --------------------------------------------------------------------------------------------

    @property
    def place(self) -> MeshRank:
        """This actor's place in the mesh."""
        return self._hosted.place

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks by axis: ``pp``, ``dp``, ``cp``, ``tp``; another one in each incarnation."""
        return self._hosted.mesh

    @property
    def device(self) -> torch.device:
        """What this actor computes on."""
        return self._hosted.device

    @property
    def iteration(self) -> int:
        """Number of optimizer steps that the state has done."""
        return self._hosted.tracker.count

    def group(self, axis: str) -> torch.distributed.ProcessGroup:
        """Return the group of this actor's peers along an axis; another one in each incarnation.

        Args:
            axis: ``pp``, ``dp``, ``cp`` or ``tp``.

        Raises:
            ConfigError: There is no such axis.
            OutlastError: There are no groups now.
        """
        mesh = self._hosted.mesh
        if axis not in AXES:
            raise ConfigError(f"there is no axis {axis!r}; the axes are {', '.join(AXES)}")
        return mesh.get_group(axis)

    def section(self, name: str) -> SectionTimer:
        """Return the marker of a section, for ``with self.section("step"):``; its timeout is watched.

        Sections that exceed ``FaultToleranceConfig.rank_section_timeouts`` are hangs. A marker serves
        its incarnation only: ask for it in each call.
        """
        return self._hosted.monitor.section(name)

    def heartbeat(self) -> None:
        """Report that this actor is alive, for ``FaultToleranceConfig.rank_heartbeat_timeout``."""
        self._hosted.monitor.heartbeat()

    def update(self, iteration: int) -> AbstractContextManager[None]:
        """Return the context in which the state goes from ``iteration - 1`` to ``iteration``.

        A state that is left in the middle of it, by an exception, is unusable and is loaded again.

        Raises:
            OutlastError: The state has not done ``iteration - 1`` steps.
        """
        return self._hosted.tracker.update(iteration)

    def save(self, iteration: int, *, now: bool = False) -> SaveHandle | None:
        """Save the state if that is due after ``iteration`` (``CheckpointConfig.save_interval`` and the like).

        Args:
            iteration: Number of optimizer steps that the state has done.
            now: Save it to all tiers whether it is due or not.

        Returns:
            The save, which continues beside training; ``None`` = none was due, or nothing is saved.

        Raises:
            OutlastError: The state has not done ``iteration`` steps.
            CheckpointError: Saving failed too often in a row.

        Collective: all ranks, at the same iteration.
        Blocks: while the state is copied.
        """
        return self._hosted.save(iteration, now=now)

    @property
    def _hosted(self) -> ActorHost:
        if self._host is None:
            raise OutlastError(
                f"{type(self).__name__} has no place in a group yet: use this in setup() and calls, not in __init__()"
            )
        return self._host


class ActorHost:
    """Host a user's actor through incarnations.

    Args:
        make: Makes the user's object. One that is no :class:`TrainActor` starts over with each recovery: its calls
            are counted, and nothing else is known of its state.
        settings: What the group was made with.
        node: Name of this node.
        interruption: Gets the working thread out of the user's code.

    Thread: the working thread, except where a method's docstring names another.
    """

    def __init__(
        self, make: Callable[[], Any], settings: ShellSettings, node: str, interruption: AsyncInterruption
    ) -> None:
        self._make, self._settings, self._node, self._interruption = make, settings, node, interruption
        self.actor = make()
        self.tracker = StateTracker(settings.checkpoint, interruption)
        self._noting = connections.Noting()
        self._excepthook = sys.excepthook
        self._mesh: DeviceMesh | None = None
        self._store: TCPStore | None = None
        self._has_groups = False
        self.timeouts = Timeouts.from_config(self._fault_tolerance)
        self._place: MeshRank | None = None
        self._is_set_up = self._is_half_set_up = False
        self._board: Board | None = None
        self._monitor: PlacedRankMonitor | None = None
        self._looking = threading.Lock()
        self._journal: Journal | None = None

    @property
    def place(self) -> MeshRank:
        """The actor's place in the mesh."""
        assert self._place is not None
        return self._place

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks by axis: ``pp``, ``dp``, ``cp``, ``tp``.

        Raises:
            OutlastError: There are no groups now.
        """
        if self._mesh is None:
            raise OutlastError("there are no process groups now; use them in setup(), regroup() and calls")
        return self._mesh

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

    def join(self, assignment: ActorAssignment) -> Joined:
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
            self._monitor = PlacedRankMonitor(env)
            self._journal = Journal(
                env.run_dir, run_id=env.run_id, job=env.job, node=env.node, proc=f"actor-{os.getpid()}"
            )
            self._journal.cycle = env.cycle
            self._form_groups(assignment)
        with self._timed(phases, "setup"), self.monitor.section("setup"):
            if self._is_half_set_up or (self._is_set_up and place != self._place):
                self._start_over()
            self._place = place
            if not self._is_set_up:
                self._set_up()
        with self._timed(phases, "load"), self.monitor.section("setup"):
            begin = self._take_state(env, assignment.has)
        with self._timed(phases, "setup"), self.monitor.section("setup"):
            self._call_if_there("regroup")
        self.note_iteration()
        return Joined(
            iteration=self.tracker.iteration,
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
        """Have the times outside of sections and between heartbeats begin now: none of them runs between two calls.

        The time to the first heartbeat is counted from the beginning of the incarnation.
        """
        with self.monitor.section("call"):
            pass
        assert self._monitor is not None
        if self._monitor.board_state.last_heartbeat_ns:
            self.monitor.heartbeat()

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the user's; return what it returns."""
        function = getattr(self.actor, method)
        if isinstance(self.actor, TrainActor):
            value = function(*args, **kwargs)
        else:
            with self.tracker.whole_call():
                value = function(*args, **kwargs)
        self.note_iteration()
        return value

    def save(self, iteration: int, *, now: bool) -> SaveHandle | None:
        """Save the actor's state if that is due; see :meth:`TrainActor.save`."""
        with self.monitor.section("checkpointing"):
            return self.tracker.save(self.actor.state(), iteration, now=now)

    def note_iteration(self) -> None:
        """Have the board show how far the state is."""
        self.monitor.set_iteration(self.tracker.count)

    def leave(self) -> None:
        """End the incarnation. Idempotent.

        Raises:
            OutlastError: A collective does not end: this process must not go on.

        Blocks: some 10 ms; up to 20 s when a collective does not end, or a store does not answer.
        Thread: any, once the working thread is out.
        """
        self.tracker.close()
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
        if self._has_groups:
            self._mesh = self._store = None
            end_groups()
            self._noting.stop()
            sys.excepthook = self._excepthook  # torch puts another layer around it for every default group
            self._has_groups = False

    # -- details -----------------------------------------------------------------------------------------------

    @property
    def _fault_tolerance(self) -> FaultToleranceConfig:
        return self._settings.fault_tolerance or FaultToleranceConfig()

    def _describe(self, assignment: ActorAssignment) -> WorkerEnv:
        self._board = Board.create(num_ranks=1)
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

    def _form_groups(self, assignment: ActorAssignment) -> None:
        """Meet the other ranks and connect to them.

        Raises:
            RendezvousError: The ranks did not find each other.

        Collective: all ranks of the incarnation.
        Blocks: up to ``assignment.timeout_s``, until all ranks have come; unless the incarnation is given up.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.device_mesh import init_device_mesh

        self._has_groups = True
        self._noting.start()
        timeout = timedelta(seconds=assignment.timeout_s)
        if self._settings.use_gpu:
            device.settle_collectives()
            device.use_device(assignment.local_rank)
        try:
            self._store = self._connect(assignment)
            self._store.set_timeout(timeout)
            self._interruption.check()
            dist.init_process_group(
                self._settings.backend or device.training_backend(),
                store=PrefixStore(f"{self._settings.group}/{assignment.incarnation}", self._store),
                rank=assignment.rank,
                world_size=assignment.mesh.size,
                timeout=timeout,
            )
            self._interruption.check()
            self._mesh = init_device_mesh(self.device.type, assignment.mesh.sizes, mesh_dim_names=AXES)
        except ValueError as error:
            raise ConfigError(f"the groups cannot be made: {error}") from error
        except RuntimeError as error:
            raise RendezvousError(
                f"the ranks could not connect ({error}); see the log of the rank that left"
            ) from error

    def _connect(self, assignment: ActorAssignment) -> TCPStore:
        end_s = clock.now_s() + assignment.timeout_s
        endpoint = Endpoint(assignment.store_addr, assignment.store_port)
        while True:
            self._interruption.check()
            limit_s = min(_CONNECT_S, max(0.001, end_s - clock.now_s()))
            try:
                with connections.noting(is_store=True):
                    return connect(endpoint, timeout_s=limit_s, call_timeout_s=assignment.timeout_s)
            except RendezvousError:
                if clock.now_s() >= end_s:
                    raise

    def _set_up(self) -> None:
        is_ours = isinstance(self.actor, TrainActor)
        if is_ours:
            self.actor._host = self
        self._is_half_set_up = True
        self._call_if_there("setup")
        self._is_set_up, self._is_half_set_up = True, False
        self.tracker.start_over(has_state=not is_ours or bool(self.actor.state()))

    def _call_if_there(self, name: str) -> None:
        if callable(function := getattr(self.actor, name, None)):
            function()

    def _start_over(self) -> None:
        """Make a new object in place of the one that has trained, which is unusable now."""
        self.actor = self._make()
        self._is_set_up = self._is_half_set_up = False

    def _take_state(self, env: WorkerEnv, has: int | None) -> StartingState:
        """Have the state that all ranks go on from."""
        assert self._journal is not None
        state = self.actor.state() if isinstance(self.actor, TrainActor) else {}
        if not self.tracker.has_state:
            return StartingState(origin="new" if self.tracker.is_new else "kept")
        with self._interruption.update():
            self.tracker.open(env, self._journal)
            take = getattr(self.actor, "take_state", None)  # a plain class has none, and is never loaded
            begin = self.tracker.restore(state, has, take)
        if begin.origin == "new" and not begin.is_as_set_up:
            self._start_over()
            self._set_up()
        return begin

    @contextmanager
    def _timed(self, phases: dict[str, float], name: str) -> Iterator[None]:
        begin_ns = clock.now_ns()
        try:
            yield
        finally:
            phases[name] = phases.get(name, 0.0) + (clock.now_ns() - begin_ns) / 1e9
