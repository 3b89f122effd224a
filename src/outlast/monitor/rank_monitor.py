"""The worker's side of monitoring: heartbeats in well under a microsecond, and sections in two."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from outlast import logs
from outlast.config.launching import FaultToleranceConfig
from outlast.config.sources import merge_under
from outlast.env import WorkerEnv, read_worker
from outlast.errors import OutlastError
from outlast.monitor import stacks
from outlast.monitor.examination import Responder
from outlast.monitor.hang_watch import HangWatchTask
from outlast.monitor.learned_timeouts import MERGE_S, LearnedTimeouts, observe
from outlast.policy.deadlines import STANDARD, STEP, Learned, Timeouts, override
from outlast.policy.inprocess_protocol import InProcessState
from outlast.runtime.agent_process import AgentDuty
from outlast.runtime.board import Board, RankPage, RankState, agent_address
from outlast.runtime.files import write_optional

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
_open_monitor: RankMonitor | None = None
_MAX_DUTIES = 3
"""Agent processes of a rank, one after the other; more failures have another cause."""
_ALL_DURATIONS = 1 << 62
"""Number of first durations that are not measured, for sections that are never measured."""


class SectionTimer:
    """Mark a section: a context manager that may be nested in itself, and a decorator.

    One object serves every use of a section's name; the open sections are in the heartbeat memory.
    """

    __slots__ = ("_index", "_open", "_shut")

    def __init__(self, index: int, open_: Callable[[int], None], shut: Callable[[int], None]) -> None:
        self._index = index
        self._open = open_
        self._shut = shut

    def __enter__(self) -> None:
        self._open(self._index)

    def __exit__(self, *_: object) -> None:
        self._shut(self._index)

    def opens_with(self, open_: Callable[[int], None]) -> None:
        """Open the section with another function from now on, wherever it is used."""
        self._open = open_

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with every call of it marked.

        Raises:
            TypeError: The function returns before its work is done (a coroutine or generator function).
        """
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"{function.__qualname__} returns before its work is done: use 'with monitor.section()' in it"
            )

        @functools.wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return marked


