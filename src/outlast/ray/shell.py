"""The Ray actor around a user's actor: answers the driver at any time, whatever the user's code does.

The user's code runs in the one thread of the default concurrency group; what the driver must be able to ask while that
thread hangs belongs to the group ``control``, with threads of its own.
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
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle

from outlast import clock, env
from outlast.errors import OutlastError, RendezvousError
from outlast.inprocess.call import describe, drop, is_consequence
from outlast.monitor.examination import read_books, waits_in
from outlast.monitor.stacks import Frame, Stack
from outlast.policy.causes import Position
from outlast.policy.deadlines import deadlines, expired
from outlast.ray.protocol import (
    Aborted,
    ActorAssignment,
    ActorIdentity,
    ActorStatus,
    Call,
    CallFailed,
    CallReturned,
    FailureKind,
    Joined,
    ShellSettings,
)
from outlast.ray.train_actor import ActorHost
from outlast.runtime import connections, device
from outlast.runtime.addresses import Endpoint
from outlast.runtime.interruption import Abandoned, AsyncInterruption, CallOutcome
from outlast.runtime.store import TCPStore, host

log = logging.getLogger(__name__)
_NUM_CONTROL_THREADS = 4
_LOOK_S = 0.01
_BOTH_WAYS_S = 0.2
"""Seconds after which connections are shut down both ways, for what does not notice the end of its reading."""
_SAVES_S = 0.1
"""Seconds after which saves are given up that the working thread waits for."""
_STORE_TIMEOUT_S = 60.0
_NUM_STORES = 2
"""The newest and the one before."""


class Shell:
    """Host a user's actor.

    Args:
        actor_class: The user's class: a :class:`TrainActor`, or any other, of whose state nothing is known.
        args: For it.
        kwargs: For it.
        settings: What the group was made with.
    """

    def __init__(
        self,
        actor_class: type,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: ShellSettings,
    ) -> None:
        _import_ahead(settings)
        context = ray.get_runtime_context()
        self._node_id: str = context.get_node_id()
        self._node = _node_name(self._node_id)
        self._addr = str(ray.util.get_node_ip_address())
        self._interruption = AsyncInterruption()
        self._host = ActorHost(partial(actor_class, *args, **kwargs), settings, self._node, self._interruption)
        self._stores: deque[TCPStore] = deque(maxlen=_NUM_STORES)
        self._incarnation = self._joined = -1
        self._call: int | None = None
        self._leaving = threading.Lock()
        gc.collect()
        gc.freeze()  # what lives anyway is not looked through whenever groups are left

    # -- control: answered at any time -------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def identity(self) -> ActorIdentity:
        """Return who this is."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorIdentity(
            node_id=self._node_id,
            node=self._node,
            pid=os.getpid(),
            device=",".join(gpus),
        )

    @ray.method(concurrency_group="control")
    def status(self) -> ActorStatus:
        """Return what this actor is doing. Blocks: never."""
        sections: tuple[tuple[str, float], ...] = ()
        exceeded: tuple[str, ...] = ()
        due_in_s = None
        is_idle = self._call is None and self._joined == self._incarnation  # then nothing has a timeout
        if not is_idle and (state := self._host.look()) is not None:
            now_ns = clock.now_ns()
            sections = tuple((one.name, max(0.0, (now_ns - one.start_ns) / 1e9)) for one in state.sections)
            exceeded = tuple(one.describe(self._node) for one in expired(state, self._host.timeouts, now_ns))
            if ends := deadlines(state, self._host.timeouts):
                due_in_s = (ends[0] - now_ns) / 1e9
        return ActorStatus(
            incarnation=self._incarnation,
            iteration=self._host.tracker.iteration,
            call=self._call,
            sections=sections,
            exceeded=exceeded,
            due_in_s=due_in_s,
        )

    @ray.method(concurrency_group="control")
    def examine(self) -> Position | None:
        """Return where the user's code is; ``None`` = this actor is in no group. Blocks: up to a tenth of a second."""
        if (state := self._host.look()) is None:
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
            expired=bool(expired(state, self._host.timeouts, now_ns)),
            attached=state.attached,
            finished=state.finished,
        )

    @ray.method(concurrency_group="control")
    def host_store(self) -> tuple[str, int]:
        """Host the store over which the next incarnation meets; return its address and port.

        Raises:
            RendezvousError: This machine gives no port.
        """
        store = host(Endpoint(self._addr, 0), timeout_s=_STORE_TIMEOUT_S)
        if store is None:
            raise RendezvousError(f"no port of {self._addr} can be listened on; are all in use?")
        self._stores.append(store)
        return self._addr, int(store.port)

    @ray.method(concurrency_group="control")
    def abort(self, incarnation: int, timeout_s: float) -> Aborted:
        """Leave every incarnation up to this one; what waits for peers fails. Idempotent.

        Args:
            incarnation: The newest that is given up.
            timeout_s: Seconds that the user's code has to come to an end.

        Blocks: some 10 ms; up to ``timeout_s``, and some seconds more when a collective does not end.
        """
        begin_ns = clock.now_ns()
        self._interruption.order(incarnation)
        with self._leaving:
            waited_for = self._leave_code(begin_ns, timeout_s)
            if not waited_for and self._incarnation <= incarnation:
                try:
                    self._host.leave()
                except OutlastError as error:
                    waited_for = str(error)
        return Aborted(
            call_ended=not waited_for,
            iteration=self._host.tracker.iteration,
            waited_for=waited_for,
        )

    # -- the working thread ------------------------------------------------------------------------------------

    def join(self, assignment: ActorAssignment) -> Joined | CallFailed:
        """Take a place in an incarnation."""
        if assignment.incarnation <= self._incarnation:
            return self._refused(f"incarnation {assignment.incarnation} is not newer than {self._incarnation}")
        if self._interruption.is_left(assignment.incarnation):
            return self._refused(f"incarnation {assignment.incarnation} was given up")
        try:
            with self._leaving:
                self._host.leave()  # nothing, unless the driver did not abort the one before
        except OutlastError as error:
            return self._failed(CallOutcome(error=error))
        self._incarnation = assignment.incarnation
        outcome = self._interruption.run(assignment.incarnation, partial(self._host.join, assignment))
        if outcome.error is not None:
            return self._failed(outcome)
        self._joined = assignment.incarnation
        joined: Joined = outcome.value
        return joined

    def call(self, call: Call, parcel: tuple[tuple[Any, ...], Mapping[str, Any]]) -> CallReturned | CallFailed:
        """Call a method of the user's.

        Args:
            call: Which, and in which incarnation.
            parcel: Positional and keyword arguments.
        """
        if call.incarnation != self._joined or self._interruption.is_left(call.incarnation):
            return self._refused(f"call of incarnation {call.incarnation}, this actor is in {self._joined}")
        try:
            outcome = self._interruption.run(call.incarnation, partial(self._run_method, call, *parcel))
        finally:
            self._call = None
        if outcome.error is not None:
            return self._failed(outcome)
        return CallReturned(iteration=self._host.tracker.iteration, value=outcome.value if call.wants_result else None)

    def leave(self) -> str:
        """Wait until what was saved is committed, then end the incarnation; return what went wrong, or nothing.

        Blocks: up to ``CheckpointConfig.save_timeout``.
        """
        problem = ""
        if not self._interruption.is_left(self._incarnation):
            outcome = self._interruption.run(self._incarnation, self._host.tracker.wait)
            if outcome.error is not None:
                problem = describe(outcome.error)
        with self._leaving:
            self._host.leave()
        return problem

    # -- details -----------------------------------------------------------------------------------------------

    def _run_method(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._host.begin_call()
        self._call = call.id
        return self._host.call(call.method, args, kwargs)

    def _leave_code(self, begin_ns: int, timeout_s: float) -> str:
        """Have the working thread come out of what is given up; return what does not, or nothing."""
        interruption = self._interruption
        if interruption.is_wanted:
            interruption.poke()  # before anything ends: what a wait brings then is not taken for a peer's message
            device.abort_collectives()
        while interruption.is_wanted:
            passed_s = (clock.now_ns() - begin_ns) / 1e9
            if passed_s > timeout_s:
                where = _stack_of(interruption.thread).line or "no line of Python"
                return f"the working thread is at {where}"
            connections.cut_all(both_ways=passed_s > _BOTH_WAYS_S)
            if interruption.wait_outside(_LOOK_S):
                break
            if passed_s > _SAVES_S:
                self._host.tracker.give_up()
            connections.end_lost_waits()
            interruption.poke()
        return ""

    def _failed(self, outcome: CallOutcome) -> CallFailed:
        error = outcome.error
        assert error is not None
        kind = _kind_of(error)
        pickled = None
        if kind == FailureKind.RAISED:
            try:
                pickled = ray.cloudpickle.dumps(error)
            except Exception:  # noqa: BLE001 - whatever an exception of the user's does when it is pickled
                log.info("%s cannot be pickled; only its text is passed on", type(error).__name__)
        failed = CallFailed(
            kind=kind,
            summary=describe(error),
            traceback="".join(traceback.format_exception(error)),
            iteration=self._host.tracker.iteration,
            error=pickled,
        )
        self._host.end_sections()
        outcome.error = None
        drop(error)  # its frames hold groups and tensors
        return failed

    def _refused(self, why: str) -> CallFailed:
        return CallFailed(kind=FailureKind.REFUSED, summary=why, iteration=self._host.tracker.iteration)


def create_shell(
    actor_class: type,
    args: Any,
    kwargs: Any,
    settings: ShellSettings,
    runtime_env: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Any:
    """Have Ray start an actor, a :class:`Shell` around a user's class; return its handle. Blocks: never.

    Args:
        actor_class: The user's class.
        args: Its positional arguments, or a reference to them.
        kwargs: Its keyword arguments, or a reference to them.
        settings: What the group was made with.
        runtime_env: As Ray takes it; ``None`` = the driver's.
        options: More of Ray's options, such as resources.
    """
    shell = ray.remote(concurrency_groups={"control": _NUM_CONTROL_THREADS})(Shell)
    all_options = {"max_restarts": 0, "max_task_retries": 0, **options}
    if runtime_env:
        all_options["runtime_env"] = dict(runtime_env)
    return shell.options(**all_options).remote(actor_class, args, kwargs, settings)


def _stack_of(thread: int) -> Stack:
    """Return the Python stack of a thread of this process; empty when it runs no Python. Blocks: never."""
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
    """Import what the first incarnation needs: the longest part of a start, which spares have behind them."""
    import torch._dynamo  # every optimizer imports it when it is made
    import torch.distributed.device_mesh  # noqa: F401

    if settings.checkpoint is not None:
        import outlast.checkpoint.manager  # noqa: F401


def _node_name(node_id: str) -> str:
    """Return a name for a node of Ray: its machine's, with part of its id where the machine has several."""
    name = env.hostname()
    machines = {node["NodeID"]: str(node.get("NodeManagerHostname", "")).split(".")[0] for node in ray.nodes()}
    is_shared = sum(machine == machines.get(node_id) for machine in machines.values()) > 1
    return f"{name}-{node_id[:8]}" if is_shared else name
