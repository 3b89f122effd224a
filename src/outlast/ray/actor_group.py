"""A group of training actors that replaces dead and hanging actors and repeats the interrupted call.

One thread owns the actors, carries out the calls in order, and recovers between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import queue
import threading
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from outlast import env, logs
from outlast.config import CheckpointConfig, FaultToleranceConfig, RecoveryConfig
from outlast.errors import ActorFailed, ConfigError, DeadlineExceeded, OutlastError, RolledBack
from outlast.policy.actor_recovery import RecoveryBudget, ends_call
from outlast.ray.dispatch import Dispatch, copy_for_later, find_dispatch, takes_weights
from outlast.ray.keepers import NodeKeepers
from outlast.ray.pool import GroupClosed, Pool, by_deadline, describe_drain
from outlast.ray.protocol import Call, FailureKind, Mesh, ShellSettings
from outlast.ray.recovery import Incarnation, Recovery, RecoveryReport, cause_of, journal_recovery
from outlast.ray.replies import describe_error
from outlast.ray.train_actor import TrainActor, create_shell
from outlast.ray.watch import Gathered, LossKind, Watch, lose
from outlast.runtime.exits import at_exit, forget_at_exit
from outlast.runtime.journal import Journal

log = logging.getLogger(__name__)
_POLL_S = 0.2
_CLOSE_MARGIN_S = 5.0


class Pending:
    """The result of a submitted call.

    Awaitable: ``await pending`` returns the result, or raises the call's exception. Ending the wait (timeout, Ctrl-C,
    cancelling the awaiting task) does not end the call: the group continues it, and later calls begin after it.

    Args:
        method: Name of the called method.
        future: Receives the result.

    Thread: any.
    """

    def __init__(self, method: str, future: Future[Any]) -> None:
        self.method = method
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether the call has ended, with a result or an error."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the call's result.

        Args:
            timeout_s: Seconds to wait; ``None``: no limit.

        Raises:
            DeadlineExceeded: The call has not ended in time; it continues.

        Blocks: until the call has ended, recoveries included.
        """
        try:
            return self._future.result(timeout_s)
        except FutureTimeout as error:
            if self._future.done():
                raise  # raised by the call itself
            raise DeadlineExceeded(
                f"{self.method!r} has not ended within {timeout_s} s; it continues: wait again, or close the group"
            ) from error

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result in an event loop."""
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()


@dataclass(slots=True, kw_only=True)
class _Submitted:
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dispatch: Dispatch
    takes_weights: bool
    future: Future[Any] = field(default_factory=Future)


class GroupStep:
    """One turn of :meth:`ActorGroup.steps`: a context in which a rollback of the group ends the turn, not the loop.

    Args:
        iteration: Number of optimizer steps of the actors' state.
    """

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        """Number of optimizer steps of the actors' state at the start of the turn."""
        self.rolled_back: RolledBack | None = None
        """The rollback that ended the turn early; ``None``: none."""

    def __enter__(self) -> int:
        return self.iteration

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.rolled_back = error if isinstance(error, RolledBack) else None
        return self.rolled_back is not None


