"""Being told to leave: by a signal, the scheduler's time limit, a notice of another source, or the agent."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from outlast import clock
from outlast.config import PreemptionConfig
from outlast.env import WorkerEnv, environ
from outlast.errors import ExitReason
from outlast.incidents import EventKind
from outlast.preemption.listener import Notice, ShutdownListener
from outlast.preemption.signals import does_nothing_else
from outlast.preemption.sources import EndTime, NoticeFile, NoticeSource, NoticeURL, load_source
from outlast.runtime.journal import Journal

__all__ = ["Departure"]

log = logging.getLogger(__name__)
_PEER = "peer"


class Departure:
    """What this rank knows about having to leave, and with which exit code it does.

    Off the main thread no signal can be watched: SIGTERM then ends the process as if there were no session.

    Args:
        config: What to listen to; ``None`` for the defaults.
        place: This worker's place.
        journal: Where notices are written.
        stop_requested: Whether the agent asked this rank to stop.
        iteration: Tells the number of optimizer steps done.
        kept: Tells the newest iteration that there is a generation of; ``None`` = there is none. Thread: any.
        write_end: Writes the end of the session with its exit code.
        grace_s: Seconds after which the agent ends this rank; ``None`` or 0 = there is none that would.

    Raises:
        ConfigError: The plug-in cannot be had.
    """

    def __init__(
        self,
        config: PreemptionConfig | None,
        *,
        place: WorkerEnv,
        journal: Journal,
        stop_requested: Callable[[], bool],
        iteration: Callable[[], int],
        kept: Callable[[], int | None],
        write_end: Callable[[int], None],
        grace_s: float | None = None,
    ) -> None:
        self._config = config = config or PreemptionConfig()
        self._journal, self._rank = journal, place.global_rank
        self._stop_requested, self._iteration, self._kept = stop_requested, iteration, kept
        self._write_end = write_end
        self._agent_was_heard = False
        # An agent sends its signal to all its workers: one of the node says so.
        self._notice_level = logging.WARNING if place.board is None or place.local_rank == 0 else logging.INFO
        signals = _signals(config)
        self.watches_signals = bool(signals)
        """Whether a signal leads to a graceful stop."""
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

    def asked(self) -> int:
        """Return the number of the signal that told this rank to leave (SIGTERM for other notices), or 0."""
        if not self._agent_was_heard and self._stop_requested():
            self._agent_was_heard = True
            self._listener.request("the launcher says so", source="agent")
        interval = self._config.exit_interval
        is_due = interval is not None and (self._iteration() + 1) % interval == 0
        return self._number() if self._listener.is_requested or is_due else 0

    @property
    def is_told(self) -> bool:
        """Whether this rank knows that it has to leave."""
        return self._listener.is_requested

    def start_leaving(self) -> None:
        """Take in that all ranks agreed to leave now: the deadline also runs for who was not told itself."""
        if not self._listener.is_requested:
            self._listener.request("all ranks agreed to leave", source=_PEER)

    def wait_to_give_up(self, timeout_s: float) -> bool:
        """Wait until a save is to be given up; return whether it is. Blocks: up to ``timeout_s`` seconds."""
        return self._listener.wait_to_give_up(timeout_s)

    def exit_code(self) -> int:
        """Return the exit code to leave with: 75 if there is a generation to go on from, else 128 + the signal."""
        return int(ExitReason.PREEMPTED) if self._kept() is not None else 128 + self._number()

    def say_farewell(self) -> int:
        """Say what is lost, and return the exit code to leave with."""
        code = self.exit_code()
        level = logging.INFO if code == ExitReason.PREEMPTED and not self._loses else logging.WARNING
        log.log(level if self._rank == 0 else logging.DEBUG, "%s; exiting with code %d", self.describe_loss(), code)
        return code

    @property
    def _loses(self) -> bool:
        return (self._kept() or 0) < self._iteration()

    def describe_loss(self) -> str:
        """Say which iterations are lost when this process ends now; one line for people."""
        kept, done = self._kept(), self._iteration()
        if kept is not None and kept >= done:
            return f"iteration {kept} is saved, nothing is lost"
        first = (kept or 0) + 1
        lost = f"iteration {done} is lost" if first >= done else f"iterations {first} to {done} are lost"
        if kept is None:
            return f"{lost}: there is no saved generation" if done else "nothing was done yet"
        return f"{lost}: the newest saved generation is that of iteration {kept}"

    def close(self) -> None:
        """Let signals end this process again, and the deadline not. Idempotent. Thread: the main thread."""
        self._listener.close()

    def _number(self) -> int:
        first = self._listener.first
        return int(signal.SIGTERM) if first is None or first.signal is None else first.signal

    def _on_notice(self, notice: Notice) -> None:
        # In a thread of the listener: the main thread may be inside a collective.
        if notice.source == _PEER:
            return  # who was told has said so
        facts: dict[str, Any] = {"source": notice.source, "reason": notice.reason}
        facts |= {} if notice.signal is None else {"signal": notice.signal}
        facts |= {} if notice.deadline_s is None else {"deadline_s": round(notice.deadline_s, 3)}
        self._journal.write(EventKind.NOTICE, rank=self._rank, **facts)
        if notice.gives_up:
            log.log(self._notice_level, "Received signal %d again, leaving at once", notice.signal)
        elif notice.ordinal > 1:
            log.warning("shutdown requested again by %s: %s", notice.source, notice.reason)
        elif notice.signal is not None:
            when = _by_when(notice)
            log.log(self._notice_level, "Received signal %d, initiating graceful stop%s", notice.signal, when)
        else:
            log.warning(
                "Shutdown requested by %s (%s), initiating graceful stop%s",
                notice.source,
                notice.reason,
                _by_when(notice),
            )

    def _before_exit(self, code: int) -> None:
        self._write_end(code)
        log.warning("%s", self.describe_loss())


def _by_when(notice: Notice) -> str:
    return "" if notice.deadline_s is None else f" (within {notice.deadline_s:.0f} s)"


def _signals(config: PreemptionConfig) -> tuple[int, ...]:
    if not config.exit_signal_handler or threading.current_thread() is not threading.main_thread():
        return ()
    if config.signal_names is not None:
        return tuple(int(signal.Signals[name]) for name in config.signal_names)
    usual = [signal.SIGTERM]
    if does_nothing_else(signal.SIGUSR1):  # it would end the process, and nothing were saved
        usual.append(signal.SIGUSR1)
    return tuple(int(number) for number in usual)


def _sources(config: PreemptionConfig, *, is_nodes_first: bool) -> list[NoticeSource]:
    """Return what else gives notice to this rank; a file or an address is looked at by one rank of each node."""
    sources: list[NoticeSource] = []
    if config.preempt_time and (left_s := _job_left_s()) is not None:
        what = "the job's time limit ends"
        sources.append(EndTime(left_s, lead_s=config.preempt_time, what=what, name="time_limit"))
    if (minutes := config.exit_duration_in_mins) is not None:
        what = f"exit_duration_in_mins={minutes:g} is over"
        sources.append(EndTime(minutes * 60, lead_s=0, what=what, name="exit_duration_in_mins", is_hard=False))
    if is_nodes_first:
        if config.notice_file is not None:
            sources.append(NoticeFile(config.notice_file))
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
