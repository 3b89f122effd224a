"""Preemption: notices from signals, the scheduler's time limit and other sources, and the exit code."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

from outlast import clock
from outlast.config import PreemptionConfig
from outlast.env import WorkerEnv, environ
from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.monitor.rank_monitor import PlacedRankMonitor
from outlast.policy.durability import Durability, describe_end
from outlast.preemption.listener import (
    EndTime,
    Notice,
    NoticeFile,
    NoticeSource,
    NoticeURL,
    ShutdownListener,
    load_source,
)
from outlast.preemption.signals import does_nothing_else
from outlast.runtime.journal import Journal
from outlast.runtime.processes import job_started_s

if TYPE_CHECKING:
    from outlast.checkpoint.manager import CheckpointEngine


log = logging.getLogger(__name__)
_PEER = "peer"


class Preemption:
    """This rank's requested shutdown and exit code.

    Off the main thread signals cannot be handled: SIGTERM then ends the process as without a session.

    Raises:
        ConfigError: The notice plug-in is unavailable.
    """

    def __init__(
        self, config: PreemptionConfig | None, *, place: WorkerEnv, journal: Journal, monitor: PlacedRankMonitor
    ) -> None:
        self._config = config = config or PreemptionConfig()
        self._journal, self._rank, self._monitor = journal, place.global_rank, monitor
        self.manager: CheckpointEngine | None = None
        """Saves the state; ``None`` = nothing does, or not yet."""
        self._outlives_session = False
        # An agent signals all its workers; one of the node logs the signal.
        self._notice_level = logging.WARNING if place.board is None or place.local_rank == 0 else logging.INFO
        signals = _signals(config)
        self.watches_signals = bool(signals)
        """Whether a signal leads to a graceful stop."""
        grace_s = monitor.config.shutdown_grace if place.board is not None else None
        self._listener = ShutdownListener(
            signals,
            sources=_sources(config, is_nodes_first=place.local_rank == 0),
            poll_interval_s=config.poll_interval,
            deadline_s=min(filter(None, (config.shutdown_timeout, grace_s)), default=None),
            exit_code=self.exit_code,
            on_notice=self._on_notice,
            before_exit=self._before_exit,
            keep_forked=config.exit_signal_handler_for_dataloader,
        )

    def requested_signal(self, iteration: int) -> int:
        """Return the number of the signal that requests the shutdown (SIGTERM for other notices), or 0.

        Args:
            iteration: Number of optimizer steps done before the current one.
        """
        interval = self._config.exit_interval
        is_due = interval is not None and (iteration + 1) % interval == 0
        return self._number() if self._listener.is_requested or is_due else 0

    @property
    def is_requested(self) -> bool:
        return self._listener.is_requested

    def start_leaving(self) -> None:
        """Start the deadline on ranks without a notice too, once all ranks agreed to exit."""
        if not self._listener.is_requested:
            self._listener.request("all ranks agreed to leave", source=_PEER)

    def wait_to_give_up(self, timeout_s: float) -> bool:
        """Wait until a save must be abandoned; return whether it must. Blocks: up to ``timeout_s`` seconds."""
        return self._listener.wait_to_give_up(timeout_s)

    def exit_code(self) -> int:
        """Return 75 if a checkpoint survives the end of the job, else 128 + the signal."""
        return int(ExitReason.PREEMPTED) if self._saved_iteration is not None else 128 + self._number()

    def log_exit(self) -> int:
        """Log which iterations are lost, and return the exit code."""
        code = self.exit_code()
        loses = (self._saved_iteration or 0) < self._monitor.board_state.iteration
        level = logging.INFO if code == ExitReason.PREEMPTED and not loses else logging.WARNING
        log.log(level if self._rank == 0 else logging.DEBUG, "%s; exiting with code %d", self.describe_loss(), code)
        return code

    def describe_loss(self) -> str:
        """Return in one line which iterations are lost if the job ends now."""
        return describe_end(self._durability, self._monitor.board_state.iteration)

    def outlive_session(self) -> None:
        """Keep the signal handlers and the deadline after :meth:`close`, because the process is about to exit.

        torchrun ends the other ranks when the first one exits; their exit codes must still be the session's.
        """
        self._outlives_session = True

    def close(self) -> None:
        """Restore the signals' default action and stop the deadline. Idempotent. Thread: the main thread."""
        if not self._outlives_session:
            self._listener.close()

    @property
    def _durability(self) -> Durability:
        """The durable saves of the session or, as its monitor records, of the script or its trainer."""
        if self.manager is not None:
            return self.manager.durability
        saved = self._monitor.board_state.durable_iteration
        return Durability(saved, saved, saved)

    @property
    def _saved_iteration(self) -> int | None:
        return self._durability.job

    def _number(self) -> int:
        first = self._listener.first
        return int(signal.SIGTERM) if first is None or first.signal is None else first.signal

    def _on_notice(self, notice: Notice) -> None:
        # Runs in a thread of the listener: the main thread may be in a collective.
        if notice.source == _PEER:
            return  # logged by the rank that received the notice
        facts: dict[str, Any] = {"source": notice.source, "reason": notice.reason}
        facts |= {} if notice.signal is None else {"signal": notice.signal}
        facts |= {} if notice.deadline_s is None else {"deadline_s": round(notice.deadline_s, 3)}
        self._journal.write(EventKind.NOTICE, rank=self._rank, **facts)
        when = "" if notice.deadline_s is None else f" (within {notice.deadline_s:.0f} s)"
        if notice.gives_up:
            log.log(self._notice_level, "Received signal %d again, leaving at once", notice.signal)
        elif notice.ordinal > 1:
            log.warning("shutdown requested again by %s: %s", notice.source, notice.reason)
        elif notice.signal is not None:
            log.log(self._notice_level, "Received signal %d, initiating graceful stop%s", notice.signal, when)
        else:
            text = "Shutdown requested by %s (%s), initiating graceful stop%s"
            log.warning(text, notice.source, notice.reason, when)

    def _before_exit(self, code: int) -> None:
        iteration = self._monitor.board_state.iteration
        self._journal.write(EventKind.SESSION_ENDED, rank=self._rank, iteration=iteration, exit_code=code)
        log.warning("%s", self.describe_loss())


