"""One rank's part in one call of a wrapper: from the first order to the last.

Beside the function's own end there are three others: the rank is permanently removed and the others resume
(:class:`RankLeft`), all ranks have to stop, or the monitor process is gone.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

from outlast import clock, env, logs
from outlast.config.training import InProcessRestartConfig
from outlast.errors import ConfigError, ExitReason, OutlastError, RestartAbort
from outlast.inprocess import protocol as m
from outlast.inprocess.agent_report import StatusReporter
from outlast.inprocess.call import (
    Background,
    Handle,
    IterationStore,
    RestartRequested,
    current_handle,
    describe,
    drop,
    end_groups,
    handle_parameter,
    is_consequence,
    leave,
    set_current,
)
from outlast.inprocess.failover.bootstrap import Bootstrap, own_address
from outlast.inprocess.monitor_client import Instruction, MonitorLink, MonitorThread
from outlast.inprocess.plugins import Plugins, State, labels_of
from outlast.inprocess.progress import Page, RankPhase
from outlast.inprocess.protocol import MonitorTask
from outlast.monitor import stacks
from outlast.policy.inprocess_restart import add_fault, count_causes
from outlast.policy.rank_assignment import Member, assign
from outlast.runtime import connections, device
from outlast.runtime.interruption import SignalInterruption

__all__ = ["RankLeft", "RestartContext", "WrappedRank"]

log = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 1800.0
_ABORT_S = 5.0
"""Seconds that a rank waits for the order to abort, which has the counts of all ranks."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


class RestartContext:
    """The last order to go, and the faults since.

    Args:
        place: This process's place at its start.

    Thread: the main thread; :meth:`describe` from any.
    """

    def __init__(self, place: env.WorkerEnv) -> None:
        self.place = place
        self.restart_count = 0
        """The one that this rank was ordered to enter last."""
        self._go: m.Go | None = None
        self._faults: tuple[m.RankFault, ...] = ()

    def note_go(self, go: m.Go) -> None:
        """Note an order to go; its counts have all faults before it."""
        self._go, self.restart_count, self._faults = go, go.restart_count, ()

    def note_faults(self, faults: Iterable[m.RankFault]) -> None:
        """Note faults since the last order to go."""
        for fault in faults:
            self._faults = add_fault(self._faults, fault)

    def describe(self) -> State:
        """Return it for plug-ins."""
        go, place = self._go, self.place
        ranks = go.ranks if go is not None else {}
        return State(
            initial_rank=place.global_rank,
            initial_world_size=place.world_size,
            rank=ranks.get(place.global_rank),
            world_size=len(ranks) or place.world_size,
            active_world_size=go.active_world_size if go is not None else place.world_size,
            iteration=self.restart_count,
            node=place.node,
            fault_counts=count_causes(go.fault_counts if go is not None else {}, self._faults),
        )


