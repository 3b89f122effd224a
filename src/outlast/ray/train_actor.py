"""The base class of users' actors, and the Ray actor (shell) that hosts it in the actor's process.

The shell responds to the driver at any time. User code runs in the single thread of the default concurrency group;
queries that must work while that thread hangs belong to the group ``control``, with its own threads. The process groups
of an incarnation are formed over a TCPStore and can be torn down at any time.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.cloudpickle

from outlast import clock, env
from outlast.config import FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError, DeadlineExceeded, OutlastError, RendezvousError
from outlast.inprocess.leaving import describe, drop, end_groups, is_consequence
from outlast.monitor.examination import read_books, waits_in
from outlast.monitor.rank_monitor import PlacedRankMonitor
from outlast.monitor.stacks import Frame, Stack
from outlast.policy.deadlines import Timeouts, deadlines, expired
from outlast.policy.root_cause import Position
from outlast.ray.actor_state import StartingState, StateTracker
from outlast.ray.protocol import (
    AXES,
    EXPERT_AXES,
    Aborted,
    ActorAssignment,
    ActorIdentity,
    ActorStatus,
    Call,
    CallFailed,
    CallReturned,
    FailureKind,
    Joined,
    MeshRank,
    ShellSettings,
    timed,
)
from outlast.runtime import connections, device, device_collectives
from outlast.runtime.addresses import Endpoint
from outlast.runtime.board import Board, RankState
from outlast.runtime.interruption import Abandoned, AsyncInterruption, CallOutcome
from outlast.runtime.journal import Journal
from outlast.runtime.run_key import describe_difference
from outlast.runtime.store import TCPStore, connect, host

if TYPE_CHECKING:
    import torch
    import torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.checkpoint import SaveHandle
    from outlast.monitor.rank_monitor import SectionTimer

log = logging.getLogger(__name__)
_NUM_CONTROL_THREADS = 4
_CONNECT_S = 1.0
"""Limit of one connection attempt to the TCPStore; the wait can be interrupted between attempts."""
_LOOK_S = 0.01
_BOTH_WAYS_S = 0.2
"""Seconds after which connections are shut down in both directions, for code that does not detect end of file."""
_SAVES_S = 0.1
"""Seconds after which saves that the working thread waits for are abandoned."""
_STORE_TIMEOUT_S = 60.0
_NUM_STORES = 2
"""The newest TCPStore and the previous one."""


class TrainActor:
    """Train as one rank of an :class:`~outlast.ray.ActorGroup`.

    ``__init__`` also runs in spares: put imports and data there; process groups and rank do not exist yet. All other
    code, and ``__init__`` when all actors start over, runs in one thread of the actor, which is not the main thread.

    An exception in a call leaves the state unchanged, unless the call was within :meth:`update`. Therefore everything
    in :meth:`state` must change only within ``update``.
    """

    _shell: Shell | None = None

    # -- overridden by users -----------------------------------------------------------------------------------

    def setup(self) -> None:
        """Create model, optimizer and the like; called once, when the actor has a rank.

        Replacements of lost actors are set up alone: do not wait for other ranks here. When all actors start over, a
        new object is created and set up in each process.
        """

    def regroup(self) -> None:
        """Create objects that hold process groups, such as ``DistributedDataParallel``.

        Called in every incarnation, including the first, on every rank, after the common state was loaded.
        """

    def state(self) -> Mapping[str, Any]:
        """Return the values to save and load, by name: modules, optimizers, tensors, plain values, mappings of these.

        The same names on every rank; empty = the group has no state to lose.
        """
        return {}

    def take_state(self, values: Mapping[str, Any]) -> None:
        """Assign the loaded plain values of :meth:`state` to the attributes of their names.

        Args:
            values: By name; excludes modules, optimizers and tensors, which are loaded in place.

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

    # -- called by users ---------------------------------------------------------------------------------------

    @property
    def place(self) -> MeshRank:
        """This actor's place in the mesh."""
        place = self._hosted.place
        assert place is not None
        return place

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks by axis: ``pp``, ``dp``, ``cp``, ``tp``; a new object in each incarnation.

        Raises:
            OutlastError: There are no process groups now.
        """
        if (mesh := self._hosted.mesh) is None:
            raise OutlastError("there are no process groups now; use them in setup(), regroup() and calls")
        return mesh

    @property
    def device(self) -> torch.device:
        """The device that this actor computes on."""
        return self._hosted.device

    @property
    def iteration(self) -> int:
        """Number of optimizer steps of the state."""
        return self._hosted.tracker.count

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks by expert axis: ``pp``, ``edp``, ``ep``, ``etp``; a new object in each incarnation.

        Raises:
            ConfigError: The group's mesh has no expert axes.
            OutlastError: There are no process groups now.
        """
        if self.mesh is not None and (mesh := self._hosted.expert_mesh) is not None:
            return mesh
        raise ConfigError('the mesh has no expert axes; give it some, such as mesh={"dp": 4, "ep": 2}')

    def group(self, axis: str) -> torch.distributed.ProcessGroup:
        """Return the process group of this actor's peers along an axis; a new group in each incarnation.

        Args:
            axis: ``pp``, ``dp``, ``cp`` or ``tp``; for experts ``ep``, ``etp``, or ``edp``, over which gradients of
                experts are
                summed. The members are those of Megatron-Core's groups of the same sizes.

        Raises:
            ConfigError: The axis does not exist.
            OutlastError: There are no process groups now.
        """
        if axis in AXES:
            return self.mesh.get_group(axis)
        if axis in EXPERT_AXES:
            return self.expert_mesh.get_group(axis)
        raise ConfigError(f"there is no axis {axis!r}; the axes are {', '.join((*AXES, *EXPERT_AXES[1:]))}")

    def section(self, name: str) -> SectionTimer:
        """Return a section's context manager, for ``with self.section("step"):``; its timeout is monitored.

        A section that exceeds ``FaultToleranceConfig.rank_section_timeouts`` is a hang. The context manager is valid in
        its incarnation only: create it in each call.
        """
        return self._hosted.monitor.section(name)

    def heartbeat(self) -> None:
        """Send a heartbeat, for ``FaultToleranceConfig.rank_heartbeat_timeout``."""
        self._hosted.monitor.heartbeat()

    def update(self, iteration: int) -> AbstractContextManager[None]:
        """Return the context in which the state changes from ``iteration - 1`` to ``iteration``.

        After an exception within the context the state is unusable and is loaded again.

        Raises:
            OutlastError: The state is not at ``iteration - 1``.
        """
        return self._hosted.tracker.update(iteration)

    def save(self, iteration: int, *, now: bool = False) -> SaveHandle | None:
        """Save the state if that is due after ``iteration`` (``CheckpointConfig.save_interval`` and the like).

        Args:
            iteration: Number of optimizer steps of the state.
            now: Save to all tiers, whether due or not.

        Returns:
            The save, which continues in the background; ``None`` = not due, or nothing is saved.

        Raises:
            OutlastError: The state is not at ``iteration``.
            CheckpointError: Saving failed too often in a row.

        Collective: all ranks, at the same iteration.
        Blocks: while the state is copied.
        """
        shell = self._hosted
        with shell.monitor.section("checkpointing"):
            return shell.tracker.save(self.state(), iteration, now=now)

    def _save_now(self, timeout_s: float) -> str:
        """Save the state to all tiers and wait for the commit; return why it failed, or an empty string.

        Collective: all ranks. Blocks: up to ``timeout_s``.
        """
        try:
            if (handle := self.save(self.iteration, now=True)) is not None:
                with self.section("checkpointing"):
                    handle.wait(timeout_s)
        except (CheckpointError, DeadlineExceeded) as error:
            return str(error)
        return ""

    @property
    def _hosted(self) -> Shell:
        if self._shell is None:
            raise OutlastError(
                f"{type(self).__name__} has no place in a group yet: use this in setup() and calls, not in __init__()"
            )
        return self._shell