class WatchLink:
    """The watch over this rank: the launcher's agent has it, else a duty in the node's agent process.

    Args:
        env: The rank's place.
        config: The settings in force, learned timeouts included.
        configured: The settings without learned timeouts.
        run_dir: The run directory, if any.
        learned_in: Folder of the learned timeouts; ``None``: none are learned.
        board: The heartbeat memory; stays the caller's.
        page: The rank's page in it.

    Raises:
        OutlastError: Another process has this local rank.

    Thread: :meth:`enforce` and :meth:`stop` the one that made it.
    """

    def __init__(
        self,
        env: WorkerEnv,
        *,
        config: FaultToleranceConfig,
        configured: FaultToleranceConfig,
        run_dir: Path | None,
        learned_in: Path | None,
        board: Board,
        page: RankPage,
    ) -> None:
        self._env, self._config, self._configured = env, config, configured
        self._run_dir, self._learned_in = run_dir, learned_in
        self._board, self._page = board, page
        self._level = logging.INFO if env.is_first else logging.DEBUG
        self.cycle = f"{env.job}-{env.cycle}"
        """Names the job and cycle, for learned timeouts."""
        self._who = f"rank {env.global_rank} (node {env.node}, pid {os.getpid()}, cycle {env.cycle})"
        self._calculated: Learned | None = None
        self._duty: AgentDuty | None = None
        self._num_duties = 0
        self._is_stopped = False
        self.timeouts = Timeouts.of_rank(config, configured=configured, replaces_dead_ranks=env.replaces_dead_ranks)
        """The timeouts that are enforced, those that the script calculated not included."""
        log.debug("%s uses %s", self._who, self.timeouts.describe())
        self.wake_agent()
        self._responder = self._respond(-1 if self._has_agent else self._start_duty())

    @property
    def _has_agent(self) -> bool:
        return self._env.board is not None

    @property
    def pid(self) -> int | None:
        """Process id of the agent process that watches the rank; ``None``: none does."""
        return None if self._duty is None else self._duty.pid

    def wake_agent(self) -> None:
        """Have the launcher's agent, if there is one, read the heartbeat memory. Blocks: never."""
        if not self._has_agent:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
            try:
                channel.sendto(b"", agent_address(self._board.token))
            except OSError as error:  # also a full queue: its first message makes the agent look
                log.debug("the agent was not woken by local rank %d: %s", self._env.local_rank, error)

    def enforce(self, calculated: Learned) -> None:
        """Enforce timeouts that the script calculated; they have priority over configured and learned ones.

        Each call replaces the timeouts of the one before; those that ``calculated`` does not have stay as configured.
        Under ``outlast run`` all ranks of a node have the same timeouts: give the same on all ranks.

        Raises:
            ConfigError: There are too many.
        """
        self._page.set_timeouts(msgspec.json.encode(calculated).decode())
        self._calculated = calculated
        if self._has_agent:
            self.wake_agent()
        elif self._duty is not None:
            with suppress(OSError):  # the agent process is gone, and the next one reads the heartbeat memory
                self._duty.line.send(b"\1")
        elif (line := self._start_duty()) >= 0:
            self._responder.stop()
            self._responder = self._respond(line)

    def stop(self) -> None:
        """End the responder and the duty. Blocks: a few milliseconds."""
        self._is_stopped = True
        self._responder.stop()
        if self._duty is not None:
            self._duty.release()

    def _respond(self, line: int) -> Responder:
        local_rank = self._page.local_rank
        try:
            responder = Responder(
                self._board.token,
                local_rank,
                record=self._page.set_collectives,
                line=line,
                on_line_end=self._replace_duty,
            )
        except OSError as error:
            raise OutlastError(
                f"another process already has local rank {local_rank} of this node ({error}); "
                "give each worker a different LOCAL_RANK"
            ) from error
        responder.start()
        return responder

    def _start_duty(self) -> int:
        """Start the watch, if there is a timeout to enforce; return a descriptor that is readable at its end, or -1."""
        timeouts = self.timeouts if self._calculated is None else override(self.timeouts, self._calculated)
        if timeouts.smallest_s() is None:
            off = self._config.given.get("enable_ft_package") is False
            why = "enable_ft_package is off" if off else "no timeout is set"
            log.log(self._level, "%s is not watched: %s", self._who, why)
            return -1
        folder = None if self._run_dir is None else str(self._run_dir / "stacks" / f"cycle-{self._env.cycle}")
        counts_in = LearnedTimeouts.counts_in(self._configured, self._run_dir)
        try:
            self._duty = AgentDuty(
                "outlast.monitor.hang_watch",
                HangWatchTask(
                    pid=os.getpid(),
                    rank=self._env.global_rank,
                    node=self._env.node,
                    config=self._config.to_json(),
                    stacks_dir=folder,
                    cycle=self.cycle,
                    configured=self._configured.to_json(),
                    learned_in=None if self._learned_in is None else str(self._learned_in),
                    counts_in=None if counts_in is None else str(counts_in),
                    is_first=self._env.global_rank == 0,
                ),
                self._env,
                fds=[self._board.fd],
            )
        except OSError as error:
            is_first = self._env.local_rank == 0  # it is the same on all ranks of the node
            log.log(
                logging.WARNING if is_first else logging.DEBUG,
                "%s: no agent process can be started, so hangs are not detected: %s",
                *(self._who, error),
            )
            return -1
        self._num_duties = 1
        log.log(
            self._level,
            "agent process %d of node %s watches %s and ends it with %s when it hangs, for its launcher to restart it",
            *(self._duty.pid, self._env.node, self._who, self._config.rank_termination_signal),
        )
        return self._duty.line.fileno()

    def _replace_duty(self) -> bool:
        """Start another agent process in place of one that is gone; return whether that works.

        Thread: the responder's.
        """
        assert self._duty is not None
        if self._is_stopped:
            return False
        pid, why = self._duty.pid, f"{self._num_duties} have ended"
        if self._num_duties < _MAX_DUTIES:
            self._num_duties += 1
            try:
                self._duty.restart()
            except OSError as error:
                why = str(error)
            else:
                log.warning("agent process %d ended: agent process %d watches %s", pid, self._duty.pid, self._who)
                return True
        log.warning(
            "agent process %d ended, and no other is started (%s): hangs of %s are not detected any more",
            *(pid, why, self._who),
        )
        return False


