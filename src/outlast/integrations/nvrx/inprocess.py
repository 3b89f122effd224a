"""``nvidia_resiliency_ext.inprocess``: NVRx's in-process restart over :class:`outlast.inprocess.Wrapper`.

:class:`WrapperOfNVRx` takes NVRx's arguments and plug-ins and passes NVRx's :class:`CallWrapper` to the function.
NVRx's store is accepted and not created, since the engine needs none. Plug-ins are composed from right to left. Rank
assignment rules are the engine's under NVRx's names.

A name that is not offered, or a call that is not accepted, ends restarting at once, since each further call of the
function would fail in the same way (:func:`is_refusal`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
import os
import re
import sys
import threading
import traceback
import types
import typing
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from outlast import env
from outlast.config.base import require
from outlast.config.training import InProcessRestartConfig
from outlast.errors import ConfigError, DeadlineExceeded, OutlastError, RestartAbort, UnhealthyRank
from outlast.inprocess import plugins as engine
from outlast.inprocess.call import Handle, RestartRequested
from outlast.inprocess.rank import RankLeft, Wrapper
from outlast.integrations.nvrx import ranks
from outlast.integrations.nvrx.ranks import (
    ActivateAllRanks,
    FrozenWrapperState,
    Mode,
    RankDiscarded,
    RestartError,
    ShiftRanksUp,
)
from outlast.runtime import device

if TYPE_CHECKING:
    from outlast.health.devices import NvmlReading

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class HealthCheckError(RestartError):
    """A rank is unhealthy and must not continue."""


class InternalError(RestartError):
    """The wrapper itself cannot continue, for example without its agent process."""


class RestartTimeout(RestartError, DeadlineExceeded):
    """A plug-in did not return in time."""


class RankFaultsExceeded(RestartError, UnhealthyRank):
    """A rank failed more often than allowed."""


def _describe(state: engine.State, error: Exception | None) -> FrozenWrapperState:
    return FrozenWrapperState(
        rank=state.initial_rank if state.rank is None else state.rank,
        world_size=state.world_size,
        active_rank=state.rank,
        active_world_size=state.active_world_size,
        initial_rank=state.initial_rank,
        initial_world_size=state.initial_world_size,
        iteration=state.iteration,
        mode=Mode.INACTIVE if state.is_spare else Mode.ACTIVE,
        fn_exception=error,
        node=state.node,
        fault_counts=state.fault_counts,
    )


# -- plug-ins -----------------------------------------------------------------------------------------------------


class StatePlugin(ABC):
    """Base class of plug-ins: ``initialize``, ``abort``, ``finalize``, ``health_check`` and others."""

    @abstractmethod
    def __call__(self, state: Any) -> Any:
        """Act on the state and return it."""


class ComposeFromRight:
    """Call plug-ins from right to left, each with the result of the one before: ``Compose(a, b)(x)`` is ``a(b(x))``.

    A composition is an instance of the nearest class that all its plug-ins share. If a plug-in returns ``None``, a
    warning is issued and the next plug-in gets the same argument.

    Raises:
        ConfigError: There is no plug-in, or one cannot be called.
    """

    def __new__(cls, *instances: Callable[..., Any]) -> ComposeFromRight:
        # NVRx's own protocol: scripts pass a composition wherever an instance of the shared class is checked for.
        require(bool(instances), "Compose() has no plug-ins; name at least one")
        return super().__new__(_composed_class(instances))

    def __init__(self, *instances: Callable[..., Any]) -> None:
        for instance in instances:
            text = f"Compose was given {instance!r}, which cannot be called; pass an instance or a function"
            require(callable(instance), text)
        self.instances = instances

    def __call__(self, *args: Any) -> Any:
        """Return the result of the leftmost plug-in."""
        returned: Any = None
        for instance in reversed(self.instances):
            returned = instance(*args)
            if isinstance(returned, tuple):
                args = returned
            elif returned is not None and args:
                args = (returned,)
            elif args and args != (None,):
                text = f"{instance!r} returned None for {args!r}; the next plug-in gets what it was given"
                warnings.warn(text, stacklevel=2)
        return returned

    def labels(self) -> dict[str, str]:
        """Return the labels of this rank from all plug-ins."""
        return {name: text for one in self.instances for name, text in engine.labels_of(one).items()}


def _composed_class(instances: tuple[object, ...]) -> type[ComposeFromRight]:
    """Return the class of a composition: it derives from the nearest class that all instances share."""
    shared = [kind for kind in type(instances[0]).__mro__[:-1] if all(isinstance(one, kind) for one in instances)]
    for kind in shared:
        bases = (kind,) if issubclass(kind, ComposeFromRight) else (ComposeFromRight, kind)
        try:
            found = types.new_class("Composed", bases, {}, lambda names: names.update(__module__=__name__))
        except TypeError:  # not inheritable, for example the class of functions
            continue
        found.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
        return found
    return ComposeFromRight


class RetryLimits(StatePlugin):
    """Limit in-process restarts; an ``initialize`` plug-in.

    Args:
        max_iterations: Highest number of calls of the function; ``None`` = no limit.
        min_world_size: Fewest processes to continue with, spares included; ``None`` = 1.
        min_active_world_size: Fewest ranks to run the function with.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int | None = 1, min_active_world_size: int = 1
    ) -> None:
        text = f"max_iterations={max_iterations} must be at least 1, the function's first call; None = no limit"
        require(max_iterations is None or max_iterations >= 1, text)
        self.max_iterations = max_iterations
        self._controller = engine.RetryController(
            max_iterations=None if max_iterations is None else max_iterations - 1,
            min_world_size=min_world_size or 1,
            min_active_world_size=min_active_world_size,
        )

    def __call__(self, state: Any) -> Any:
        """Check the limits. Raises: RestartAbort, when one is exceeded."""
        try:
            self._controller(state)
        except RestartAbort as abort:
            raise RestartAbort(
                f"RetryController(max_iterations={self.max_iterations}) at iteration={state.iteration}: {abort}",
                counts=abort.counts,
                rank=abort.rank,
                node=abort.node,
                iteration=abort.iteration,
            ) from abort
        return state


