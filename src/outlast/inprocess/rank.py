"""The wrapper, and one rank's part in a call of it: from the first order to the last.

Apart from the function's own end there are three others: the rank is permanently removed and the others resume, all
ranks have to stop, or the agent process is gone. Each raises an exception, so that the process never ends with exit
code 0 without the function's result.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar

from outlast import clock, env, logs
from outlast.config import Config
from outlast.config.base import frozen
from outlast.config.sources import load_config
from outlast.config.training import InProcessRestartConfig
from outlast.errors import ConfigError, OutlastError, RestartAbort
from outlast.inprocess import call as calls
from outlast.inprocess import leaving
from outlast.inprocess import protocol as m
from outlast.inprocess.bootstrap import Bootstrap
from outlast.inprocess.monitor_client import Instruction, MonitorLink, MonitorThread
from outlast.inprocess.plugins import Plugins, State, labels_of
from outlast.inprocess.progress import Page, RankPhase
from outlast.inprocess.protocol import MonitorTask
from outlast.inprocess.status_reporter import StatusReporter
from outlast.monitor import stacks
from outlast.policy import inprocess_protocol as p
from outlast.policy.inprocess_restart import add_earlier_faults, add_fault, count_causes
from outlast.policy.rank_assignment import assign
from outlast.runtime import connections, device, device_collectives
from outlast.runtime.addresses import own_address
from outlast.runtime.interruption import CallOutcome, SignalInterruption

log = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 1800.0
_ABORT_S = 5.0
"""Seconds that a rank waits for the order to abort, which has the counts of all ranks."""
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
)


class RankLeft(OutlastError):
    """This rank is permanently removed from a wrapped function without an exception of a plug-in; the others resume."""


class WrappedRank:
    """Execute calls as ordered, until all have completed.

    Args:
        config: The settings.
        plugins: The plug-ins of the wrapper.

    Thread: the main thread.
    """

    def __init__(self, config: InProcessRestartConfig, plugins: Plugins) -> None:
        self._config, self._plugins = config, plugins
        self._place = env.read_worker()
        self._go: p.Go | None = None
        self._faults: tuple[p.RankFault, ...] = ()
        self._restart: p.Restart | None = None
        """The last order to restart since ``_go``."""
        self._ready_for = -1
        self._iteration = -1
        self._returned: CallOutcome | None = None
        self._has_finished = False
        self._kept: dict[str, Any] = {}
        self._handle: calls.Handle | None = None
        self._aborting = threading.Lock()
        self._aborted = -1
        """The last call whose collectives were aborted."""
        self._store: calls.CallStore | None = None
        self._interruption = SignalInterruption(calls.RestartRequested, WrappedRank._enter.__code__)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function until it has returned on all active ranks; return its last value on this rank.

        Raises:
            ConfigError: A setting or the place of the call is wrong.
            RestartAbort: The ranks cannot be restarted in process.
            RankLeft: This rank is permanently removed. Where a plug-in failed, its exception is raised instead.
            SystemExit: The function raised it; see :func:`~outlast.policy.inprocess_protocol.is_orderly_exit`.
        """
        if calls.current_handle() is not None:
            raise ConfigError("a wrapped function was called within another one; wrap only the outer one")
        name = calls.handle_parameter(function)
        self._handle_name = None if name in kwargs else name
        self._function = partial(function, *args, **kwargs)
        logs.configure_worker(self._place.global_rank, self._place.node)
        try:
            with ExitStack() as stack:
                self._interruption.install()
                stack.callback(self._interruption.uninstall)
                stacks.register()
                self._open(stack)
                self._join()
                return self._follow()
        except SystemExit as error:
            if error.code or self._has_finished:
                raise
            text = "a plug-in or signal handler called sys.exit(0) before the function had returned; raise an exception"
            raise RankLeft(text, rank=self._place.global_rank, node=self._place.node) from error

    def _open(self, stack: ExitStack) -> None:
        config, place = self._config, self._place
        before = {variable: env.environ().get(variable) for variable in _VARIABLES}
        stack.callback(env.update, before)
        before |= device_collectives.settle_collectives()
        stack.callback(self._close_store)
        self._reporter = StatusReporter(place, config)
        stack.callback(self._reporter.close)
        self._background = leaving.Background()
        stack.callback(gc.unfreeze)
        self._host = own_address(None if place.world_size == 1 else place.master_addr)
        self._bootstrap = None if place.relay else Bootstrap(place, timeout_s=config.barrier_timeout)
        task = MonitorTask.of(
            config,
            place,
            host=self._host,
            call=self._reporter.call,
            labels=labels_of(self._plugins.rank_assignment),
        )
        self._page = Page.create()
        stack.callback(self._page.close)
        self._link = MonitorLink(task, place, self._page)
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
        stack.callback(calls.set_current, None)
        gc.collect()
        gc.freeze()  # the collector takes 100 times as long with the objects that live anyway
        stack.callback(self._end_bootstrap)

    # -- orders ------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        if self._bootstrap is None:
            self._link.send(m.Connect())
        else:
            listening = self._next(self._config.barrier_timeout)
            if not isinstance(listening, m.Listening):
                raise OutlastError(f"the agent process did not start: {listening!r}")
            self._link.send(self._bootstrap.run(listening))
        self._get_ready(0)

    def _end_bootstrap(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()

    def _follow(self) -> Any:
        while True:
            order = self._next()
            match order:
                case p.Go():
                    self._end_bootstrap()
                    self._go_into(add_earlier_faults(order, self._restart))
                case p.Restart():
                    self._restart = order
                    self._note_faults(order.faults)
                    self._reporter.restart(order.restart_count, order.faults)
                    if order.restart_count > self._ready_for:
                        self._leave(None)
                        self._get_ready(order.restart_count)
                case p.Assign():
                    self._link.send(self._assign(order))
                case p.Finish():
                    return self._finish(order)
                case p.Abort():
                    self._leave(None)
                    raise self._abortion(order)
                case p.Expel():
                    self._leave(None)
                    self._part(order.reason, is_known=True)
                case OutlastError():
                    self._leave(None)
                    raise order

    def _next(self, timeout_s: float | None = None) -> Instruction:
        try:
            return self._thread.inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise OutlastError(f"the agent process has not responded for {timeout_s:g} s; read its log") from None

    def _get_ready(self, restart_count: int) -> None:
        if restart_count > 0:
            try:
                self._plugins.health_check(self._describe())
            except RestartAbort as error:
                self._give_up(error)
            except Exception as error:  # noqa: BLE001 - any exception of a health check is a failure
                self._part(leaving.describe(error), cause=error)
        self._close_store()
        self._store = calls.CallStore(self._host)
        self._ready_for = restart_count
        self._page.set_phase(RankPhase.WAITING)
        self._link.send(
            p.RankReady(restart_count=restart_count, store_address=self._store.address, iteration=self._iteration)
        )

    def _assign(self, order: p.Assign) -> p.Assigned:
        try:
            ranks = assign(
                self._plugins.rank_assignment,
                order.members,
                iteration=order.restart_count,
                active_world_size=self._config.active_world_size,
            )
        except Exception as error:  # noqa: BLE001 - a plug-in's error stops all ranks, with its text
            log.warning("no ranks can be assigned: %s", leaving.describe(error))
            return p.Assigned(ordinal=order.ordinal, error=str(error) or type(error).__name__)
        return p.Assigned(ordinal=order.ordinal, ranks=ranks)

    # -- a call ------------------------------------------------------------------------------------------

    def _go_into(self, go: p.Go) -> None:
        self._go, self._faults = go, ()  # the order has the counts of earlier faults
        self._reporter.begin(go)
        self._returned = None
        if self._place.global_rank not in go.ranks:
            self._part("the rank assignment leaves it out")
        rank = go.ranks[self._place.global_rank]
        if rank is None:
            return  # a spare waits for the next order
        handle = self._handle = calls.Handle(
            self._describe(),
            interruption=self._interruption,
            page=self._page,
            on_first_ping=self._thread.count_pings_only,
            kept=self._kept,
            config=self._config,
        )
        self._page.reset_depths()
        self._page.set_phase(RankPhase.STARTING, go.restart_count)
        self._thread.begin_call()
        calls.set_current(handle)
        given = {} if self._handle_name is None else {self._handle_name: handle}
        outcome = self._enter(go, rank, given)
        self._interruption.leave()
        self._page.set_phase(RankPhase.OUT)
        self._settle(outcome)

    def _enter(self, go: p.Go, rank: int, given: Mapping[str, Any]) -> CallOutcome:
        """Call the function; return its outcome.

        This frame is the boundary of interruptions: frames that it calls are interrupted, this one is not. So it calls
        nothing outside of the ``try`` once it has entered.
        """
        outcome = CallOutcome()
        if not self._interruption.enter(go.restart_count):
            outcome.error = calls.RestartRequested()
            return outcome
        try:
            self._prepare(go, rank)
            self._page.set_phase(RankPhase.IN_FN)
            self._plugins.initialize(self._describe())
            outcome.value = self._function(**given)
        except BaseException as error:  # noqa: BLE001 - the caller handles it
            outcome.error = error
        return outcome

    def _prepare(self, go: p.Go, rank: int) -> None:
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
        if (place := self._place).launcher == "srun":  # with RANK set, Slurm's own variables are not read
            env.update(
                {
                    "LOCAL_RANK": str(place.local_rank),
                    "LOCAL_WORLD_SIZE": str(place.local_world_size),
                    "GROUP_RANK": str(place.node_rank),
                }
            )

    def _settle(self, outcome: CallOutcome) -> None:
        error = outcome.error
        if error is None or (isinstance(error, SystemExit) and p.is_orderly_exit(error.code)):
            self._returned = outcome
            self._page.set_phase(RankPhase.COMPLETED)
            leaving.drop(error)
            self._reporter.complete()
            code = (error.code or 0) if isinstance(error, SystemExit) else 0
            self._link.send(p.Completed(restart_count=self._restart_count, exit_code=int(code)))
            return
        self._reporter.restart(self._restart_count + 1)
        if isinstance(error, KeyboardInterrupt):
            self._leave(None)
            self._link.send(p.Left(reason="interrupted by the keyboard", fatal=True))
            raise error
        if isinstance(error, RestartAbort):
            leaving.clear_frames(error)
            self._leave(None)
            self._give_up(error)
        reason = leaving.describe(error)
        if not isinstance(error, calls.RestartRequested):
            self._report_fault(reason, is_consequence=leaving.is_consequence(error), error=error)
        elif self._handle is not None and self._handle.failure is not None:
            summary, is_consequence = self._handle.failure
            self._report_fault(summary, is_consequence=is_consequence)
        self._leave(error)
        if isinstance(error, SystemExit):
            self._part(reason, cause=error)

    def _report_fault(self, summary: str, *, is_consequence: bool, error: BaseException | None = None) -> None:
        fault = p.RankFault(
            initial_rank=self._place.global_rank,
            restart_count=self._restart_count,
            kind=p.RankFaultKind.EXCEPTION,
            summary=summary,
            is_consequence=is_consequence,
        )
        self._note_faults((fault,))
        self._link.send(fault)
        if not is_consequence:
            log.warning("the function failed on this rank in call %d: %s", self._restart_count, summary, exc_info=error)

    def _leave(self, error: BaseException | None) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._page.set_phase(RankPhase.OUT)
        self._iteration = max(self._iteration, handle.reached)
        self._close_store()
        self._abort_collectives(handle)
        try:
            leaving.leave(handle.take_callbacks(), error, self._background)
            calls.set_current(None)
            self._plugins.finalize(self._describe())
        except RestartAbort as failure:
            self._give_up(failure)
        except Exception as failure:  # noqa: BLE001 - of a plug-in or the clean-up
            self._part(leaving.describe(failure), cause=failure)
        finally:
            calls.set_current(None)
        if self._config.empty_cuda_cache:
            device.empty_cache()

    # -- the end -----------------------------------------------------------------------------------------------

    def _finish(self, order: p.Finish) -> Any:
        self._has_finished = True
        self._reporter.finish()
        state = self._describe()
        self._handle = None
        calls.set_current(None)
        self._plugins.completion(state)
        if self._returned is None:
            if order.exit_code:  # the active ranks exit with it
                raise SystemExit(order.exit_code)
            return None
        leaving.end_groups()
        if self._returned.error is not None:
            raise self._returned.error
        return self._returned.value

    def _part(self, reason: str, *, cause: BaseException | None = None, is_known: bool = False) -> NoReturn:
        """Leave permanently, alone.

        Args:
            reason: Why, in one line.
            cause: Exception to raise; ``None``: :class:`RankLeft`.
            is_known: The coordinator ordered it.

        Raises:
            BaseException: Always; never a ``SystemExit`` with code 0.
        """
        if not is_known:
            self._link.send(p.Left(reason=reason))
        code = cause.code if isinstance(cause, SystemExit) else 1
        self._reporter.leave(code if isinstance(code, int) else 1)
        self._terminate()
        own = [fault.text for fault in self._faults if fault.initial_rank == self._place.global_rank]
        failed = f"; call {self._restart_count} failed here: {own[0]}" if own and own[0] != reason else ""
        text = f"rank {self._place.global_rank} is permanently removed: {reason}"
        log.warning("%s%s", text, failed)
        raise cause or RankLeft(text, rank=self._place.global_rank, node=self._place.node)

    def _give_up(self, error: RestartAbort) -> NoReturn:
        """Stop all ranks.

        Raises:
            RestartAbort: Always; with the counts of all ranks where they arrive in time.

        Blocks: up to 5 s.
        """
        self._link.send(p.Left(reason=str(error), fatal=True))
        end_s = clock.now_s() + _ABORT_S
        while (left_s := end_s - clock.now_s()) > 0:
            try:
                order = self._thread.inbox.get(timeout=left_s)
            except queue.Empty:
                break
            if isinstance(order, p.Abort):
                raise self._abortion(order) from error
        self._terminate()
        raise error

    def _abortion(self, order: p.Abort) -> RestartAbort:
        self._terminate()
        return RestartAbort(
            order.reason,
            counts={"restarts": order.restart_count, "faults": sum(order.fault_counts.values())},
            rank=self._place.global_rank,
            node=self._place.node,
            iteration=self._restart_count,
        )

    def _terminate(self) -> None:
        try:
            self._plugins.terminate(self._describe())
        except (Exception, SystemExit):
            log.exception("the terminate plug-in failed")

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()

    # -- its state ---------------------------------------------------------------------------------------

    @property
    def _restart_count(self) -> int:
        """The call that this rank was ordered to enter last."""
        return self._go.restart_count if self._go is not None else 0

    def _note_faults(self, faults: Iterable[p.RankFault]) -> None:
        for fault in faults:
            self._faults = add_fault(self._faults, fault)

    def _describe(self) -> State:
        """Return the state for plug-ins. Thread: any."""
        go, place = self._go, self._place
        ranks = go.ranks if go is not None else {}
        return State(
            initial_rank=place.global_rank,
            initial_world_size=place.world_size,
            rank=ranks.get(place.global_rank),
            world_size=len(ranks) or place.world_size,
            active_world_size=go.active_world_size if go is not None else place.world_size,
            iteration=self._restart_count,
            node=place.node,
            fault_counts=count_causes(go.fault_counts if go is not None else {}, self._faults),
        )

    # -- for other threads ---------------------------------------------------------------------------------------------

    def _abort(self) -> None:
        """End waits of the main thread that are not on connections. Thread: the monitor thread."""
        if (handle := self._handle) is not None:
            self._abort_collectives(handle)
        if not self._plugins.has_abort:
            return
        device_collectives.await_aborts()  # a plug-in may shut groups down
        try:
            self._plugins.abort(self._describe())
        except (Exception, SystemExit):  # it would end the monitor thread without a message
            log.exception("the abort plug-in failed")

    def _abort_collectives(self, handle: calls.Handle) -> None:
        """Abort a call's collectives on devices, once: on the monitor thread, or when this rank leaves first.

        A rank that raised does not wait for the order to leave: its collectives may wait for a peer that is gone, and
        reading its state or destroying its groups would, too. The second caller waits here, since a device's results
        after an abort are garbage.

        Blocks: half a second for the checks before the abort, and until devices have finished; NCCL's own end continues
        in the background.
        """
        with self._aborting:
            if handle.iteration <= self._aborted:
                return
            self._aborted = handle.iteration
            try:
                handle.look_before_abort()
            except Exception:
                log.exception("the check before the abort failed")
            try:
                device_collectives.abort_collectives()
            except Exception:
                log.exception("the collectives of the devices could not be aborted")

    def _check_group(self, backend: str, timeout_s: float) -> None:
        device_collectives.check_collectives(backend, timeout_s, hard_timeout_s=self._config.hard_timeout)


P = ParamSpec("P")
R = TypeVar("R")


class Wrapper:
    """Restart a function on all ranks, in their processes, when one of them fails.

    A decorator::

        @outlast.inprocess.Wrapper(InProcessRestartConfig(soft_timeout=60))
        def train(steps, call: outlast.inprocess.Handle):
            torch.distributed.init_process_group("gloo")
            ...

    The function runs on every active rank. When it raises on one, or a rank dies or hangs, all ranks leave it, and it
    is called again with the same arguments on the ranks that live; spares replace the others. RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT are set for each call. Process groups are made in the function, and are destroyed before
    the next call and at the end. The wrapped call returns once the function has returned on all active ranks: its value
    there, ``None`` on spares. A ``SystemExit`` with code 0, or with one of :class:`~outlast.ExitReason` with which all
    ranks of a session exit together (16, 17, 18, 75, 93), ends the function like a return, and is raised again at the
    end, on spares too. With any other code the rank is permanently removed.

    Args:
        config: Timeouts and other settings; also the whole config of a session, or the path of its file, of which
            ``in_process_restart`` counts; ``None``: the defaults. With ``enabled=False`` the function is called without
            protection.
        initialize: Called with :class:`~outlast.inprocess.State` before each call of the function, on active ranks,
            like the function's first line: it may be interrupted, and an exception is a fault.
        abort: Called with the state on the monitor thread while the main thread is still in the function that it has to
            leave; ends waits of the main thread that outlast does not know.
        finalize: Called with the state after each call that was left. If it raises, the rank is permanently removed:
            the call of the wrapped function raises the same exception there.
        health_check: Called with the state before each further call; an exception removes the rank as for ``finalize``.
        rank_assignment: Assigns the ranks; ``None``: ``FillGaps`` with the configured granularity.
        completion: Called with the state once, when all active ranks have returned.
        terminate: Called with the state once, when this rank is permanently removed or restarting has ended.

    Raises:
        ConfigError: A setting is wrong. By the call: not on the main thread, or within another wrapped function.
        RestartAbort: By the call, on all ranks: they cannot be restarted in process.
        RankLeft: By the call: this rank is permanently removed, and the others resume. Where a plug-in or
            ``sys.exit()`` is the reason, that exception is raised instead.

    Collective: the call, all ranks that the launcher started.
    """

    def __init__(
        self,
        config: InProcessRestartConfig | Config | str | os.PathLike[str] | None = None,
        *,
        initialize: Callable[[Any], Any] | None = None,
        abort: Callable[[Any], Any] | None = None,
        finalize: Callable[[Any], Any] | None = None,
        health_check: Callable[[Any], Any] | None = None,
        rank_assignment: Callable[[Any], Any] | None = None,
        completion: Callable[[Any], Any] | None = None,
        terminate: Callable[[Any], Any] | None = None,
    ) -> None:
        if isinstance(config, str | os.PathLike):
            config = load_config(config)
        if isinstance(config, Config):
            config = config.in_process_restart
        self.config = frozen(config) if config is not None else InProcessRestartConfig()
        self._plugins = Plugins.settle(
            self.config,
            initialize=initialize,
            abort=abort,
            finalize=finalize,
            health_check=health_check,
            rank_assignment=rank_assignment,
            completion=completion,
            terminate=terminate,
        )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Return the function, protected.

        Raises:
            ConfigError: Protection is off, and the function needs a :class:`~outlast.inprocess.Handle`.
        """
        if self.config.given.get("enabled") is False:
            name = calls.handle_parameter(function)
            if name is not None and inspect.signature(function).parameters[name].default is inspect.Parameter.empty:
                raise ConfigError(
                    f"in_process_restart.enabled is off, but {function.__qualname__}() takes a Handle, which only a "
                    f"protected call has; give {name} a default of None, or leave enabled out"
                )
            return function

        @functools.wraps(function)
        def protected(*args: P.args, **kwargs: P.kwargs) -> R | None:
            value: R | None = WrappedRank(self.config, self._plugins).run(function, args, kwargs)
            return value

        return protected
