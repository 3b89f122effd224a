"""``nvidia_resiliency_ext.checkpointing.async_ckpt.core``: asynchronous calls, finalised on all ranks or on none.

A call runs in a thread of this process. Rejected: the extension's helper process, which outlives a killed rank. The
arguments of a call are copied when it is scheduled (:mod:`outlast.integrations.nvrx.snapshot`), so that a delayed call
writes the values of its own iteration.

A call is finalised once it has succeeded on *all* ranks. The extension also finalises a call whose process has died,
and so commits an incomplete checkpoint.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import secrets
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import msgspec
import psutil
import torch.distributed as dist

from outlast import clock
from outlast.config.base import require
from outlast.decoding import from_json
from outlast.errors import CheckpointError, OutlastError, PeerLost
from outlast.integrations.nvrx.exchange import WorldExchange
from outlast.integrations.nvrx.snapshot import copy_arguments
from outlast.runtime.exits import at_exit, forget_at_exit
from outlast.runtime.process_groups import is_initialised

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3600.0
"""Seconds after which a running call counts as failed."""
CALL_MARGIN_S = 60.0
"""Additional seconds for the other ranks to report the same."""
_GIVEN_UP = "is given up, and what it wrote is not committed"
_SIGTERM_TIMEOUT_S = 30.0
MAX_FAILURES = 3
"""Failures in a row after which a call that does not wait raises."""


class _AsyncCallStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank's oldest call."""

    call_idx: int
    ended: bool
    error: str = ""