class AbortTorchDistributed(StatePlugin):
    """Abort process groups; the engine does that with or without this plug-in.

    Args:
        torch_fr_trace_path: Refused.
    """

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        text = "torch_fr_trace_path is not supported; set TORCH_FR_DUMP_TEMP_FILE, and torch writes its traces there"
        require(torch_fr_trace_path is None, text)

    def __call__(self, state: Any) -> Any:
        return state


class AbortTransformerEngine(StatePlugin):
    """Release Transformer Engine's buffers for overlapped communication."""

    def __call__(self, state: Any) -> Any:
        base = sys.modules.get("transformer_engine.pytorch.module.base")
        if base is not None:
            base.destroy_ub()
        return state


class AbortAsyncCalls(StatePlugin):
    """Drop the asynchronous calls that the interrupted call of the function scheduled; none is finalised."""

    def __call__(self, state: Any) -> Any:
        scheduling = sys.modules.get("outlast.integrations.nvrx.async_calls")
        if scheduling is not None:
            scheduling.abort_nvrx_checkpoint()
        return state


class ThreadedFinalize(StatePlugin):
    """Call a function in a thread with a time limit; a ``finalize`` plug-in.

    Raises:
        RestartTimeout: From the call: the function did not return in time.
    """

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.timeout, self.fn, self.args, self.kwargs = timeout, fn, args or (), kwargs or {}

    def __call__(self, state: Any) -> Any:
        raised: list[BaseException] = []

        def call() -> None:
            try:
                self.fn(*self.args, **self.kwargs)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                raised.append(error)

        thread = threading.Thread(target=call, name="outlast-finalize", daemon=True)
        thread.start()
        thread.join(_seconds(self.timeout))
        if thread.is_alive():
            name = getattr(self.fn, "__qualname__", repr(self.fn))
            raise RestartTimeout(
                f"{name} did not return within {_seconds(self.timeout):g} s; this rank cannot continue"
            )
        if raised:
            raise raised[0]
        return state


