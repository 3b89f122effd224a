"""The thread that owns a group's actors: carries out one call after the other, and recovers in between."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray

from outlast import clock
from outlast.config import RecoveryConfig
from outlast.errors import ActorFailed, DeadlineExceeded, OutlastError, RolledBack
from outlast.policy.actor_recovery import Budget, ends_call
from outlast.ray.answers import describe_error
from outlast.ray.chronicle import Chronicle
from outlast.ray.dispatch import Dispatch
from outlast.ray.mesh import Mesh
from outlast.ray.node_keeper import NodeKeepers
from outlast.ray.pool import Pool
from outlast.ray.recovery import Crew, Recovery, cause_of
from outlast.ray.report import LossKind, RecoveryReport
from outlast.ray.watch import Gathered, Watch
from outlast.ray.words import Call, FailureKind

__all__ = ["Conductor", "Order"]

log = logging.getLogger(__name__)
_POLL_S = 0.2
_CLOSE_MARGIN_S = 5.0


class _ClosingError(Exception):
    """The group is being closed; leave whatever is going on."""


@dataclass(slots=True, kw_only=True)
class Order:
    """One call of a method of all actors."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dispatch: Dispatch
    takes_weights: bool
    future: Future[Any] = field(default_factory=Future)


class Conductor:
    """Run the calls of one group.

    Args:
        mesh: What is to be filled.
        config: Limits.
        make_pool: Makes the pool; called once, in the thread, with what to call while it waits.
        keepers: Has a checkpoint writer on each node; ``None``: there is no place where generations are saved.
        chronicle: Writes down what happened.

    Thread: the pool, the recovery and the watch belong to the thread that :meth:`start` begins. ``crew``, ``spares``
    and ``recoveries`` are replaced as a whole and may be read by any thread; ``submit`` and ``close`` are for any
    thread.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: RecoveryConfig,
        make_pool: Callable[[Callable[[], None]], Pool],
        *,
        keepers: NodeKeepers | None,
        chronicle: Chronicle,
    ) -> None:
        self._mesh, self._config, self._make_pool, self._keepers = mesh, config, make_pool, keepers
        self._chronicle = chronicle
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._broken: OutlastError | None = None
        self._budget = Budget(config.max_recoveries)
        self._num_calls = 0
        self._polled_s = 0.0
        self._kept_nodes: set[str] = set()
        self._pool: Pool
        self._recovery: Recovery
        self._watch = Watch(config, self._idle)
        self._thread = threading.Thread(target=self._run, name="outlast-actor-group", daemon=True)
        self.formed: Future[Crew] = Future()
        """Is given the first crew."""
        self.crew: Crew | None = None
        """Who works now; ``None`` before the first formation."""
        self.iteration: int | None = None
        """Iteration at which the actors' state is; ``None``: they keep none, or there are none yet."""
        self.spares: tuple[int, ...] = ()
        """Process ids of those that wait."""
        self.recoveries: tuple[RecoveryReport, ...] = ()

    def start(self) -> None:
        """Begin to start actors and to form the group."""
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Have a call carried out after those that were submitted before.

        Raises:
            OutlastError: The group is closed.
        """
        with self._lock:
            if self._closing.is_set():
                raise OutlastError("the group of actors is closed; make a new one")
            self._orders.put(order)

    def close(self) -> None:
        """End the thread, all actors, and whatever was reserved for them. Idempotent.

        Raises:
            DeadlineExceeded: The thread is stuck; Ray ends the actors with the driver.

        Blocks: up to ``abort_timeout`` + ``close_timeout`` and a few seconds.
        """
        with self._lock:
            self._closing.set()
            self._orders.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            limit_s = self._config.abort_timeout + self._config.close_timeout + _CLOSE_MARGIN_S
            self._thread.join(limit_s)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"the group of actors did not close within {limit_s:g} s; Ray ends its actors with this process"
                )

    def _run(self) -> None:
        try:
            if self._form():
                while (order := self._next_order()) is not None:
                    self._carry_out(order)
        except Exception:
            log.exception("the group of actors cannot continue (was Ray shut down before it was closed?)")
        finally:
            self._end()

    def _form(self) -> bool:
        """Make the first crew; return whether that went well."""
        try:
            self._pool = self._make_pool(self._check_open)
            self._recovery = Recovery(self._config, self._pool, self._watch, self._idle, keepers=self._keepers)
            self._pool.require(self._mesh.size, self._config.start_timeout, self._idle)
            self._take_over(self._recovery.form(self._mesh))
        except _ClosingError:
            self.formed.set_exception(OutlastError("the group of actors was closed while it was formed"))
            return False
        except Exception as error:  # noqa: BLE001 - belongs to whoever makes the group
            self.formed.set_exception(error)
            return False
        assert self.crew is not None
        self.formed.set_result(self.crew)
        return True

    def _next_order(self) -> Order | None:
        while not self._closing.is_set():
            try:
                return self._orders.get(timeout=_POLL_S)
            except queue.Empty:
                self._poll()
        return None

    def _carry_out(self, order: Order) -> None:
        if not order.future.set_running_or_notify_cancel():
            return
        try:
            if self._broken is not None:
                raise self._broken
            order.future.set_result(self._play(order))
        except (RolledBack, ActorFailed) as error:
            order.future.set_exception(error)
            self._give_up_orders(error)  # made by somebody who did not know it yet
        except _ClosingError:
            order.future.set_exception(OutlastError(f"the group of actors was closed during {order.method!r}"))
        except Exception as error:  # noqa: BLE001 - belongs to whoever made the call
            order.future.set_exception(error)

    def _play(self, order: Order) -> Any:
        """Make a call, and make it again after a recovery that brought back the state that it began from."""
        num_own_failures = 0
        while True:
            crew, begun_at = self.crew, self.iteration
            assert crew is not None
            gathered = self._call(crew, order)
            if gathered.is_whole:
                self._note_end(crew, gathered)
                results = {rank: one.value for rank, one in gathered.values.items()}
                wanted = {rank: value for rank, value in results.items() if _wants(order, crew, rank)}
                return order.dispatch.collect(crew.mesh, wanted)
            report = self._recover(crew, gathered, order.method, begun_at)
            if gathered.failed and all(one.kind == LossKind.RAISED for one in report.lost):
                num_own_failures += 1  # nobody else is to blame
            if num_own_failures > 1:
                raise _failed_again(order.method, gathered, report) from cause_of(gathered)
            if ends_call(begun_at, [report.iteration]):
                raise RolledBack(
                    f"{order.method!r} began at iteration {begun_at} and was interrupted; the newest generation that "
                    f"everybody could go on from is {report.iteration}: go on with the data from there",
                    iteration=report.iteration,
                )

    def _call(self, crew: Crew, order: Order) -> Gathered:
        parcels = order.dispatch.split(crew.mesh, order.args, order.kwargs, takes_weights=order.takes_weights)
        stored = {id(parcel): ray.put(parcel) for parcel in {id(parcel): parcel for parcel in parcels}.values()}
        self._num_calls += 1
        refs = {}
        for rank, actor in crew.members.items():
            call = Call(
                id=self._num_calls,
                incarnation=crew.incarnation,
                method=order.method,
                wants_result=_wants(order, crew, rank),
            )
            parcel = parcels[order.dispatch.parcel_of(crew.mesh.place(rank))]
            refs[rank] = actor.handle.call.remote(call, stored[id(parcel)])
        return self._watch.gather(crew.members, refs)

    def _note_end(self, crew: Crew, gathered: Gathered) -> None:
        iterations = {one.iteration for one in gathered.values.values()}
        if len(iterations) > 1:
            log.warning(
                "actors are at different iterations after a call: %s; `update` must be entered by all", iterations
            )
        known = [one for one in iterations if one is not None]
        self.iteration = min(known) if known else None
        self._budget.note_end(self.iteration)

    def _recover(self, crew: Crew, gathered: Gathered, method: str, begun_at: int | None) -> RecoveryReport:
        try:
            if (exhausted := self._budget.spend()) is not None:
                raise ActorFailed(
                    f"{_describe(gathered)}; not recovered: {exhausted.reason}", iteration=begun_at
                ) from cause_of(gathered)
            crew, report = self._recovery.recover(crew, gathered, method=method, begun_at=begun_at)
        except OutlastError as error:
            self._broken = error
            raise
        self._take_over(crew)
        self.recoveries = (*self.recoveries, report)
        self._chronicle.note(report)
        return report

    def _take_over(self, crew: Crew) -> None:
        self.crew, self.iteration = crew, crew.iteration
        self.spares = tuple(spare.pid for spare in self._pool.spares)

    def _idle(self) -> None:
        """Do what is due while something else is waited for."""
        self._check_open()
        if clock.now_s() - self._polled_s >= _POLL_S:
            self._poll()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise _ClosingError

    def _poll(self) -> None:
        self._polled_s = clock.now_s()
        self._pool.poll()
        self.spares = tuple(spare.pid for spare in self._pool.spares)
        self._keep_nodes()
        for node in self._keepers.look() if self._keepers is not None else ():
            self._chronicle.note_keeper(node)

    def _keep_nodes(self) -> None:
        """Have a writer start where a spare waits, so that nobody waits for it once the spare takes a seat."""
        if self._keepers is None:
            return
        if new := {spare.node for spare in self._pool.spares} - self._kept_nodes:
            self._keepers.ensure(new, 0.0)
            self._kept_nodes |= new  # for good: who is taken from the spares is in no crew before all have joined

    def _end(self) -> None:
        with self._lock:
            self._closing.set()
        try:
            if self._keepers is not None:
                self._keepers.close()
            if hasattr(self, "_pool"):
                self._pool.close(self._config.close_timeout)
        except Exception:
            log.exception("the actors of a group could not all be ended; Ray ends them with this process")
        self.spares = ()
        self._give_up_orders(OutlastError("the group of actors was closed before the call began"))
        self._chronicle.close()

    def _give_up_orders(self, error: OutlastError) -> None:
        """Have the calls that have not begun end with an error."""
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if order is not None and order.future.set_running_or_notify_cancel():
                    order.future.set_exception(error)


def _wants(order: Order, crew: Crew, rank: int) -> bool:
    return order.dispatch.wants_result(crew.mesh.place(rank))


def _describe(gathered: Gathered) -> str:
    lost = [f"rank {rank} {one.kind}: {one.evidence}" for rank, one in gathered.lost.items()]
    ranks: dict[str, list[int]] = {}
    for rank, one in gathered.failed.items():
        ranks.setdefault(one.summary, []).append(rank)
    failed = [f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} failed: {why}" for why, who in ranks.items()]
    return "; ".join(lost + failed) or "answers were lost"


def _failed_again(method: str, gathered: Gathered, report: RecoveryReport) -> ActorFailed:
    cause = cause_of(gathered)
    why = describe_error(cause) if cause is not None else _describe(gathered)
    return ActorFailed(
        f"{method!r} failed again after it was repeated ({why}); the group stands at iteration {report.iteration} and "
        "can be used: correct the method or its data",
        rank=next((rank for rank, one in gathered.failed.items() if one.kind == FailureKind.RAISED), None),
        iteration=report.iteration,
    )