class RankMonitor:
    """Report this worker's heartbeats and sections to the node's watchdog.

    The monitor attaches to the heartbeat memory of the agent of ``outlast run``. Without ``outlast run``, and with a
    timeout to enforce, the node's agent process, which the first rank of the node starts, ends this worker when it
    hangs.

    Args:
        config: Timeouts and other settings. Under an agent its settings come before these, field by field, and the
            agent uses the others.
        run_dir: The run directory (stacks, learned timeouts); ``None``: the agent's, if any.

    Raises:
        OutlastError: This process has a monitor already, or the agent's heartbeat memory is not usable.

    Thread: make it on the thread that trains: sections belong to that thread, those of other threads are not watched
    (logged once). Heartbeats may come from any thread.
    """

    pid: int

    def __init__(
        self, config: FaultToleranceConfig | None = None, run_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._attach(read_worker(), config, run_dir)

    def _attach(
        self,
        env: WorkerEnv,
        config: FaultToleranceConfig | None,
        run_dir: str | os.PathLike[str] | None,
        not_learned: Sequence[str] = (),
    ) -> None:
        global _open_monitor
        replaced = open_monitor()
        if replaced is not None:
            if replaced.on_replaced is None:
                raise OutlastError("this process has a RankMonitor already; use that one, or close() it first")
            replaced.close()
        self.on_replaced: Callable[[RankMonitor], None] | None = None
        """Lets a later monitor of this process replace this one, which is closed then: called with the later monitor
        once it is attached, in its thread; ``None``: a second monitor is an error."""
        self.env = env
        logs.configure_worker(self.env.global_rank, self.env.node)
        folder = run_dir if run_dir is not None else self.env.run_dir
        self._run_dir = None if folder is None else Path(folder)
        self._configured = merge_under(self.env.fault_tolerance if self.env.board is not None else None, config)
        self.config = self._configured
        """The settings in force, learned timeouts included."""
        self.pid = os.getpid()
        self._sections: dict[str, SectionTimer] = {}
        self._warned: set[str] = set()
        self._level = logging.INFO if self.env.is_first else logging.DEBUG
        self._who = f"rank {env.global_rank} (node {env.node}, pid {self.pid}, cycle {env.cycle})"
        self._closed = False
        self._last_state: RankState
        stacks.register()
        stacks.follow(threading.get_ident())
        if self.env.board is not None:
            self._board = Board.open(self.env.board)
            local_rank = self.env.local_rank
        else:
            self._board, local_rank = Board.create(num_ranks=1), 0
        self._learned_in = LearnedTimeouts.folder(self._configured, self._run_dir)
        if self._learned_in is not None:
            self.config = LearnedTimeouts.load(self._learned_in).apply(self._configured)
        self.page = self._board.rank(local_rank)
        self.page.attach(
            pid=self.pid,
            global_rank=self.env.global_rank,
            cycle=self.env.cycle,
            warmup={STEP: self.config.num_warmup_iterations, **dict.fromkeys(not_learned, _ALL_DURATIONS)},
            settings=config.to_json() if config is not None and config.given else "",
        )
        self.watch = WatchLink(
            env,
            config=self.config,
            configured=self._configured,
            run_dir=self._run_dir,
            learned_in=self._learned_in,
            board=self._board,
            page=self.page,
        )
        _open_monitor = self
        atexit.register(self.close)
        if replaced is not None and replaced.on_replaced is not None:
            replaced.on_replaced(self)

    # -- sections and heartbeats ---------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Record that this rank is alive. Thread: any."""
        self.page.heartbeat()

    def section(self, name: str) -> SectionTimer:
        """Return the marker of a section, for ``with monitor.section("step"):`` or as a decorator.

        Sections nest, also in themselves. A section without a timeout is measured, not enforced (logged once).

        Raises:
            ConfigError: The name is empty or longer than 39 bytes.
        """
        timer = self._sections.get(name)
        return timer if timer is not None else self._new_section(name)

    def start_section(self, name: str) -> None:
        """Enter a section, for code that no ``with`` fits around."""
        self.section(name).__enter__()

    def end_section(self, name: str) -> None:
        """Leave the innermost open section of this name, also from within others; none: logged once."""
        if not self.page.leave(name) and name not in self._warned:
            self._warned.add(name)
            log.warning("end_section(%r): %s is in no such section", name, self._who)

    def end_all_sections(self) -> None:
        """Leave every open section, for instance in an exception handler."""
        while self.page.leave():
            pass

    def call_in(self, name: str, callback: Callable[[], None]) -> None:
        """Call ``callback`` each time that the section ``name`` was entered, in it; an exception ends the section."""

        def enter(index: int) -> None:
            self.page.open(index)
            try:
                callback()
            except BaseException:
                self.page.shut(index)
                raise

        self.section(name).opens_with(enter)

    def _new_section(self, name: str) -> SectionTimer:
        timer = SectionTimer(self.page.intern(name), self.page.open, self.page.shut)
        self._sections[name] = timer
        if self.watch.timeouts.sections.get(name) is None:
            # Without any section timeout the run is watched by heartbeats.
            level = self._level if self.watch.timeouts.sections and name not in STANDARD else logging.DEBUG
            log.log(level, "section %r has no timeout: it is measured, not enforced", name)
        return timer

    # -- facts ---------------------------------------------------------------------------------------------

    def set_iteration(self, iteration: int) -> None:
        """Record the number of optimizer steps done."""
        self.page.set_iteration(iteration)

    def set_durable_iteration(self, iteration: int) -> None:
        """Record the highest iteration that is saved permanently; restart budgets reset on it."""
        self.page.set_durable_iteration(iteration)

    def report_progress(self) -> None:
        """Record that this worker reports durable iterations: none yet means no progress, not unknown."""
        self.page.report_progress()

    def set_restored(self) -> None:
        """Record that a checkpoint was loaded: only then is the timeout of ``setup`` learned."""
        self.page.set_restored()

    def promise_heartbeats(self, promised: bool) -> None:
        """Record whether this rank sends heartbeats while it is healthy: default timeouts apply only then."""
        if not self._closed:
            self.page.promise_heartbeats(promised)

    def set_leaving(self, exit_code: int) -> None:
        """Record the exit code with which this process is about to end, before its peers can detect the end."""
        self.page.set_leaving(exit_code)

    def _read_state(self) -> RankState:
        return self._last_state if self._closed else self._board.read(self.page.local_rank)

    # -- end -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Record that this rank is done: no timeout is enforced on it any more; idempotent.

        Without ``outlast run``, whose agent does it, learned timeouts are saved.
        """
        if self._closed or os.getpid() != self.pid or self._read_state().finished:
            return
        self.page.finish()
        self._learn(finished=True)

    def _learn(self, *, finished: bool) -> None:
        if self.env.board is None and (folder := self._learned_in) is not None:
            seen = observe([self._read_state()])
            update = functools.partial(
                LearnedTimeouts.update, folder, seen, cycle=self.watch.cycle, config=self._configured, finished=finished
            )
            learned = write_optional("learned timeouts", folder, update, timeout_s=MERGE_S)
            if learned and self.env.is_first:
                learned.log_suggestion()

    def note_protection(self, text: str) -> None:
        """Report the session's protection to the agent, for the line on a run's protection."""
        self.page.set_protection(text)
        self.watch.wake_agent()

    def close(self) -> None:
        """End the watch and the responder; idempotent, and called at exit.

        Later heartbeats and sections have no effect. Blocks: a few milliseconds.
        """
        global _open_monitor
        if self._closed or os.getpid() != self.pid:  # a forked child must not end its parent's
            return
        self.page.finish()
        self._last_state = self._read_state()
        self._closed = True
        atexit.unregister(self.close)
        self.watch.stop()
        self._board.close()
        _open_monitor = None


def open_monitor() -> RankMonitor | None:
    """Return this process's monitor, if there is one."""
    return _open_monitor if _open_monitor is not None and _open_monitor.pid == os.getpid() else None


class PlacedRankMonitor(RankMonitor):
    """The monitor of a worker whose place is known: a session's, or an actor's.

    Args:
        env: The place.
        config: As for :class:`RankMonitor`.
        run_dir: As for :class:`RankMonitor`.
        not_learned: Sections whose durations vary too much for a timeout to be learned from them.
    """

    def __init__(
        self,
        env: WorkerEnv,
        config: FaultToleranceConfig | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        not_learned: Sequence[str] = (),
    ) -> None:
        self._attach(env, config, run_dir, not_learned)

    @property
    def board_state(self) -> RankState:
        """This rank's state as the watchdog reads it."""
        return self._read_state()

    def report_set_up(self) -> None:
        """Have the agent read the restored checkpoint: an in-process restart is judged by it."""
        if self.env.board is not None and self._read_state().in_process != InProcessState.OFF:
            self.watch.wake_agent()

    def note_failure(self) -> None:
        """Save learned timeouts, without an agent, although this rank fails; the watch continues."""
        if not self._closed and os.getpid() == self.pid and not self._read_state().finished:
            self._learn(finished=False)