class AsyncRequest(NamedTuple):
    """A function to run alongside training, and functions to call once it has ended on all ranks."""

    async_fn: Callable[..., Any] | None
    """``None``: nothing is run, only finalised."""
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    """Called in the thread of the training loop, on all ranks."""
    async_fn_kwargs: dict[str, Any] | None = {}  # Megatron-Core's queue does not accept None
    preload_fn: Callable[[], Any] | None = None
    """Called at once; its result replaces the second argument."""
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Append a function to ``finalize_fns``.

        Raises:
            RuntimeError: The request is frozen, since it was scheduled.
        """
        if self.is_frozen:
            raise RuntimeError("the request is scheduled; add functions before that")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return a request to which no function can be added."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Run and finalise the request now.

        Raises:
            CheckpointError: It failed on some rank; nothing was finalised.

        Collective: all ranks.
        Blocks: until it has ended on all ranks.
        """
        arguments = list(self.async_fn_args)
        if self.preload_fn is not None:
            arguments = _two_arguments(self)
            arguments[1] = self.preload_fn()
        call = _ScheduledCall(self.call_idx, self._replace(async_fn_args=tuple(arguments)))
        call.run()
        with closing(WorldExchange("the end of a synchronous call", 2 * CALL_TIMEOUT_S)) as exchange:
            _agree(exchange.gather(call.outcome(blocking=True), _AsyncCallStatus), what=_GIVEN_UP)
            _finalise(self, exchange)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call ``finalize_fns`` in order; return the number of the call.

        Args:
            validate_matching_call_idx: Check that all ranks finalise the same call.

        Raises:
            CheckpointError: A function failed on some rank, or ranks finalise different calls.

        Collective: all ranks, with ``validate_matching_call_idx``.
        """
        if not validate_matching_call_idx:
            return _finalise(self, None)
        with closing(WorldExchange("the end of an asynchronous call", CALL_TIMEOUT_S)) as exchange:
            return _finalise(self, exchange)


def _finalise(request: AsyncRequest, exchange: WorldExchange | None) -> int:
    """Call ``finalize_fns``; with an exchange, all ranks agree on the success."""
    error: Exception | None = None
    try:
        for finalise in request.finalize_fns:
            finalise()
    except Exception as failure:  # noqa: BLE001  all ranks must be notified
        error = failure
    if exchange is None:
        if error is not None:
            text = f"asynchronous call {request.call_idx} was not finalised: {_describe(error)}"
            raise CheckpointError(text) from error
        return request.call_idx
    mine = _AsyncCallStatus(call_idx=request.call_idx, ended=True, error=_describe(error))
    try:
        _agree(exchange.gather(mine, _AsyncCallStatus), what="was not finalised")
    except CheckpointError as failure:
        raise failure from error
    return request.call_idx


def _describe(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _agree(outcomes: list[_AsyncCallStatus], *, what: str) -> None:
    """Raise :class:`CheckpointError` unless all ranks ended the same call without error."""
    numbers = sorted({one.call_idx for one in outcomes})
    if len(numbers) > 1:
        raise CheckpointError(
            f"ranks are at different asynchronous calls ({', '.join(map(str, numbers))}); "
            "schedule and finalise the same ones on all ranks"
        )
    failed = [(rank, one.error) for rank, one in enumerate(outcomes) if one.error]
    if failed:
        rank, error = failed[0]
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CheckpointError(f"asynchronous call {numbers[0]} {what}: rank {rank}{others} failed with {error}")


def _two_arguments(request: AsyncRequest) -> list[Any]:
    if len(request.async_fn_args) < 2:
        raise OutlastError("preload_fn gives the second argument of async_fn, which has fewer: give two")
    return list(request.async_fn_args)


def _snapshot(request: AsyncRequest) -> AsyncRequest:
    """Return a request whose function and arguments are independent of later changes by training.

    Device tensors that ``preload_fn`` copies are not copied twice: of a :func:`functools.partial` the host arguments
    are copied before the call, of any other ``preload_fn`` the result.

    Raises:
        OutlastError: An argument cannot be copied.
        Exception: Raised by ``preload_fn``.
    """
    arguments, preload = list(request.async_fn_args), request.preload_fn
    staged: dict[int, Any] = {}
    if preload is not None:
        arguments = _two_arguments(request)
        if isinstance(preload, functools.partial) and isinstance(preload.func, types.FunctionType):
            name = "an argument of preload_fn"
            staged[1] = copy_arguments({name: preload}, keeps_device_tensors=True)[name]()
        else:
            arguments[1] = preload()
    named: dict[str, Any] = {f"argument {at} of async_fn": one for at, one in enumerate(arguments) if at not in staged}
    if isinstance(request.async_fn, functools.partial):
        named["async_fn"] = request.async_fn
    if request.async_fn_kwargs:
        named["a keyword argument of async_fn"] = dict(request.async_fn_kwargs)
    copied = copy_arguments(named)
    return request._replace(
        async_fn=copied.get("async_fn", request.async_fn),
        async_fn_args=tuple(
            staged[at] if at in staged else copied[f"argument {at} of async_fn"] for at in range(len(arguments))
        ),
        async_fn_kwargs=copied.get("a keyword argument of async_fn"),
        preload_fn=None,
    )


@dataclass
class _ScheduledCall:
    """A call that is not finalised yet."""

    idx: int
    request: AsyncRequest
    """Staged: it refers to nothing that training changes."""
    began_ns: int = field(default_factory=clock.now_ns)
    ended: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    place: str = ""
    """Key prefix in the TCPStore of the world under which the ranks post their status."""
    is_posted: bool = False
    is_given_up: bool = False
    """The queue was closed with ``abort``."""

    def run(self) -> None:
        try:
            if self.request.async_fn is not None and not self.is_given_up:
                self.request.async_fn(*self.request.async_fn_args, **(self.request.async_fn_kwargs or {}))
        except BaseException as error:  # all ranks must be notified of any exception
            self.error = _describe(error)
            log.exception("asynchronous call %d failed", self.idx)
        self.ended.set()

    def outcome(self, *, blocking: bool) -> _AsyncCallStatus:
        """Return the status; with ``blocking``, once the call has ended."""
        left_s = CALL_TIMEOUT_S - (clock.now_ns() - self.began_ns) / 1e9
        has_ended = self.ended.wait(max(0.0, left_s) if blocking else 0.0)
        error = self.error if has_ended else ""
        if not has_ended and (blocking or left_s <= 0):
            has_ended, error = True, f"TimeoutError: it has not ended within {CALL_TIMEOUT_S:g} s"
        return _AsyncCallStatus(call_idx=self.idx, ended=has_ended, error=error)


class _Priorities(NamedTuple):
    """CPU and I/O priority of a persistent thread."""

    nice: int
    io_class: int | None

    @classmethod
    def check(
        cls, cpu_priority: int, io_priority: int | None, sigterm_timeout: float, cpu_shm_mode: bool
    ) -> _Priorities:
        require(cpu_priority in range(20), f"cpu_priority={cpu_priority!r} must be from 0 to 19")
        text = f"io_priority={io_priority!r} must be 0 (default), 1 (realtime), 2 (best effort), 3 (idle) or None"
        require(io_priority is None or io_priority in range(4), text)
        text = f"sigterm_timeout={sigterm_timeout!r} is not supported: calls run in a thread, which no signal ends"
        require(sigterm_timeout == _SIGTERM_TIMEOUT_S, f"{text}; leave it out")
        text = "cpu_shm_mode=True is not supported: arguments are copied, and calls run in this process; leave it out"
        require(not cpu_shm_mode, text)
        return cls(cpu_priority, io_priority)

    def apply(self) -> None:
        """Set the priorities of this thread and of the processes that it starts."""
        thread = threading.get_native_id()
        try:
            if self.nice > os.getpriority(os.PRIO_PROCESS, thread):
                os.setpriority(os.PRIO_PROCESS, thread, self.nice)
            if self.io_class is not None:
                psutil.Process(thread).ionice(self.io_class)
        except (OSError, psutil.Error, ValueError, AttributeError) as error:
            log.warning("asynchronous calls have the priority of training: cpu_priority, io_priority: %s", error)


class AsyncCallsQueue:
    """Run requests alongside training, and finalise them in order.

    Args:
        persistent: One thread runs all requests, one after the other, until :meth:`close`; otherwise each request has a
            separate thread and starts at once.
        is_daemon: No effect: the thread never keeps the process alive, and a call may start processes.
        cpu_priority: Nice value of the persistent thread and of the processes that its calls start, from 0 to 19; never
            lowered.
        io_priority: I/O class: 0 = the kernel's default, 1 = realtime, 2 = best effort, 3 = idle; ``None`` = unchanged.
        sigterm_timeout: Only the default: there is no process that a signal could end.
        cpu_shm_mode: Only ``False``: arguments are copied, and no memory is shared with a process.

    Raises:
        ConfigError: A value is out of range, or not supported.

    Thread: the thread of the training loop.
    """

    _warmed_up: ClassVar[_Priorities | None] = None
    """Priorities from :meth:`warmup_persistent_caller`, until a queue uses them."""

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = _SIGTERM_TIMEOUT_S,
        cpu_shm_mode: bool = False,
    ) -> None:
        self.persistent, self.is_daemon = persistent, is_daemon
        self.cpu_priority, self.io_priority = cpu_priority, io_priority
        self.sigterm_timeout, self.cpu_shm_mode = sigterm_timeout, cpu_shm_mode
        self._priorities = _Priorities.check(cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode)
        self.call_idx = -1
        """Number of the newest request."""
        self._calls: deque[_ScheduledCall] = deque()
        self._work: queue.SimpleQueue[_ScheduledCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._exchange = WorldExchange("the end of an asynchronous call", 2 * CALL_TIMEOUT_S)
        self._num_failures = 0
        self._token = ""
        """First part of this queue's keys in the TCPStore of the world."""
        self._world: weakref.ref[Any] | None = None
        """The world in which ``_token`` was drawn."""
        self._num_placed = 0

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = _SIGTERM_TIMEOUT_S,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Set the priorities of the next persistent thread. A thread, unlike a process, is not started in advance.

        Raises:
            ConfigError: A value is out of range, or not supported.
        """
        priorities = _Priorities.check(cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode)
        if cls._warmed_up is None:
            cls._warmed_up = priorities

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Copy the arguments of a request, and run it alongside training.

        The arguments are copied, also those of a :func:`functools.partial`: training may change them afterwards.
        Functions and the objects that they refer to, objects of methods, and handles (files, locks, queues) are not
        copied.

        Args:
            async_request: Also one of an older version, or of Megatron-Core's class.

        Returns:
            The number of the call, from 0.

        Raises:
            OutlastError: An argument cannot be copied; nothing is scheduled.
            Exception: Staging (``preload_fn``) raised it; nothing is scheduled.
            PeerLost: A peer exited, or did not arrive in time; only in the first call in a world.

        Collective: all ranks, with requests of the same kind.
        Blocks: during the copy; the first call in a world, until all ranks have arrived.
        """
        place = self._agree_place()
        number = self.call_idx + 1
        given = async_request._asdict()
        request = AsyncRequest(**{name: given[name] for name in AsyncRequest._fields if name in given})
        request = _snapshot(request)._replace(is_frozen=True, call_idx=number)
        self.call_idx = number
        call = _ScheduledCall(number, request, place=place)
        self._calls.append(call)
        _log_save(call, "Scheduling async checkpoint save (call %d)")
        if self not in _in_use:
            _in_use.add(self)
            at_exit(self.warn)
        self._start()
        self._work.put(call)
        if not self.persistent:
            self._work.put(None)
            self._thread = None
        return number

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalise the calls that have succeeded on all ranks, oldest first.

        A call that failed on any rank is dropped on all, and logged. That is an error with ``blocking``, and for the
        third failure in a row.

        Args:
            blocking: Wait until all calls have ended.
            no_dist: Read the status of the other ranks without a collective; ranks may finalise at different times.

        Returns:
            The numbers of the calls that were finalised.

        Raises:
            CheckpointError: A call failed, as described above, or could not be finalised.
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks, unless ``no_dist``.
        Blocks: with ``blocking`` until all calls have ended on all ranks, each at most an hour.
        """
        finalised: list[int] = []
        failure: CheckpointError | None = None
        while self._calls:
            call = self._calls[0]
            mine = call.outcome(blocking=blocking)
            outcomes = self._look(call, mine, blocking) if no_dist else self._exchange.gather(mine, _AsyncCallStatus)
            if not all(one.ended for one in outcomes):
                break
            self._calls.popleft()
            try:
                _agree(outcomes, what=_GIVEN_UP)
                _finalise(call.request, None if no_dist else self._exchange)
            except CheckpointError as error:
                log.error("%s", error)
                failure = error
                self._num_failures += 1
                if not blocking and self._num_failures < MAX_FAILURES:
                    continue
                if not blocking:
                    raise CheckpointError(f"{self._num_failures} calls in a row failed: {error}") from error
            else:
                self._num_failures = 0
                finalised.append(call.idx)
                _log_save(call, "async checkpoint save (call %d) is committed")
        if blocking and failure is not None:
            raise failure
        return finalised

    def get_num_unfinalized_calls(self) -> int:
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalise all calls, and end the thread. Idempotent.

        Args:
            abort: Finalise none; a running call is not waited for, and one that has not started is dropped.

        Raises:
            CheckpointError: A call failed, or could not be finalised.
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks, unless ``abort``.
        Blocks: until all calls have ended on all ranks, unless ``abort``.
        """
        try:
            if abort:
                self.warn()
                for call in self._calls:
                    call.is_given_up = True
                self._calls.clear()
            else:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            if self._thread is not None:
                self._work.put(None)
                self._thread = None
            self._exchange.close()
            self.call_idx = -1  # a restarted rank starts at the same number
            _in_use.discard(self)
            forget_at_exit(self.warn)

    def _start(self) -> None:
        if self._thread is None:
            priorities, self._work = None, queue.SimpleQueue()
            if self.persistent:
                priorities, AsyncCallsQueue._warmed_up = AsyncCallsQueue._warmed_up or self._priorities, None
            self._thread = threading.Thread(
                target=_run_calls, args=(self._work, priorities), name="outlast-async-calls", daemon=True
            )
            self._thread.start()

    def _agree_place(self) -> str:
        """Return the key prefix of the next call in the TCPStore of the world, the same on all ranks.

        Ranks may have created different numbers of queues, and a store may still contain keys of an earlier world. So
        the prefix contains a token that rank 0 draws once per queue and world.
        """
        if not is_initialised() or dist.get_world_size() == 1:
            return ""
        if self._world is None or self._world() is not dist.group.WORLD:
            self._token = self._exchange.gather(secrets.token_hex(8), str)[0]
            self._world, self._num_placed = weakref.ref(dist.group.WORLD), 0
        self._num_placed += 1
        return f"outlast/async/{self._token}/{self._num_placed}"

    def _look(self, call: _ScheduledCall, mine: _AsyncCallStatus, blocking: bool) -> list[_AsyncCallStatus]:
        """Return the status of the call on all ranks, from the TCPStore of the world."""
        if not is_initialised() or dist.get_world_size() == 1:
            return [mine]
        if not call.place:
            raise OutlastError(
                f"asynchronous call {call.idx} was scheduled before init_process_group(); finalise it without no_dist"
            )
        store = dist.distributed_c10d._get_default_store()
        keys = [f"{call.place}/{rank}" for rank in range(dist.get_world_size())]
        limit_s = CALL_TIMEOUT_S + CALL_MARGIN_S
        try:
            if mine.ended and not call.is_posted:
                store.set(keys[dist.get_rank()], msgspec.json.encode(mine).decode())
                call.is_posted = True
            if blocking:
                store.wait(keys, timedelta(seconds=limit_s))
            missing = _AsyncCallStatus(call_idx=call.idx, ended=False)
            return [from_json(store.get(key), _AsyncCallStatus) if store.check([key]) else missing for key in keys]
        except RuntimeError as error:
            raise PeerLost(
                f"a peer exited, or did not reach the end of asynchronous call {call.idx} within {limit_s:g} s "
                f"({error}); see that rank's log or the launcher's report for the cause"
            ) from error

    def warn(self) -> None:
        """Log which calls are not finalised."""
        if self._calls:
            numbers = ", ".join(str(call.idx) for call in self._calls)
            log.warning("asynchronous calls are not finalised, and what they wrote is not committed: %s", numbers)


_in_use: set[AsyncCallsQueue] = set()
"""Open queues that have taken a request. Each logs its lost calls at the end of the process."""


def abort_nvrx_checkpoint() -> None:
    """Close all queues of this process without finalising their calls, for an in-process restart."""
    for one in list(_in_use):
        one.close(abort=True)


def _run_calls(work: queue.SimpleQueue[_ScheduledCall | None], priorities: _Priorities | None) -> None:
    if priorities is not None:
        priorities.apply()
    while (call := work.get()) is not None:
        call.run()


def _log_save(call: _ScheduledCall, text: str) -> None:
    """Log a call of the script on rank 0; outlast's own saves are logged elsewhere."""
    work = call.request.async_fn
    is_first = not is_initialised() or dist.get_rank() == 0
    if work is not None and is_first and not str(getattr(work, "__module__", "")).startswith("outlast."):
        log.info(text, call.idx)