class RankLeft(SystemExit):
    """This rank leaves a wrapped function for good, and the others resume; its process ends with exit code 0.

    Args:
        reason: Why, in one line.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(int(ExitReason.FINISHED))
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class _CallResult:
    """What the function ended with: a value, or the ``SystemExit`` that it raised."""

    def __init__(self, value: object = None, leaving: SystemExit | None = None) -> None:
        self.value, self.leaving = value, leaving


class WrappedRank:
    """Go through calls as ordered, until all have completed.

    Args:
        config: The settings.
        plugins: What is called when.

    Thread: the main thread.
    """

    def __init__(self, config: InProcessRestartConfig, plugins: Plugins) -> None:
        self._config, self._plugins = config, plugins
        self._place = env.read_worker()
        self._context = RestartContext(self._place)
        self._ready_for = -1
        self._returned: _CallResult | None = None
        self._kept: dict[str, Any] = {}
        self._handle: Handle | None = None
        self._store: IterationStore | None = None
        self._interruption = SignalInterruption(RestartRequested, WrappedRank._enter.__code__)
        self._function: Callable[..., Any]
        self._handle_name: str | None
        self._reporter: StatusReporter
        self._background: Background
        self._page: Page
        self._link: MonitorLink
        self._thread: MonitorThread

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function until it has returned on all active ranks; return what it returned here last.

        Raises:
            ConfigError: A setting or the place of the call is wrong.
            RestartAbort: The ranks cannot be restarted in process.
            RankLeft: This rank is permanently removed.
        """
        if current_handle() is not None:
            raise ConfigError("a wrapped function was called within another one; wrap only the outer one")
        name = handle_parameter(function)
        self._handle_name = None if name in kwargs else name
        self._function = partial(function, *args, **kwargs)
        logs.configure_worker(self._place.global_rank, self._place.node)
        with ExitStack() as stack:
            self._interruption.install()
            stack.callback(self._interruption.uninstall)
            stacks.register()
            bootstrap = self._open(stack)
            self._join(bootstrap)
            return self._follow(bootstrap)

    def _open(self, stack: ExitStack) -> Bootstrap:
        """Set up what lives as long as this rank's part."""
        config, place = self._config, self._place
        before = {variable: env.environ().get(variable) for variable in _VARIABLES}
        stack.callback(env.update, before)
        before |= device.settle_collectives()
        stack.callback(self._close_store)
        self._reporter = StatusReporter(place, config)
        stack.callback(self._reporter.close)
        self._background = Background()
        stack.callback(self._background.thaw)
        self._host = own_address(place)
        bootstrap = Bootstrap(place, timeout_s=config.barrier_timeout)
        labels = labels_of(self._plugins.rank_assignment)
        task = MonitorTask.of(config, place, host=self._host, bootstrap_key=bootstrap.key, labels=labels)
        self._page = Page.create()
        stack.callback(self._page.close)
        self._link = MonitorLink(task, self._page)
        stack.callback(self._link.close)
        stack.callback(self._interruption.uninstall)
        self._thread = MonitorThread(
            self._link,
            self._page,
            self._interruption,
            interval_s=min(config.monitor_thread_interval, config.progress_watchdog_interval),
            abort=self._abort,
        )
        self._thread.start()
        stack.callback(self._thread.stop)
        noting = connections.Noting(self._check_group)
        noting.start()
        stack.callback(noting.stop)
        stack.callback(set_current, None)
        self._background.freeze()
        stack.callback(bootstrap.close)
        return bootstrap

    # -- orders ------------------------------------------------------------------------------------------------

    def _join(self, bootstrap: Bootstrap) -> None:
        listening = self._next(self._config.barrier_timeout)
        if not isinstance(listening, m.Listening):
            raise OutlastError(f"the monitor process did not start: {listening!r}")
        bootstrap.run(listening.address, self._link.send)
        self._get_ready(0)

    def _follow(self, bootstrap: Bootstrap) -> Any:
        while True:
            order = self._next()
            match order:
                case m.Go():
                    bootstrap.close()
                    self._go_into(order)
                case m.Restart():
                    self._context.note_faults(order.faults)
                    self._reporter.restart(order.restart_count, order.faults)
                    if order.restart_count > self._ready_for:
                        self._leave(None)
                        self._get_ready(order.restart_count)
                case m.Assign():
                    self._link.send(self._assign(order))
                case m.Finish():
                    return self._finish()
                case m.Abort():
                    self._leave(None)
                    raise self._abortion(order)
                case m.Expel():
                    self._leave(None)
                    self._part(order.reason, report=False)
                case OutlastError():
                    self._leave(None)
                    raise order

    def _next(self, timeout_s: float | None = None) -> Instruction:
        try:
            return self._thread.inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise OutlastError(f"the monitor process does not answer for {timeout_s:g} s; look at its log") from None

    def _get_ready(self, restart_count: int) -> None:
        """Record that this rank can enter a call, if it may."""
        if restart_count > 0:
            try:
                self._plugins.health_check(self._context.describe())
            except RestartAbort as error:
                self._give_up(error)
            except Exception as error:  # noqa: BLE001 - whatever a health check raises: it failed
                log.warning("the health check failed: %s", describe(error))
                self._part(describe(error), report=True)
        self._close_store()
        self._store = IterationStore(self._host)
        self._ready_for = restart_count
        self._page.set_phase(RankPhase.WAITING)
        self._link.send(m.RankReady(restart_count=restart_count, store_address=self._store.address))

    def _assign(self, order: m.Assign) -> m.Assigned:
        members = [
            Member(
                initial_rank=facts.initial_rank,
                node=facts.node,
                rank=facts.active_rank,
                alive=facts.is_alive,
                labels=facts.labels,
            )
            for facts in order.members
        ]
        try:
            ranks = assign(
                self._plugins.rank_assignment,
                members,
                iteration=order.restart_count,
                active_world_size=self._config.active_world_size,
            )
        except Exception as error:  # noqa: BLE001 - a plug-in's error stops all ranks, with its text
            log.warning("no ranks can be assigned: %s", describe(error))
            return m.Assigned(ordinal=order.ordinal, error=str(error) or type(error).__name__)
        return m.Assigned(ordinal=order.ordinal, ranks=ranks)

    # -- a call ------------------------------------------------------------------------------------------

    def _go_into(self, go: m.Go) -> None:
        self._context.note_go(go)
        self._reporter.begin(go)
        self._returned = None
        if self._place.global_rank not in go.ranks:
            self._part("the rank assignment leaves it out", report=True)
        rank = go.ranks[self._place.global_rank]
        if rank is None:
            return  # a spare: it waits for the next order
        handle = self._handle = Handle(
            self._context.describe(),
            interruption=self._interruption,
            page=self._page,
            on_first_ping=self._thread.count_pings_only,
            kept=self._kept,
            config=self._config,
        )
        self._page.reset_depths()
        self._page.set_phase(RankPhase.STARTING, go.restart_count)
        self._thread.begin_call()
        set_current(handle)
        given = {} if self._handle_name is None else {self._handle_name: handle}
        outcome = self._enter(go, rank, given)
        self._interruption.leave()
        self._page.set_phase(RankPhase.OUT)
        self._settle(outcome)

    def _enter(self, go: m.Go, rank: int, given: Mapping[str, Any]) -> _CallResult | BaseException:
        """Call the function; return what it ended with.

        This frame is the boundary of what is interrupted: it is not, whatever it calls is.
        """
        if not self._interruption.enter(go.restart_count):
            return RestartRequested()
        try:
            self._prepare(go, rank)
            self._page.set_phase(RankPhase.IN_FN)
            self._plugins.initialize(self._context.describe())
            value = self._function(**given)
        except SystemExit as error:
            return _CallResult(leaving=error)
        except BaseException as error:  # noqa: BLE001 - whatever ended the function is dealt with outside
            return error
        return _CallResult(value)

    def _prepare(self, go: m.Go, rank: int) -> None:
        """Set the scene for the function on this rank."""
        assert self._store is not None
        host, port = go.store_address.split(" ")
        if rank == 0:
            self._store.serve(timeout_s=_STORE_TIMEOUT_S)
        env.update(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(go.active_world_size),
                "MASTER_ADDR": host,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        )

    def _settle(self, outcome: _CallResult | BaseException) -> None:
        """Report how the call ended, and leave it if it failed."""
        if not isinstance(outcome, _CallResult):
            self._reporter.restart(self._context.restart_count + 1)
        if isinstance(outcome, _CallResult):
            self._returned = outcome
            self._page.set_phase(RankPhase.COMPLETED)
            if outcome.leaving is not None:
                drop(outcome.leaving)
            self._reporter.complete()
            self._link.send(m.Completed(restart_count=self._context.restart_count))
            return
        if isinstance(outcome, KeyboardInterrupt):
            self._leave(None)
            self._link.send(m.Left(reason="interrupted by the keyboard", fatal=True))
            raise outcome
        if isinstance(outcome, RestartAbort):
            self._leave(None)
            self._give_up(outcome)
        if not isinstance(outcome, RestartRequested):
            self._report_fault(outcome)
        self._leave(outcome)

    def _report_fault(self, error: BaseException) -> None:
        fault = m.RankFault(
            initial_rank=self._place.global_rank,
            restart_count=self._context.restart_count,
            kind=m.RankFaultKind.EXCEPTION,
            summary=describe(error),
            is_consequence=is_consequence(error),
        )
        self._context.note_faults((fault,))
        self._link.send(fault)
        if not fault.is_consequence:
            log.warning("the function failed on this rank in call %d", self._context.restart_count, exc_info=error)

    def _leave(self, error: BaseException | None) -> None:
        """Let go of the call that was entered last. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._page.set_phase(RankPhase.OUT)
        self._close_store()
        try:
            leave(handle.take_callbacks(), error, self._background)
            set_current(None)
            self._plugins.finalize(self._context.describe())
        except RestartAbort as failure:
            self._give_up(failure)
        except Exception as failure:
            log.exception("this rank cannot continue")
            self._part(describe(failure), report=True)
        finally:
            set_current(None)
        if self._config.empty_cuda_cache:
            device.empty_cache()

    # -- the end -----------------------------------------------------------------------------------------------

    def _finish(self) -> Any:
        self._reporter.finish()
        state = self._context.describe()
        self._handle = None
        set_current(None)
        self._plugins.completion(state)
        if self._returned is None:
            return None
        end_groups()
        if self._returned.leaving is not None:
            raise self._returned.leaving
        return self._returned.value

    def _part(self, reason: str, *, report: bool) -> NoReturn:
        """Leave permanently, alone.

        Args:
            reason: Why, in one line.
            report: Whether the others do not know it yet.

        Raises:
            RankLeft: Always.
        """
        if report:
            self._link.send(m.Left(reason=reason))
        self._reporter.leave()
        self._terminate()
        text = f"rank {self._place.global_rank} is permanently removed: {reason}"
        log.warning("%s", text)
        raise RankLeft(text)

    def _give_up(self, error: RestartAbort) -> NoReturn:
        """Have all ranks stop.

        Raises:
            RestartAbort: Always; with the counts of all ranks where they come in time.

        Blocks: up to 5 s.
        """
        self._link.send(m.Left(reason=str(error), fatal=True))
        end_s = clock.now_s() + _ABORT_S
        while (left_s := end_s - clock.now_s()) > 0:
            try:
                order = self._thread.inbox.get(timeout=left_s)
            except queue.Empty:
                break
            if isinstance(order, m.Abort):
                raise self._abortion(order) from error
        self._terminate()
        raise error

    def _abortion(self, order: m.Abort) -> RestartAbort:
        """Return what to raise where all were ordered to stop."""
        self._terminate()
        return RestartAbort(
            order.reason,
            counts={"restarts": order.restart_count, "faults": sum(order.fault_counts.values())},
            rank=self._place.global_rank,
            node=self._place.node,
            iteration=self._context.restart_count,
        )

    def _terminate(self) -> None:
        try:
            self._plugins.terminate(self._context.describe())
        except Exception:
            log.exception("the terminate plug-in failed")

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()

    # -- for others ---------------------------------------------------------------------------------------------

    def _abort(self) -> None:
        """End what the main thread may wait on beyond connections; on the monitor thread."""
        try:
            if self._handle is not None:
                self._handle.look_before_abort()
        except Exception:
            log.exception("the check before the abort failed")
        try:
            device.abort_collectives()
            self._plugins.abort(self._context.describe())
        except Exception:
            log.exception("the abort plug-in failed")

    def _check_group(self, backend: str, timeout_s: float) -> None:
        device.check_collectives(backend, timeout_s, hard_timeout_s=self._config.hard_timeout)