class Shell:
    """Hosts a user's actor through incarnations.

    An actor that is not a :class:`TrainActor` starts over at each recovery: only its calls are counted.
    """

    def __init__(
        self,
        actor_class: type,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: ShellSettings,
    ) -> None:
        _import_ahead(settings)
        self._settings, self._make = settings, partial(actor_class, *args, **kwargs)
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._node = _node_name(self._node_id)
        self._addr = str(ray.util.get_node_ip_address())
        self._fault_tolerance = settings.fault_tolerance or FaultToleranceConfig()
        self._timeouts = Timeouts.from_config(self._fault_tolerance)
        self._interruption = AsyncInterruption()
        self._actor = self._make()
        self._is_set_up = self._is_half_set_up = False
        self.tracker = StateTracker(settings.checkpoint, self._interruption)
        self.place: MeshRank | None = None
        """The actor's place in the mesh; ``None`` = none yet."""
        self.mesh: DeviceMesh | None = None
        """All ranks by axis; ``None`` = no process groups now."""
        self.expert_mesh: DeviceMesh | None = None
        """All ranks by expert axis; ``None`` = no process groups now, or no experts."""
        self._noting = connections.Noting()
        self._excepthook = sys.excepthook
        self._store: TCPStore | None = None
        self._has_groups = False
        self._board: Board | None = None
        self._monitor: PlacedRankMonitor | None = None
        self._looking = threading.Lock()
        self._journal: Journal | None = None
        self._stores: deque[TCPStore] = deque(maxlen=_NUM_STORES)
        self._incarnation = self._joined = -1
        self._is_in_call = False
        self._leaving = threading.Lock()
        gc.collect()
        gc.freeze()  # long-lived objects need no scan at each teardown of process groups

    # -- control: responds at any time -------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def identity(self) -> ActorIdentity:
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorIdentity(node_id=self._node_id, node=self._node, pid=os.getpid(), device=",".join(gpus))

    @ray.method(concurrency_group="control")
    def status(self) -> ActorStatus:
        """Return the actor's iteration, sections and exceeded timeouts. Blocks: never."""
        sections: tuple[tuple[str, float], ...] = ()
        exceeded: tuple[str, ...] = ()
        due_in_s = None
        is_idle = not self._is_in_call and self._joined == self._incarnation  # no timeout runs
        if not is_idle and (state := self._look()) is not None:
            now_ns = clock.now_ns()
            sections = tuple((one.name, max(0.0, (now_ns - one.start_ns) / 1e9)) for one in state.sections)
            exceeded = tuple(one.describe(self._node) for one in expired(state, self._timeouts, now_ns))
            if ends := deadlines(state, self._timeouts):
                due_in_s = (ends[0] - now_ns) / 1e9
        return ActorStatus(iteration=self.tracker.iteration, sections=sections, exceeded=exceeded, due_in_s=due_in_s)

    @ray.method(concurrency_group="control")
    def examine(self) -> Position | None:
        """Return the position of the user's code; ``None`` = not in a group. Blocks: up to a tenth of a second."""
        if (state := self._look()) is None:
            return None
        thread, now_ns = self._interruption.thread, clock.now_ns()
        stack, books = _stack_of(thread), read_books(thread)
        waits, collective = waits_in(stack, books)
        return Position(
            node=self._node_id,
            global_rank=state.global_rank,
            pid=state.pid,
            iteration=state.iteration,
            sections=tuple(section.name for section in state.sections),
            num_entries=state.num_entries_in_iteration,
            collectives=sum(books.groups.values()) if books.groups else -1,
            groups=books.groups,
            waiting_in=collective,
            process_state=Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[0],
            stack_line=stack.line,
            waits_in_collective=waits,
            expired=bool(expired(state, self._timeouts, now_ns)),
            attached=state.attached,
            finished=state.finished,
        )

    @ray.method(concurrency_group="control")
    def host_store(self) -> tuple[str, int]:
        """Host the TCPStore of the next incarnation; return its address and port.

        Raises: RendezvousError (no port is available).
        """
        store = host(Endpoint(self._addr, 0), timeout_s=_STORE_TIMEOUT_S)
        if store is None:
            raise RendezvousError(f"no port of {self._addr} can be listened on; are all in use?")
        self._stores.append(store)
        return self._addr, int(store.port)

    @ray.method(concurrency_group="control")
    def abort(self, incarnation: int, timeout_s: float) -> Aborted:
        """Leave all incarnations up to this one; waits for peers fail. Idempotent.

        Blocks: some 10 ms; up to ``timeout_s``, and some seconds more if a collective does not end.
        """
        begin_ns = clock.now_ns()
        self._interruption.order(incarnation)
        with self._leaving:
            waited_for = self._leave_code(begin_ns, timeout_s)
            if not waited_for and self._incarnation <= incarnation:
                try:
                    self._leave()
                except OutlastError as error:
                    waited_for = str(error)
        return Aborted(call_ended=not waited_for, iteration=self.tracker.iteration, waited_for=waited_for)

    # -- the working thread ------------------------------------------------------------------------------------

    def join(self, assignment: ActorAssignment) -> Joined | CallFailed:
        if assignment.incarnation <= self._incarnation:
            return self._refused(f"incarnation {assignment.incarnation} is not newer than {self._incarnation}")
        if self._interruption.is_left(assignment.incarnation):
            return self._refused(f"incarnation {assignment.incarnation} was given up")
        try:
            with self._leaving:
                self._leave()  # no effect unless the driver did not abort the previous one
        except OutlastError as error:
            return self._failed(CallOutcome(error=error))
        self._incarnation = assignment.incarnation
        outcome = self._interruption.run(assignment.incarnation, partial(self._join, assignment))
        if outcome.error is not None:
            return self._failed(outcome)
        self._joined = assignment.incarnation
        joined: Joined = outcome.value
        return joined

    def call(self, call: Call, parcel: tuple[tuple[Any, ...], Mapping[str, Any]]) -> CallReturned | CallFailed:
        if call.incarnation != self._joined or self._interruption.is_left(call.incarnation):
            return self._refused(f"call of incarnation {call.incarnation}, this actor is in {self._joined}")
        try:
            outcome = self._interruption.run(call.incarnation, partial(self._call, call.method, *parcel))
        finally:
            self._is_in_call = False
        if outcome.error is not None:
            return self._failed(outcome)
        return CallReturned(iteration=self.tracker.iteration, value=outcome.value if call.wants_result else None)

    # -- used by the hosted actor ------------------------------------------------------------------------------

    @property
    def monitor(self) -> PlacedRankMonitor:
        """Receives heartbeats and sections; a new object in each incarnation."""
        assert self._monitor is not None
        return self._monitor

    @property
    def device(self) -> torch.device:
        import torch

        return device.training_device() if self._settings.use_gpu else torch.device("cpu")

    # -- joining an incarnation --------------------------------------------------------------------------------

    def _join(self, assignment: ActorAssignment) -> Joined:
        """Join an incarnation: process groups, set-up, state.

        Raises: OutlastError (joining failed; or any exception of the user's methods). Collective: all ranks of the
        incarnation. Blocks: until all ranks have joined and loaded.
        """
        difference = describe_difference(assignment.version, whose="the driver", own="this actor")
        if difference is not None:
            raise ConfigError(difference)
        phases: dict[str, float] = {}
        place = assignment.mesh.place(assignment.rank)
        env = self._describe(assignment)
        with timed(phases, "groups"), self._interruption.update():
            self._monitor = monitor = PlacedRankMonitor(env)
            self._journal = journal = Journal(
                env.run_dir, run_id=env.run_id, job=env.job, node=env.node, proc=f"actor-{os.getpid()}"
            )
            journal.cycle = env.cycle
            self._form_groups(assignment)
        with timed(phases, "setup"), monitor.section("setup"):
            if self._is_half_set_up or (self._is_set_up and place != self.place):
                self._start_over()
            self.place = place
            if not self._is_set_up:
                self._set_up()
        with timed(phases, "load"), monitor.section("setup"):
            begin = self._take_state(env, journal, assignment.has)
        with timed(phases, "setup"), monitor.section("setup"):
            self._call_if_there("regroup")
        monitor.set_iteration(self.tracker.count)
        return Joined(
            iteration=self.tracker.iteration,
            checkpoint=begin.checkpoint,
            loaded=begin.origin not in ("kept", "new"),
            origin=begin.origin,
            phases=phases,
        )

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
        """Form the process groups.

        Raises: RendezvousError (the ranks could not connect). Collective: all ranks of the incarnation. Blocks: up to
        ``assignment.timeout_s``, until all ranks have joined, or the incarnation is aborted.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.device_mesh import init_device_mesh

        self._has_groups = True
        self._noting.start()
        timeout = timedelta(seconds=assignment.timeout_s)
        if self._settings.use_gpu:
            device_collectives.settle_collectives()
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
            mesh = init_device_mesh(self.device.type, assignment.mesh.sizes, mesh_dim_names=AXES)
            if assignment.mesh.has_experts:
                sizes = assignment.mesh.expert_sizes
                self.expert_mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=EXPERT_AXES)
            self.mesh = mesh
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
        is_ours = isinstance(self._actor, TrainActor)
        if is_ours:
            self._actor._shell = self
        self._is_half_set_up = True
        self._call_if_there("setup")
        self._is_set_up, self._is_half_set_up = True, False
        self.tracker.start_over(has_state=not is_ours or bool(self._actor.state()))

    def _call_if_there(self, name: str) -> None:
        if callable(function := getattr(self._actor, name, None)):
            function()

    def _start_over(self) -> None:
        """Replace the trained object, which is unusable now, by a new one."""
        self._actor = self._make()
        self._is_set_up = self._is_half_set_up = False

    def _take_state(self, env: WorkerEnv, journal: Journal, has: int | None) -> StartingState:
        """Load or keep the state that all ranks continue from."""
        state = self._actor.state() if isinstance(self._actor, TrainActor) else {}
        if not self.tracker.has_state:
            return StartingState(origin="new" if self.tracker.is_new else "kept")
        with self._interruption.update():
            self.tracker.open(env, journal)
            take = getattr(self._actor, "take_state", None)  # a plain class has none and never loads
            begin = self.tracker.restore(state, has, take)
        if begin.origin == "new" and not begin.is_as_set_up:
            self._start_over()
            self._set_up()
        return begin

    # -- in an incarnation, and leaving it ---------------------------------------------------------------------

    def _call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # Timeouts outside sections and between heartbeats restart here: they do not run between two calls. The time to
        # the first heartbeat counts from the start of the incarnation.
        with self.monitor.section("call"):
            pass
        if self.monitor.board_state.last_heartbeat_ns:
            self.monitor.heartbeat()
        self._is_in_call = True
        function = getattr(self._actor, method)
        with nullcontext() if isinstance(self._actor, TrainActor) else self.tracker.whole_call():
            value = function(*args, **kwargs)
        self.monitor.set_iteration(self.tracker.count)
        return value

    def _look(self) -> RankState | None:
        """Return this rank's page of the heartbeat memory; ``None`` = in no incarnation. Thread: any."""
        with self._looking:
            return self._monitor.board_state if self._monitor is not None else None

    def _leave_code(self, begin_ns: int, timeout_s: float) -> str:
        """Interrupt the working thread's aborted call; return where the thread still is, or an empty string."""
        interruption = self._interruption
        if interruption.is_wanted:
            interruption.poke()  # before connections end: a partial result must not pass for a message
            device_collectives.abort_collectives()
        while interruption.is_wanted:
            passed_s = (clock.now_ns() - begin_ns) / 1e9
            if passed_s > timeout_s:
                where = _stack_of(interruption.thread).line or "no line of Python"
                return f"the working thread is at {where}"
            connections.cut_all(both_ways=passed_s > _BOTH_WAYS_S)
            if interruption.wait_outside(_LOOK_S):
                break
            if passed_s > _SAVES_S:
                self.tracker.give_up()
            connections.end_lost_waits()
            interruption.poke()
        return ""

    def _leave(self) -> None:
        """End the incarnation. Idempotent.

        Raises: OutlastError (a collective does not end; this process must not continue). Blocks: some 10 ms; up to 20 s
        if a collective does not end or a TCPStore does not respond. Thread: any, once the working thread has left the
        call.
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
            self.mesh = self.expert_mesh = self._store = None
            end_groups()
            self._noting.stop()
            sys.excepthook = self._excepthook  # torch wraps it again for every default group
            self._has_groups = False

    def _failed(self, outcome: CallOutcome) -> CallFailed:
        error = outcome.error
        assert error is not None
        kind = _kind_of(error)
        pickled = None
        if kind == FailureKind.RAISED:
            try:
                pickled = ray.cloudpickle.dumps(error)
            except Exception:  # noqa: BLE001 - pickling a user's exception may raise anything
                log.info("%s cannot be pickled; only its text is passed on", type(error).__name__)
        failed = CallFailed(
            kind=kind,
            summary=describe(error),
            traceback="".join(traceback.format_exception(error)),
            iteration=self.tracker.iteration,
            error=pickled,
        )
        if self._monitor is not None:
            self._monitor.end_all_sections()  # sections left open by the exception
        outcome.error = None
        drop(error)  # its frames reference process groups and tensors
        return failed

    def _refused(self, why: str) -> CallFailed:
        return CallFailed(kind=FailureKind.REFUSED, summary=why, iteration=self.tracker.iteration)


def create_shell(
    actor_class: type,
    args: Any,
    kwargs: Any,
    settings: ShellSettings,
    runtime_env: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Any:
    """Start a Ray actor with a :class:`Shell` around a user's class; return its handle. Blocks: never."""
    shell = ray.remote(concurrency_groups={"control": _NUM_CONTROL_THREADS})(Shell)
    all_options = {"max_restarts": 0, "max_task_retries": 0, **options}
    if runtime_env:
        all_options["runtime_env"] = dict(runtime_env)
    return shell.options(**all_options).remote(actor_class, args, kwargs, settings)