class CudaHealthCheck(StatePlugin):
    """Check that the GPU, if there is one, finishes its work; a ``health_check`` plug-in.

    Raises:
        RestartTimeout: From the call: the GPU did not finish in time.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: Any) -> Any:
        mark = device.mark_work()
        if mark is not None and not device.is_done(mark, timeout_s=_seconds(self.timeout)):
            text = f"the GPU did not finish its work within {_seconds(self.timeout):g} s; look at its node"
            raise RestartTimeout(text, rank=getattr(state, "initial_rank", None), node=getattr(state, "node", None))
        return state


class DriverHealthCheck(StatePlugin):
    """Check what the NVIDIA driver recorded of a GPU; a ``health_check`` plug-in.

    Without NVML, or before this process uses the GPU, nothing is checked.

    Args:
        device_index: Number of the GPU; ``None`` = the GPU of this process.
    """

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = device_index

    @abstractmethod
    def judge(self, reading: NvmlReading) -> None:
        """Raise HealthCheckError if the GPU is unhealthy."""

    def __call__(self, state: Any) -> Any:
        """Check the GPU. Raises: HealthCheckError. Blocks: while the driver is queried."""
        if device.mark_work() is not None:
            from outlast.health.devices import read_nvml

            index = env.read_worker().local_rank if self.device_index is None else self.device_index
            name = device.device_name("", index)
            reading = read_nvml(f"GPU-{name.removeprefix('gpu-')}")
            if not isinstance(reading, str):
                self.judge(reading)
        return state


class GpuMemoryHealthCheck(DriverHealthCheck):
    """Check that the GPU's memory does not require a reset or a replacement."""

    def judge(self, reading: NvmlReading) -> None:
        from outlast.health.devices import judge_reading

        memory = ("name", "rows_failed", "rows_pending", "retired_pages")
        if wrong := judge_reading(type(reading)(**{name: getattr(reading, name) for name in memory})):
            raise HealthCheckError("; ".join(wrong))


class NvLinkHealthCheck(DriverHealthCheck):
    """Log NVLinks that are down; as in NVRx, they do not remove the rank."""

    def judge(self, reading: NvmlReading) -> None:
        if reading.links_active and reading.links_inactive:
            log.warning("%d NVLinks of GPU %s are down", reading.links_inactive, self.device_index)


class NicHealthCheck(StatePlugin):
    """Refused; the error names the replacement.

    Raises:
        ConfigError: Always.
    """

    def __init__(self, device_index: int | None = None) -> None:
        raise ConfigError(
            "ChainedNicHealthCheck is not supported; name the node's interfaces in health.network_interfaces, and "
            "outlast run checks them before each cycle"
        )

    def __call__(self, state: Any) -> Any:
        return state


class RankFaultCounter(StatePlugin):
    """Permanently remove a rank that fails too often; a ``health_check`` plug-in."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self._counter = engine.FaultCounter(max_rank_faults=max_rank_faults)

    def __call__(self, state: Any) -> Any:
        """Check this rank. Raises: RankFaultsExceeded."""
        try:
            self._counter(state)
        except UnhealthyRank as error:
            raise RankFaultsExceeded(str(error), rank=error.rank, node=error.node) from error
        return state


class NestedRestarterLogger:
    """Logs changes of state."""

    def __init__(self) -> None:
        self.restarter_logger: logging.Logger = log

    def set_connected_rank(self, rank: int | None) -> None:
        """Do nothing: each log line has its rank."""

    def log_for_restarter(self, message: str, *args: object) -> None:
        self.restarter_logger.info(message, *args)


class NestedRestarterCallback(StatePlugin):
    """Log a change of state in the form that NVRx's launcher parses."""

    restarter_state: str = ""
    restarter_stage: str | None = None

    def __init__(
        self,
        restarter_state: str | None = None,
        restarter_stage: str | None = None,
        logger: NestedRestarterLogger | None = None,
        special_rank: int = 0,
    ) -> None:
        self.restarter_state = restarter_state or self.restarter_state
        self.restarter_stage = restarter_stage or self.restarter_stage
        self.logger, self.special_rank = logger or NestedRestarterLogger(), special_rank
        require(bool(self.restarter_state), "NestedRestarterCallback() has no restarter_state; name one")

    def __call__(self, state: Any) -> Any:
        if state.initial_rank == self.special_rank:
            self.logger.set_connected_rank(state.initial_rank)
            stage = "" if self.restarter_stage is None else f" stage={self.restarter_stage}"
            self.logger.log_for_restarter(f"[NestedRestarter] name=[InProcess] state={self.restarter_state}{stage}")
        return state