class ActorGroup:
    """Actors that train together as the ranks of a mesh, with spares that replace lost actors.

    A dead, stopped or hanging actor is detected, whatever its peers wait for, and only that actor is replaced. The
    others keep their processes, and their state if it is that of the newest checkpoint. Then the interrupted call is
    repeated.

    Args:
        actor_class: A subclass of :class:`~outlast.ray.TrainActor`, or any other class; not a Ray actor.
        mesh: Sizes by axis (``dp``, ``cp``, ``tp``, ``pp``, and ``ep``, ``etp`` for experts).
        args: Positional arguments of the class's constructor.
        kwargs: Keyword arguments of the class's constructor.
        num_spares: Actors that start like the others, and wait. A spare that takes a slot is replaced in the
            background.
        num_cpus: CPUs of each actor.
        num_gpus: GPUs of each actor.
        resources: Custom resources of each actor.
        placement: Placement over nodes: ``PACK``, ``SPREAD``, ``STRICT_PACK``, ``STRICT_SPREAD``, or a placement group
            with
            a bundle for each actor.
        backend: Backend of the process groups; ``None``: NCCL and gloo with GPUs, else gloo.
        checkpoint: Where and how often state is saved; ``None``: not saved, so all start over after a lost actor.
        fault_tolerance: Timeouts of sections and heartbeats; ``None``: a hang is detected only if the actor does not
            respond
            at all. A field that the group does not use is rejected; limits of recoveries are in ``recovery``.
        recovery: Limits of recoveries; ``None``: the defaults.
        run_dir: Directory of the journal; ``None``: no journal.
        runtime_env: Ray's runtime environment for the actors and the checkpoint writers of their nodes.

    Raises:
        ConfigError: A setting is invalid; nothing was started.
        SparesExhausted: The cluster has no resources for so many actors.
        ActorFailed: The class's constructor or ``setup`` raises.

    Blocks: until the first incarnation works.
    Thread: any; calls are carried out one after the other, in the order of submission.
    """

    def __init__(
        self,
        actor_class: type[Any],
        mesh: Mapping[str, int] | Mesh,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        num_spares: int = 0,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: Any = "PACK",
        backend: str | None = None,
        checkpoint: CheckpointConfig | None = None,
        fault_tolerance: FaultToleranceConfig | None = None,
        recovery: RecoveryConfig | None = None,
        run_dir: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if not inspect.isclass(actor_class):
            raise ConfigError(
                f"actor_class={actor_class!r} is not a class; give the plain class, without @ray.remote, which the "
                "group adds itself"
            )
        if checkpoint is not None and not issubclass(actor_class, TrainActor):
            raise ConfigError(
                f"checkpoint is given, but {actor_class.__name__} does not define its state; derive it from "
                "outlast.ray.TrainActor, or leave checkpoint out"
            )
        _check_is_read(fault_tolerance)
        if num_spares < 0:
            raise ConfigError(f"num_spares={num_spares} must not be negative")
        logs.configure("driver", least=logging.WARNING, is_shared=True)
        self._actor_class, self._config = actor_class, recovery or RecoveryConfig()
        self._checkpoint = checkpoint
        # Replaced as a whole by the thread; any thread may read it.
        self._current = Incarnation(number=-1, mesh=Mesh.of(mesh), members={})
        self._recoveries: tuple[RecoveryReport, ...] = ()
        name = f"{actor_class.__name__}-{uuid.uuid4().hex[:8]}"
        settings = ShellSettings(
            group=name,
            backend=backend or ("" if num_gpus else "gloo"),
            use_gpu=num_gpus > 0,
            checkpoint=checkpoint,
            fault_tolerance=fault_tolerance,
            run_dir=run_dir,
        )
        self._journal = Journal(run_dir, run_id=name, job=name, node=env.node_name(), proc="driver")
        stored = ray.put(tuple(args)), ray.put(dict(kwargs or {}))
        self._pool = Pool(
            partial(create_shell, actor_class, *stored, settings, runtime_env),
            self._current.mesh.size + num_spares,
            {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})},
            placement,
            self._config,
            keepers=None if checkpoint is None else NodeKeepers(runtime_env),
            journal=self._journal,
        )
        self._watch = Watch(self._config, self._pool)
        self._recovery = Recovery(self._config, self._pool, self._watch)
        self._budget = RecoveryBudget(self._config.max_recoveries)
        self._known: int | None = None  # the group's iteration as known to the callers
        self._recovered_at: int | None = None  # iteration of the newest recovery
        self._staying: set[str] = set()  # drained nodes that the group does not leave before they end
        self._calls: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._broken: OutlastError | None = None
        self._formed: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="outlast-actor-group", daemon=True)
        at_exit(self._close)
        self._thread.start()
        try:
            self._formed.result()
        except BaseException:
            self.close()
            raise

    def run(self, method: str, *args: Any, dispatch: str | Dispatch = "mesh", **kwargs: Any) -> Any:
        """Call a method on all actors and return the results; lost actors are replaced and the call repeated.

        Args:
            method: Name of the method.
            args: The method's arguments, divided by the dispatch.
            dispatch: How arguments are divided: ``mesh``, ``pass_through``, a registered name, or a dispatch object.
            kwargs: The method's keyword arguments, divided likewise.

        Returns:
            The results combined by the dispatch; with ``mesh`` a list in the order of the data shards.

        Raises:
            ConfigError: The method or dispatch does not exist, or the arguments cannot be divided; nothing was called.
            RolledBack: Actors were lost, and the group is at another iteration than at the start of the call.
            ActorFailed: The method raised again after it was repeated; or too many actors were lost without progress.
            SparesExhausted: No spare can take a lost actor's slot.

        Blocks: until the call has ended, recoveries included. Ctrl-C ends the wait, not the call: the next call begins
        after it, and the group can be closed.
        """
        return self._submit(method, args, kwargs, dispatch).result()

    def submit(self, method: str, *args: Any, dispatch: str | Dispatch = "mesh", **kwargs: Any) -> Pending:
        """Call a method on all actors without waiting; return an awaitable result.

        Arguments and errors are those of :meth:`run`; errors are raised by the result. ``RolledBack`` and
        ``ActorFailed`` also fail the submitted calls that have not begun. Arguments are copied, so that the caller may
        change them afterwards, except object references and actor handles.

        Raises:
            ConfigError: The method or dispatch does not exist, or an argument cannot be pickled; nothing is called.

        Blocks: while the arguments are copied.
        """
        try:
            args, kwargs = copy_for_later((args, kwargs))
        except Exception as error:  # pickling the arguments may raise anything
            raise ConfigError(f"an argument of {method}() cannot be pickled for the actors: {error}") from error
        return self._submit(method, args, kwargs, dispatch)

    def _submit(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], dispatch: str | Dispatch) -> Pending:
        function = getattr(self._actor_class, method, None)
        if method.startswith("_") or not callable(function):
            known = [one for one in dir(self._actor_class) if not one.startswith("_")]
            raise ConfigError(f"{self._actor_class.__name__} has no method {method!r}; it has {', '.join(known)}")
        call = _Submitted(
            method=method,
            args=args,
            kwargs=kwargs,
            dispatch=find_dispatch(dispatch),
            takes_weights=takes_weights(function),
        )
        with self._lock:
            if self._pool.closing.is_set():
                raise OutlastError("the group of actors is closed; make a new one")
            self._calls.put(call)
        return Pending(method, call.future)

    def steps(self, total: int) -> Iterator[GroupStep]:
        """Yield a step at a time until the group has done ``total`` of them, from wherever it stands after a rollback::

            for step in group.steps(total=1000):
                with step as iteration:
                    group.run("train_step", batch(iteration), iteration=iteration + 1)

        A ``RolledBack`` within the ``with`` ends that turn, and the next one begins at the iteration that the group
        went back to; ``step.rolled_back`` has it. All other errors pass through.

        Args:
            total: Number of optimizer steps at which training is complete.

        Yields:
            The step, to be entered with ``with``.

        Raises:
            ConfigError: The actors keep no state, so that there is no iteration to count.
            OutlastError: A turn ended without a rollback, and the group is at the same iteration.
        """
        while True:
            before = self.iteration
            if before is None:
                raise ConfigError(
                    "steps() counts the actors' iteration, and they keep no state: derive the class from TrainActor, "
                    "return it from state(), and change it within update(iteration)"
                )
            if before >= total:
                return
            step = GroupStep(before)
            yield step
            if step.rolled_back is None and self.iteration == before:
                raise OutlastError(
                    f"the group is still at iteration {before} after a turn of steps(); have the turn call a method "
                    "that changes the state within update(iteration)"
                )

    @property
    def iteration(self) -> int | None:
        """Number of optimizer steps of the actors' state; ``None``: they keep no state."""
        return self._current.iteration

    @property
    def mesh(self) -> Mesh:
        """The current mesh; smaller than the initial one if the group had to shrink."""
        return self._current.mesh

    @property
    def pids(self) -> dict[int, int]:
        """Rank to process id."""
        return {rank: actor.pid for rank, actor in sorted(self._current.members.items())}

    @property
    def nodes(self) -> dict[int, str]:
        """Rank to Ray's node id."""
        return {rank: actor.node for rank, actor in sorted(self._current.members.items())}

    @property
    def spares(self) -> tuple[int, ...]:
        """Process ids of the actors that wait for a slot."""
        return tuple(spare.pid for spare in self._pool.spares)

    @property
    def recoveries(self) -> list[RecoveryReport]:
        """All recoveries, oldest first."""
        return list(self._recoveries)

    def close(self) -> None:
        """End all actors and release their resources. Idempotent. Calls that have not ended fail.

        Raises:
            DeadlineExceeded: The group did not close in time; Ray ends it with this process.

        Blocks: usually some milliseconds; up to 5 seconds while a stopped actor is killed.
        """
        try:
            self._close()
        finally:
            forget_at_exit(self._close)

    def __enter__(self) -> ActorGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _close(self) -> None:
        with self._lock:
            self._pool.closing.set()
            self._calls.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            limit_s = self._config.abort_timeout + self._config.close_timeout + _CLOSE_MARGIN_S
            self._thread.join(limit_s)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"the group of actors did not close within {limit_s:g} s; Ray ends its actors with this process"
                )

    # -- the thread that owns the actors -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._form():
                while (call := self._next_call()) is not None:
                    self._carry_out(call)
        except Exception:
            log.exception("the group of actors cannot continue (was Ray shut down before it was closed?)")
        finally:
            self._end()

    def _form(self) -> bool:
        """Form the first incarnation; return whether that succeeded."""
        try:
            self._pool.open()
            self._pool.require(self._current.mesh.size)
            self._current = self._recovery.form(self._current.mesh)
        except GroupClosed:
            self._formed.set_exception(OutlastError("the group of actors was closed while it was formed"))
            return False
        except Exception as error:  # noqa: BLE001 - raised by the constructor
            self._formed.set_exception(error)
            return False
        self._known = self._current.iteration
        self._formed.set_result(None)
        return True

    def _next_call(self) -> _Submitted | None:
        while not self._pool.closing.is_set():
            try:
                return self._calls.get(timeout=_POLL_S)
            except queue.Empty:
                self._pool.poll()
                if self._broken is None:
                    with contextlib.suppress(OutlastError, GroupClosed):  # raised by the next call
                        self._leave_drained_nodes()
        return None

    def _carry_out(self, call: _Submitted) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            if self._broken is not None:
                raise self._broken
            call.future.set_result(self._call(call))
        except (RolledBack, ActorFailed) as error:
            call.future.set_exception(error)
            self._fail_waiting(error)  # their callers do not know about it yet
        except GroupClosed:
            call.future.set_exception(OutlastError(f"the group of actors was closed during {call.method!r}"))
        except Exception as error:  # noqa: BLE001 - raised to the caller
            call.future.set_exception(error)

    def _call(self, call: _Submitted) -> Any:
        """Make a call, and repeat it after a recovery to the same iteration."""
        num_own_failures = 0
        self._leave_drained_nodes()
        if ends_call(self._known, [self._current.iteration]):
            known, self._known = self._known, self._current.iteration
            raise RolledBack(
                f"{call.method!r} was not started: when actors left a drained node, the newest checkpoint that all "
                f"could load was {self._known}, not {known}; continue with the data from there",
                iteration=self._known,
            )
        wants = call.dispatch.wants_result
        while True:
            current, begun_at = self._current, self._current.iteration
            gathered = self._call_once(current, call)
            if gathered.is_whole:
                self._note_end(gathered)
                results = {rank: one.value for rank, one in gathered.values.items() if wants(current.mesh.place(rank))}
                return call.dispatch.collect(current.mesh, results)
            report = self._recover(gathered, call.method)
            self._known = report.iteration
            if gathered.failed and all(one.kind == LossKind.RAISED for one in report.lost):
                num_own_failures += 1  # no other actor failed
            if num_own_failures > 1:
                cause = cause_of(gathered)
                why = describe_error(cause) if cause is not None else _describe(gathered)
                raise ActorFailed(
                    f"{call.method!r} failed again after it was repeated ({why}); the group is at iteration "
                    f"{report.iteration} and can be used: correct the method or its data",
                    rank=next((rank for rank, one in gathered.failed.items() if one.kind == FailureKind.RAISED), None),
                    iteration=report.iteration,
                ) from cause
            if ends_call(begun_at, [report.iteration]):
                raise RolledBack(
                    f"{call.method!r} began at iteration {begun_at} and was interrupted; the newest checkpoint that "
                    f"all actors can load is {report.iteration}; continue with the data from there",
                    iteration=report.iteration,
                )

    def _call_once(self, current: Incarnation, call: _Submitted) -> Gathered:
        parcels = call.dispatch.split(current.mesh, call.args, call.kwargs, takes_weights=call.takes_weights)
        stored = {id(parcel): ray.put(parcel) for parcel in {id(parcel): parcel for parcel in parcels}.values()}
        refs = {}
        for rank, actor in current.members.items():
            place = current.mesh.place(rank)
            wants_result = call.dispatch.wants_result(place)
            message = Call(incarnation=current.number, method=call.method, wants_result=wants_result)
            parcel = parcels[call.dispatch.parcel_of(place)]
            refs[rank] = actor.handle.call.remote(message, stored[id(parcel)])
        return self._watch.gather(current.members, refs, leaves_nodes=self._can_carry())

    # -- drained nodes -----------------------------------------------------------------------------------------

    def _leave_drained_nodes(self) -> None:
        """Replace the actors of drained nodes by spares elsewhere, one node at a time, keeping the state.

        While there are too few spares elsewhere, or if the state cannot be moved, training continues until the node
        ends.
        """
        for node in by_deadline(self._pool.draining):
            members = self._current.members
            leaving = [rank for rank, actor in members.items() if actor.node == node]
            if not leaving or node in self._staying:
                continue
            if not self._can_carry():
                self._staying.add(node)
                log.warning(
                    "ranks %s stay on a drained node until it is gone: their state cannot be moved; give the "
                    "group a checkpoint.directory, or more nodes and replication",
                    leaving,
                )
                continue
            num, pool = len(leaving), self._pool
            pool.ask_for_spares(num)
            is_near = self._checkpoint is not None and self._checkpoint.directory is None
            if is_near and self._current.iteration == self._recovered_at:
                continue  # copies of the loaded state may be on nodes that were left; those of the next step are not
            if len(pool.usable) < num or len(pool.answering(num, self._config.ping_timeout)) < num:
                continue
            gathered = self._save_now()
            if why := next((one.value for one in gathered.values.values() if one.value), None):
                self._staying.add(node)
                log.warning(
                    "ranks %s stay on a drained node until it is gone: the state is not saved: %s", leaving, why
                )
            if gathered.is_whole:
                if why:
                    continue
                for rank in leaving:
                    text = describe_drain(self._pool.draining.get(node, math.inf))
                    gathered.lost[rank] = lose(rank, members[rank], LossKind.DRAINED, text)
            self._recover(gathered, "")

    def _can_carry(self) -> bool:
        """Return whether another node can load an actor's state."""
        config = self._checkpoint
        if self._current.iteration is None or config is None:
            return self._current.iteration is None
        has_partner = len({actor.node for actor in self._current.members.values()}) > 1
        return config.directory is not None or (config.replication is not False and has_partner)

    def _save_now(self) -> Gathered:
        """Save the state to all tiers; each rank replies with the reason of a failure, or an empty string."""
        current, limit_s = self._current, self._config.join_timeout
        if current.iteration is None:
            return Gathered()
        message = Call(incarnation=current.number, method="_save_now")
        parcel = ray.put(((limit_s,), {}))
        refs = {rank: actor.handle.call.remote(message, parcel) for rank, actor in current.members.items()}
        return self._watch.gather(current.members, refs, timeout_s=limit_s + self._config.ping_timeout)

    def _note_end(self, gathered: Gathered) -> None:
        iterations = {one.iteration for one in gathered.values.values()}
        if len(iterations) > 1:
            log.warning(
                "actors are at different iterations after a call: %s; `update` must be entered by all", iterations
            )
        iteration = min((one for one in iterations if one is not None), default=None)
        self._current, self._known = replace(self._current, iteration=iteration), iteration
        self._budget.note_end(iteration)

    def _recover(self, gathered: Gathered, method: str) -> RecoveryReport:
        try:
            is_fault = any(one.kind != LossKind.DRAINED for one in gathered.lost.values()) or not gathered.lost
            if is_fault and (reason := self._budget.spend()) is not None:
                text = f"{_describe(gathered)}; not recovered: {reason}"
                raise ActorFailed(text, iteration=self._current.iteration) from cause_of(gathered)
            self._current, report = self._recovery.recover(self._current, gathered, method=method)
        except OutlastError as error:
            self._broken = error
            raise
        self._recoveries, self._recovered_at = (*self._recoveries, report), report.iteration
        journal_recovery(report, self._journal)
        return report

    def _end(self) -> None:
        with self._lock:
            self._pool.closing.set()
        try:
            self._pool.close()
        except Exception:
            log.exception("the actors of a group could not all be ended; Ray ends them with this process")
        self._fail_waiting(OutlastError("the group of actors was closed before the call began"))
        self._journal.close()

    def _fail_waiting(self, error: OutlastError) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None and call.future.set_running_or_notify_cancel():
                    call.future.set_exception(error)


