"""The log: one format for all processes of a run, on standard error.

    12:34:56.789 INFO [agent a] cycle 0: ranks 0 to 1 of 2 run here

A process configures the ``outlast`` logger once at its start, never the root logger: an application that configures
logging, before or after, receives these lines through its handlers. Level and format come from the environment, so that
all processes of a node agree. Nothing is configured at import.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from outlast import clock, env
from outlast.errors import ConfigError
from outlast.queued_writer import StreamWriter, writer_of
from outlast.wording import printable

LEVELS = ("debug", "info", "warning", "error")
"""Valid values of ``--log-level`` and ``OUTLAST_LOG_LEVEL``."""
_FORMATS = ("text", "json")

OUTCOME = "outlast.outcome"
"""Name of the logger for a run's last line, which is written at every level."""
_PACKAGE = "outlast"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    level: int = logging.INFO
    as_json: bool = False
    is_level_given: bool = False
    """The user set this level; otherwise the level of an application that configured logging applies."""


def read_settings(variables: Mapping[str, str] | None = None) -> LogSettings:
    """Read the log settings from the environment.

    Args:
        variables: Variables to read instead of the environment of this process.

    Raises:
        ConfigError: A value is not one of the known ones.
    """
    values = env.environ() if variables is None else variables
    level = _choose(env.LOG_LEVEL, values.get(env.LOG_LEVEL, ""), LEVELS)
    form = _choose(env.LOG, values.get(env.LOG, ""), _FORMATS)
    return LogSettings(
        level=logging.getLevelNamesMapping()[level.upper()] if level else logging.INFO,
        as_json=form == "json",
        is_level_given=bool(level),
    )


def _choose(name: str, text: str, known: tuple[str, ...]) -> str:
    value = text.strip().lower()
    if value and value not in known:
        raise ConfigError(f"environment variable {name}={text!r} is not one of {', '.join(known)}; correct or unset it")
    return value


def configure(
    where: str,
    *,
    node: str = "",
    rank: int | None = None,
    threads: Mapping[str, str] | None = None,
    path: str = "",
    least: int = logging.DEBUG,
    is_shared: bool = False,
) -> None:
    """Write the package's log lines of this process to standard error, in the common format.

    A second call replaces the first configuration. If the application configured logging, its handlers stay and nothing
    is added. An invalid value in the environment is only a warning here; :func:`read_settings` refuses it.

    Args:
        where: Text in brackets that identifies the process.
        node: Name of the node, for JSON.
        rank: Global rank, for JSON.
        threads: Text in brackets for the threads with these names.
        path: File to append to instead of standard error.
        least: Minimum level, unless the environment sets ``debug``.
        is_shared: The process belongs to an application, whose handlers receive the lines once they exist.

    Thread: any; one at a time.
    """
    problem = None
    try:
        settings = read_settings()
    except ConfigError as error:
        settings, problem = LogSettings(), error
    logger = logging.getLogger(_PACKAGE)
    own = [handler for handler in logger.handlers if isinstance(handler, _Handler)]
    for handler in own:
        logger.removeHandler(handler)
        handler.close()
        if logger.level == handler.level_set:
            logger.setLevel(logging.NOTSET)
        logger.propagate = True
    level = settings.level if settings.level <= logging.DEBUG else max(settings.level, least)
    if logging.getLogger().handlers or logger.handlers:
        if settings.is_level_given:
            logger.setLevel(level)
        return
    handler = _Handler(path, level_set=level, is_shared=is_shared)
    kind = _JsonFormatter if settings.as_json else _LineFormatter
    handler.setFormatter(kind(where, threads or {}, node=node, rank=rank))
    logger.addHandler(handler)
    logger.propagate = is_shared
    # An unset level inherits that of the application, which is WARNING by default.
    if settings.is_level_given or (logger.level == logging.NOTSET and not (is_shared and level == logging.WARNING)):
        logger.setLevel(level)
    logging.getLogger(OUTCOME).setLevel(logging.INFO)
    if problem is not None:
        logger.warning("%s", problem)


def configure_worker(rank: int, node: str, *, least: int = logging.INFO) -> None:
    """Configure the log of a training process; rank 0 logs what is the same on all ranks.

    The other ranks log warnings and errors only, unless the level is ``debug``. Arguments as for :func:`configure`.

    Thread: any; one at a time.
    """
    least = least if rank == 0 else logging.WARNING
    configure(f"rank {rank}", node=node, rank=rank, least=least, is_shared=True)


class _Handler(logging.Handler):
    """Write each record with one call, so that lines of processes that share a terminal stay whole.

    Standard error is looked up for each record: a forked worker or a script may have replaced it. A process of the
    package (an agent, a checkpoint writer, a monitor process) never waits for a terminal or pipe that is not read; a
    training process writes as the script's prints do.
    """

    def __init__(self, path: str, *, level_set: int, is_shared: bool) -> None:
        super().__init__()
        self.level_set = level_set
        """The level that was set on the logger together with this handler."""
        self._is_shared = is_shared
        self._file: TextIO | None = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115  closed below
        self._file_writer = None if self._file is None else StreamWriter(self._file.fileno())

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_shared and logging.getLogger().handlers:
            return  # the application has configured logging since and receives the record there
        stream = self._file if self._file is not None else sys.stderr
        if stream is None:  # closed before the process was started
            return
        try:
            if (writer := self._writer()) is not None:
                writer.log(self.format(record) + "\n")
                return
            stream.write(self.format(record) + "\n")
            stream.flush()
        except (OSError, ValueError, TypeError):
            self.handleError(record)

    def _writer(self) -> StreamWriter | None:
        if self._file_writer is not None:
            return self._file_writer
        return None if self._is_shared or sys.stderr is None else writer_of(sys.stderr)

    def flush(self) -> None:
        if (writer := self._writer()) is not None:
            writer.flush()

    def close(self) -> None:
        self.flush()
        super().close()
        if self._file is not None:
            self._file.close()


class _LineFormatter(logging.Formatter):
    def __init__(self, where: str, threads: Mapping[str, str], *, node: str, rank: int | None) -> None:
        super().__init__()
        self._where, self._threads, self._node, self._rank = where, dict(threads), node, rank

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        record.message = record.getMessage()
        line = f"{at}.{int(record.msecs):03d} {record.levelname} [{self._place(record)}] {record.message}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return printable(line)

    def _place(self, record: logging.LogRecord) -> str:
        return self._threads.get(record.threadName or "", self._where)


class _JsonFormatter(_LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": clock.as_iso(round(record.created * 1e6) * 1000),
            "level": record.levelname,
            "where": self._place(record),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if self._node:
            fields["node"] = self._node
        if self._rank is not None:
            fields["rank"] = self._rank
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)