class NestedRestarterHandlingCompleted(NestedRestarterCallback):
    """Log that the function starts, or that a restart is complete; an ``initialize`` plug-in."""

    restarter_state = "initialize"

    def __call__(self, state: Any) -> Any:
        super().__call__(state)
        self.restarter_state, self.restarter_stage = "handling", "completed"
        return state


class NestedRestarterHandlingStarting(NestedRestarterCallback):
    """Log that a restart starts; an ``abort`` plug-in."""

    restarter_state, restarter_stage = "handling", "starting"


class NestedRestarterFinalized(NestedRestarterCallback):
    """Log that the function has returned on all ranks; a ``completion`` plug-in."""

    restarter_state = "finalized"


class NestedRestarterAborted(NestedRestarterCallback):
    """Log that restarting has ended; a ``terminate`` plug-in."""

    restarter_state = "aborted"


# -- parameters ---------------------------------------------------------------------------------------------------


def is_annotated(annotation: Any, kind: type) -> bool:
    """Return whether an annotation is a class, or a union that contains it."""
    if annotation is kind:
        return True
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and any(is_annotated(one, kind) for one in typing.get_args(annotation))


def _annotations(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's parameters, with text resolved where possible."""
    try:
        hints = typing.get_type_hints(inspect.unwrap(fn))
    except Exception:  # noqa: BLE001 - an annotation of something else that cannot be resolved now
        hints = {}
    parameters = inspect.signature(fn).parameters.values()
    return {one.name: hints.get(one.name, one.annotation) for one in parameters}


def count_type_in_params(fn: Callable[..., Any], cls: type) -> int:
    """Return how many parameters of a function are annotated with a class."""
    return sum(is_annotated(annotation, cls) for annotation in _annotations(fn).values())


def substitute_param_value(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], subs: Mapping[type, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for a function, with given values for the parameters annotated with given classes.

    Raises:
        TypeError: The arguments do not match the function's signature.
    """
    annotations = _annotations(fn)
    found = {
        name: value for name, hint in annotations.items() for kind, value in subs.items() if is_annotated(hint, kind)
    }
    bound = inspect.signature(fn).bind_partial(*args, **kwargs)
    bound.arguments.update(found)
    complete = inspect.signature(fn).bind(*bound.args, **bound.kwargs)
    complete.apply_defaults()
    return complete.args, complete.kwargs


# -- the wrapper --------------------------------------------------------------------------------------------------


class CallWrapper:
    """One call of the wrapped function; passed to the parameter that is annotated with this class."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @property
    def iteration(self) -> int:
        """Number of this call: 0 for the first, plus one after each restart."""
        return self._handle.iteration

    def ping(self) -> None:
        """Record progress; from the first ping on, only pings count as progress. Thread: any."""
        self._handle.ping()

    def atomic(self) -> AbstractContextManager[None]:
        """Return a context manager in which the function is not interrupted; may be nested."""
        return self._handle.atomic()

    def disable_hang_protection(self) -> AbstractContextManager[None]:
        """Return a context manager in which neither timeout is enforced; may be nested. Other faults still end the
        call."""
        return self._handle.disable_hang_protection()


class NoStore:
    """Accepted as ``store_factory``; no store is created."""


class TCPStore(NoStore):
    """NVRx's default store; see :class:`NoStore`.

    Raises:
        ConfigError: Always: a store is not created.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = timedelta(minutes=5),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        raise ConfigError(
            "inprocess.store.TCPStore is not made: the ranks of a wrapped function meet by themselves; for a store of "
            "your own use torch.distributed.TCPStore"
        )


_OURS = __name__.rpartition(".")[0]
_CALLED = re.compile(r"([\w.]+)\(\) ")


def is_refusal(error: Exception) -> bool:
    """Return whether an error means that this module does not offer a name or does not accept a call."""
    if isinstance(error, ImportError):
        return (error.name or "").split(".")[0] == "nvidia_resiliency_ext"
    if not isinstance(error, AttributeError | TypeError) or isinstance(error, dataclasses.FrozenInstanceError):
        return False
    found = getattr(error, "obj", None)
    kind = found if isinstance(found, type) else type(found)
    if kind.__module__.startswith(_OURS):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    if frames and str(frames[-1][0].f_globals.get("__name__")).startswith(_OURS):
        return True
    called = _CALLED.match(str(error))  # wrong arguments are reported from the calling frame
    return isinstance(error, TypeError) and called is not None and called[1] in _callable_names()


@functools.cache
def _callable_names() -> frozenset[str]:
    """Return the qualified names of all callables that NVRx's names refer to."""
    found = set()
    for module in (sys.modules[__name__], ranks):
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__ and callable(value):
                members = vars(value).values() if isinstance(value, type) else ()
                found |= {one.__qualname__ for one in (value, *members) if hasattr(one, "__qualname__")}
    return frozenset(found)


def _require_no_groups(fn: Callable[..., Any]) -> None:
    import torch.distributed as dist

    text = (
        f"{getattr(fn, '__qualname__', fn)} needs a process without process groups: not "
        "torch.distributed.is_initialized() must hold; call torch.distributed.destroy_process_group() first"
    )
    require(not (dist.is_available() and dist.is_initialized()), text)


def _max_iterations(initialize: object) -> int | None:
    """Return the limit of a :class:`RetryLimits`, alone or composed; it also bounds restarts without progress."""
    for one in getattr(initialize, "instances", (initialize,)):
        found = _max_iterations(one) if isinstance(one, ComposeFromRight) else getattr(one, "max_iterations", None)
        if found is not None:
            return int(found)
    return None


_STORE_ARGUMENTS = ("host_name", "port", "world_size", "timeout", "wait_for_workers", "multi_tenant", "use_libuv")
_TIMES = (
    *("monitor_thread_interval", "monitor_process_interval", "heartbeat_interval", "progress_watchdog_interval"),
    *("soft_timeout", "hard_timeout", "heartbeat_timeout", "barrier_timeout", "completion_timeout", "last_call_wait"),
    "termination_grace_time",
)
_S = timedelta(seconds=1)


def _seconds(value: timedelta | float) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def _without_frames(error: Exception) -> Exception:
    """Return a copy of an exception that keeps no object of the failed call alive, such as its process groups."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - a foreign class
        return RestartError(f"{type(error).__name__}: {error}")
    return copied if type(copied) is type(error) else RestartError(f"{type(error).__name__}: {error}")


def _raise_health_check_error(error: Exception, state: engine.State) -> None:
    """Raise :class:`HealthCheckError` for any error of a health check, since scripts for NVRx catch that class."""
    if not isinstance(error, HealthCheckError | RestartAbort):
        raise HealthCheckError(f"{type(error).__name__}: {error}", rank=state.initial_rank) from error


class WrapperOfNVRx:
    """Restart a function on all ranks, in their processes, when one rank fails: NVRx's ``inprocess.Wrapper``.

    Args:
        store_factory: Not needed; a ``TCPStore`` is accepted.
        store_kwargs: Not needed; a name that a ``TCPStore`` does not take is refused.
        initialize: Called with the state before each call of the function, on active ranks.
        abort: Called while the main thread is still in the function that failed.
        finalize: Called after each call that did not complete.
        health_check: Called before each further call. If it raises, the rank is permanently removed, and the call of
            the function raises :class:`HealthCheckError` there.
        rank_assignment: One of NVRx's rules, composed or alone, or a function of an ``Assignment``.
        rank_filter: Refused: ``rank_assignment`` takes filters, too.
        monitor_thread_interval: Like all timeouts and intervals a time delta, or seconds, as in
            :class:`outlast.InProcessRestartConfig`, whose ``_SMALLER`` inequalities must hold.
        monitor_process_interval: See above.
        heartbeat_interval: See above.
        progress_watchdog_interval: See above.
        soft_timeout: See above.
        hard_timeout: See above.
        heartbeat_timeout: See above.
        barrier_timeout: See above.
        completion_timeout: See above.
        last_call_wait: See above.
        termination_grace_time: See above.
        monitor_process_logfile: The agent processes write log files in its folder, under their own names.
        monitor_process_pidfile: Absolute path of a file to which the agent process writes its process id; ``{rank}`` is
            replaced by the initial rank. The file is not removed, as in NVRx.
        enabled: ``False``: the function is not wrapped.
        completion: Called once, when all active ranks have returned.
        terminate: Called once, when this rank is permanently removed or restarting has ended.

    Raises:
        ConfigError: An argument is refused, or contradicts another.
    """

    def __init__(
        self,
        *,
        store_factory: Any = None,
        store_kwargs: Mapping[str, Any] | None = None,
        initialize: Callable[[Any], Any] | None = None,
        abort: Callable[[Any], Any] | None = None,
        finalize: Callable[[Any], Any] | None = None,
        health_check: Callable[[Any], Any] | None = None,
        rank_assignment: Callable[[Any], Any] | None = None,
        rank_filter: None = None,
        monitor_thread_interval: timedelta | float = _S,
        monitor_process_interval: timedelta | float = _S,
        heartbeat_interval: timedelta | float = _S,
        progress_watchdog_interval: timedelta | float = _S,
        soft_timeout: timedelta | float = 60 * _S,
        hard_timeout: timedelta | float = 90 * _S,
        heartbeat_timeout: timedelta | float = 30 * _S,
        barrier_timeout: timedelta | float = 120 * _S,
        completion_timeout: timedelta | float = 120 * _S,
        last_call_wait: timedelta | float = _S,
        termination_grace_time: timedelta | float = 5 * _S,
        monitor_process_logfile: str | None = None,
        monitor_process_pidfile: str | None = None,
        enabled: bool = True,
        completion: Callable[[Any], Any] | None = None,
        terminate: Callable[[Any], Any] | None = None,
    ) -> None:
        given = locals()
        require(rank_filter is None, "rank_filter is not supported; pass the filter as rank_assignment, composed")
        if store_factory is not None or store_kwargs is not None:
            name = getattr(store_factory, "__name__", "TCPStore")
            require(name == "TCPStore", f"store_factory={name} is not supported: no store is needed; leave it out")
            unknown = sorted(set(store_kwargs or ()) - set(_STORE_ARGUMENTS))
            text = f"store_kwargs has {', '.join(unknown)}, which a TCPStore does not take; leave store_kwargs out"
            require(not unknown, text)
            log.debug("no store is made: the ranks of a wrapped function meet by themselves")
        folder = None
        if monitor_process_logfile is not None:
            folder = os.path.dirname(os.path.abspath(monitor_process_logfile))
        self.enabled = enabled
        allowed = _max_iterations(initialize)
        default: int = InProcessRestartConfig().max_no_progress_restarts
        times: dict[str, Any] = {name: _seconds(given[name]) for name in _TIMES}
        self.config = InProcessRestartConfig(
            max_no_progress_restarts=default if allowed is None else allowed,
            granularity="rank",
            monitor_process_logdir=folder,
            monitor_process_pidfile=monitor_process_pidfile,
            empty_cuda_cache=False,
            **times,
        )
        self._raised: Exception | None = None
        self._ends_with: Exception | None = None
        """The exception that the caller gets in place of ``RestartAbort``."""
        self._abort_due = [True]
        """Has one element until ``abort`` has been called for the failed call; ``pop`` is atomic across threads."""
        for name in ("initialize", "abort", "finalize", "health_check", "completion", "terminate"):
            text = f"{name}={given[name]!r} cannot be called; pass an instance or a function"
            require(given[name] is None or callable(given[name]), text)
        if abort is not None:
            abort = self._once_a_call(abort)
            finalize = _after_abort(abort, finalize)
        self._wrapper = Wrapper(
            self.config,
            initialize=self._with_state(initialize, lambda error, _: self._refuse(error)),
            abort=self._with_state(abort),
            finalize=self._with_state(finalize),
            health_check=self._with_state(health_check, _raise_health_check_error),
            rank_assignment=self._deciding(rank_assignment or ComposeFromRight(ActivateAllRanks(), ShiftRanksUp())),
            completion=self._with_state(completion),
            terminate=self._with_state(terminate),
        )

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R | None]:
        """Return the function with in-process restart."""
        if not self.enabled:
            return fn

        def call(args: tuple[Any, ...], kwargs: dict[str, Any], handle: Handle) -> Any:
            self._raised, self._abort_due = None, [True]
            given, named = substitute_param_value(fn, args, kwargs, {CallWrapper: CallWrapper(handle)})
            try:
                return fn(*given, **named)
            except RestartRequested:
                if handle.is_left:
                    raise
                raise RestartError("the function requested a restart (RankShouldRestart)") from None
            except Exception as error:
                self._refuse(error)
                self._raised = _without_frames(error)
                raise

        protected = self._wrapper(call)

        @functools.wraps(fn)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R | None:
            self._ends_with = None
            _require_no_groups(fn)
            try:
                value: R | None = protected(args, kwargs)  # type: ignore[call-arg]
                return value
            except RestartAbort:
                if self._ends_with is not None:
                    raise self._ends_with from None
                raise
            except RankLeft as left:
                raise RankDiscarded(str(left), rank=left.rank, node=left.node) from left
            except OutlastError as error:
                if type(error) is not OutlastError:
                    raise
                raise InternalError(str(error), rank=error.rank, node=error.node) from error
            finally:
                self._raised = self._ends_with = None

        return wrapped

    def _refuse(self, error: Exception) -> None:
        """Raise RestartAbort if another call of the function would fail in the same way; the caller gets the error
        itself."""
        if not is_refusal(error):
            return
        error.add_note(
            "nvidia_resiliency_ext is outlast's here: it offers no such name, or call; docs/nvrx.md has them"
        )
        self._ends_with = error
        raise RestartAbort(f"{type(error).__name__}: {error}") from error

    def _once_a_call(self, abort: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the ``abort`` plug-in, called at most once for each failed call."""

        def call(state: Any) -> None:
            try:
                self._abort_due.pop()  # monitor thread or main thread, whichever is first
            except IndexError:
                return
            abort(state)

        return call

    def _deciding(self, rule: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the rule; its error reaches the caller on the deciding rank, the others raise ``RestartAbort``."""

        def assign(given: Any) -> Any:
            try:
                return rule(given)
            except RestartAbort:
                raise
            except Exception as error:
                self._ends_with = error
                raise

        vars(assign)["labels"] = lambda: engine.labels_of(rule)
        return assign

    def _with_state(
        self,
        plugin: Callable[[Any], Any] | None,
        failed: Callable[[Exception, engine.State], None] = lambda error, state: None,
    ) -> Callable[[engine.State], Any] | None:
        """Return the plug-in as the engine calls it; ``failed`` may replace the exception that the plug-in raises."""
        if plugin is None:
            return None

        def call(state: engine.State) -> None:
            try:
                plugin(_describe(state, self._raised))
            except Exception as error:
                failed(error, state)
                raise

        return call


def _after_abort(abort: Callable[[Any], Any], finalize: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return a ``finalize`` that calls ``abort`` first.

    The engine aborts only where the main thread may still wait; NVRx calls ``abort`` for every call that fails.
    """

    def call(state: Any) -> None:
        try:
            abort(state)
        except Exception:
            log.exception("the abort plug-in failed")
        if finalize is not None:
            finalize(state)

    return call
