"""Settings of leaving in time."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from outlast.config.base import nearest, require, require_finite

__all__ = ["PreemptionConfig"]

_ALLOWED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionConfig:
    """What tells a run to leave, and how long it may take to.

    The names are those of Megatron-LM, and so are their defaults, but for ``exit_signal_handler``: a session listens
    unless that is switched off.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    exit_signal_handler: bool = True
    """Stop and save on a signal; off = a signal does what it does without a session."""

    exit_signal: str | None = None
    """The signal, or several with commas between: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT. None = SIGTERM, and
    SIGUSR1 unless the script does something with it."""

    exit_signal_handler_for_dataloader: bool = False
    """Processes that this one forks, such as a DataLoader's workers, ignore the signals of others while this process
    lives: one sent to the whole process group leaves them at work until the save is done."""

    preempt_time: float = 60.0
    """Seconds before the end of the job's time limit, where the scheduler tells it (Slurm), at which the run stops and
    saves; 0 = the limit is not looked at."""

    shutdown_timeout: float | None = 600.0
    """Seconds from the first notice within which the process has ended, whatever it is doing; what is not saved by
    then is lost. 0 or none = as long as it takes. Under ``outlast run`` its ``--ft-shutdown-grace`` holds, too."""

    notice_file: str | None = None
    """File whose coming into being means: leave; looked for by one rank of each node."""

    notice_url: str | None = None
    """Address (http, https) whose answer may mean: leave. It does with status 200 and a text other than nothing,
    ``none``, ``false`` and ``0``. Asked by one rank of each node."""

    notice_url_header: str | None = None
    """Header to ask with, ``Name: value``, such as ``Metadata-Flavor: Google``; no place for secrets."""

    notice_plugin: str | None = None
    """A source of your own, ``package.module:name``: called without arguments, it returns an object with ``poll()``.
    Asked by one rank of each node."""

    poll_interval: float = 5.0
    """Seconds from one look at those sources to the next."""

    exit_duration_in_mins: float | None = None
    """Minutes after its start at which the run stops and saves; none = never for that reason."""

    exit_interval: int | None = None
    """Stop and save after every iteration that this divides; none = never for that reason."""

    def __post_init__(self) -> None:
        given: object = self.exit_signal
        if isinstance(given, int):  # signal.SIGTERM itself
            object.__setattr__(self, "exit_signal", signal.Signals(given).name)
        require_finite(self)
        for name in self.signal_names or ():
            require(
                name in _ALLOWED,
                f"exit_signal={self.exit_signal!r}: {name!r} is none to leave on; {nearest(name, _ALLOWED)}",
            )
        for switch in ("exit_signal", "exit_signal_handler_for_dataloader"):
            require(
                self.exit_signal_handler or not getattr(self, switch),
                f"{switch}={getattr(self, switch)!r} is of no use while exit_signal_handler is off; switch that on, or "
                f"leave {switch} out",
            )
        require(self.preempt_time >= 0, f"preempt_time={self.preempt_time} must not be negative; 0 = not looked at")
        require(
            self.shutdown_timeout is None or self.shutdown_timeout >= 0,
            f"shutdown_timeout={self.shutdown_timeout} must not be negative; 0 = as long as it takes",
        )
        require(self.poll_interval > 0, f"poll_interval={self.poll_interval} must be above 0 seconds")
        require(
            not self.preempt_time or self.poll_interval < self.preempt_time,
            f"poll_interval={self.poll_interval} must be below preempt_time={self.preempt_time}: the end of the time "
            "limit would be noticed too late",
        )
        url = self.notice_url
        require(
            url is None or url.startswith(("http://", "https://")),
            f"notice_url={url!r} must begin with http:// or https://; for a file there is notice_file",
        )
        header = self.notice_url_header
        require(header is None or ":" in header, f"notice_url_header={header!r} must be of the form 'Name: value'")
        require(
            header is None or url is not None, f"notice_url_header={header!r} is of no use without notice_url; name one"
        )
        plugin = self.notice_plugin
        require(
            plugin is None or all(plugin.partition(":")[::2]),
            f"notice_plugin={plugin!r} must be of the form 'package.module:name'",
        )
        minutes = self.exit_duration_in_mins
        require(minutes is None or minutes > 0, f"exit_duration_in_mins={minutes} must be above 0; none = never")
        interval = self.exit_interval
        require(interval is None or interval >= 1, f"exit_interval={interval} must be at least 1; none = never")

    @property
    def signal_names(self) -> tuple[str, ...] | None:
        """The signals by name, each once; ``None`` = the default ones."""
        if self.exit_signal is None:
            return None
        return tuple(dict.fromkeys(name.strip() for name in self.exit_signal.split(",")))