def _describe(gathered: Gathered) -> str:
    lost = [f"rank {rank} {one.kind}: {one.evidence}" for rank, one in gathered.lost.items()]
    ranks: dict[str, list[int]] = {}
    for rank, one in gathered.failed.items():
        ranks.setdefault(one.summary, []).append(rank)
    failed = [f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} failed: {why}" for why, who in ranks.items()]
    return "; ".join(lost + failed) or "responses were lost"


_READ = frozenset(
    {
        "enable_ft_package",
        "initial_rank_heartbeat_timeout",
        "rank_heartbeat_timeout",
        "rank_section_timeouts",
        "rank_out_of_section_timeout",
        "num_warmup_iterations",
    }
)
"""Fields of ``FaultToleranceConfig`` that a group of actors uses."""
_INSTEAD = {
    "max_no_progress_cycles": "set recovery.max_recoveries",
    "node_heartbeat_timeout": "set recovery.ping_timeout",
    "min_nodes": "set recovery.allow_shrink",
    "shutdown_grace": "set recovery.close_timeout",
    "calc_ft_timeouts": "name the timeouts in rank_section_timeouts",
}


def _check_is_read(config: FaultToleranceConfig | None) -> None:
    for name in config.given if config is not None else ():
        if name not in _READ:
            instead = _INSTEAD.get(name, "leave it out")
            raise ConfigError(f"fault_tolerance.{name} is not for ActorGroup, where nothing reads it; {instead}")