def _signals(config: PreemptionConfig) -> tuple[int, ...]:
    if not config.exit_signal_handler or threading.current_thread() is not threading.main_thread():
        return ()
    if config.signal_names is not None:
        return tuple(int(signal.Signals[name]) for name in config.signal_names)
    if does_nothing_else(signal.SIGUSR1):  # by default it ends the process without a save
        return int(signal.SIGTERM), int(signal.SIGUSR1)
    return (int(signal.SIGTERM),)


def _sources(config: PreemptionConfig, *, is_nodes_first: bool) -> list[NoticeSource]:
    """Return the other notice sources of this rank; one rank of each node polls a file, address or plug-in."""
    sources: list[NoticeSource] = []
    if config.preempt_time and (left_s := _job_left_s()) is not None:
        what = "the job's time limit ends"
        sources.append(EndTime(left_s, lead_s=config.preempt_time, what=what, name="time_limit"))
    if (minutes := config.exit_duration_in_mins) is not None:
        what = f"exit_duration_in_mins={minutes:g} is over"
        sources.append(EndTime(minutes * 60, lead_s=0, what=what, name="exit_duration_in_mins", is_hard=False))
    if is_nodes_first:
        if config.notice_file is not None:
            sources.append(NoticeFile(config.notice_file, job_started_s=job_started_s()))
        if config.notice_url is not None:
            sources.append(NoticeURL(config.notice_url, header=config.notice_url_header))
        if config.notice_plugin is not None:
            sources.append(load_source(config.notice_plugin))
    return sources


def _job_left_s() -> float | None:
    """Return the seconds until Slurm ends the job; ``None`` = not known, or no limit."""
    text = environ().get("SLURM_JOB_END_TIME", "")
    left_s = clock.seconds_until(int(text)) if text.isdecimal() else 0.0
    return left_s if 0 < left_s < 10 * 365 * 86400 else None