def _stack_of(thread: int) -> Stack:
    """Return the Python stack of a thread of this process; empty if it runs no Python code. Blocks: never."""
    frame = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return Stack(tuple(frames))


def _kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, Abandoned):
        return FailureKind.ABORTED
    is_timeout = isinstance(error, RuntimeError) and "gloo" in str(error) and "Timed out" in str(error)
    if is_timeout or isinstance(error, RendezvousError) or is_consequence(error):
        return FailureKind.PEER
    return FailureKind.RAISED


def _import_ahead(settings: ShellSettings) -> None:
    """Import the modules of the first incarnation, the longest part of a start, so that spares have them loaded."""
    import torch._dynamo  # imported by the first optimizer
    import torch.distributed.device_mesh  # noqa: F401

    if settings.checkpoint is not None:
        import outlast.checkpoint.manager  # noqa: F401


def _node_name(node_id: str) -> str:
    """Return a Ray node's name: the host name, with part of the node id if several nodes share the host."""
    name = env.hostname()
    machines = {node["NodeID"]: str(node.get("NodeManagerHostname", "")).split(".")[0] for node in ray.nodes()}
    is_shared = sum(machine == machines.get(node_id) for machine in machines.values()) > 1
    return f"{name}-{node_id[:8]}" if is_shared else name
