"""The log files of a node's workers, and their copies on the console.

The files are torch's, by torchrun's options. They are optional: if they cannot be made, the workers of that cycle write
to the console. One thread per file copies its lines. A blocked console delays the copies and then loses lines, which is
reported (:mod:`outlast.queued_writer`); the files are complete.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, cast

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.run import _get_logs_specs_class

from outlast.queued_writer import writer_of
from outlast.runtime.files import begin, in_time, make_private_folder, open_private, write_optional

_FIRST_S = 10.0
"""How long the log folder may take to respond when the agent starts."""


def make_logs_specs(args: SimpleNamespace, run_dir: Path) -> LogsSpecs:
    """Return torch's log specs by torchrun's options; the default folder is ``<run_dir>/logs``.

    Raises:
        ValueError, OSError: An option cannot be used, or the folder cannot be made or does not respond in time.

    Blocks: up to 10 s.
    """
    ranks = {int(rank) for rank in args.local_ranks_filter.split(",")} if args.local_ranks_filter else None

    def make() -> LogsSpecs:
        if not args.log_dir:
            make_private_folder(run_dir / "logs")
        return _get_logs_specs_class(args.logs_specs)(
            log_dir=args.log_dir or str(run_dir / "logs"),
            redirects=Std.from_str(args.redirects),
            tee=Std.from_str(args.tee),
            local_ranks_filter=ranks,
        )

    return in_time(args.log_dir or run_dir, make, _FIRST_S)


def open_logs(
    specs: LogsSpecs,
    envs: dict[int, dict[str, str]],
    args: SimpleNamespace,
    run_dir: Path,
    prefixes: dict[int, str] | None,
) -> tuple[WorkerLogs, dict[int, dict[str, str]]]:
    """Make the log files of a cycle; without them the workers write to the console.

    Args:
        specs: torch's log specs.
        envs: Environment by local rank.
        args: torchrun's options.
        run_dir: The run directory.
        prefixes: Prefix of the console lines by local rank; ``None``: torch's own.

    Returns:
        The logs, and the environments, to which torch adds the path of the error file.
    """

    def make() -> tuple[WorkerLogs, dict[int, dict[str, str]]]:
        # a failed attempt does not change the argument
        own = {rank: dict(variables) for rank, variables in envs.items()}
        return WorkerLogs(specs.reify(own), args, prefixes), own

    folder = args.log_dir or str(run_dir / "logs")
    otherwise = "the workers of this cycle write to the console"
    if (made := write_optional("log files of the workers", folder, make, otherwise=otherwise)) is not None:
        return made
    chosen = {int(rank) for rank in args.local_ranks_filter.split(",")} if args.local_ranks_filter else set(envs)
    console = {rank: "" if rank in chosen else os.devnull for rank in envs}
    return WorkerLogs(LogsDest(console, dict(console), {}, {}, {}, os.devnull, os.devnull), args, prefixes), envs


class WorkerLogs:
    """The log files of one cycle on one node, and the threads that copy them to the console.

    Raises:
        OSError: A file cannot be made.
    """

    def __init__(self, destinations: LogsDest, args: SimpleNamespace, prefixes: dict[int, str] | None) -> None:
        self.destinations = destinations
        paths = {*destinations.stdouts.values(), *destinations.stderrs.values()} - {""}
        self._outputs = {path: open(path, "ab", buffering=0, opener=open_private) for path in paths}  # noqa: SIM115
        """Output files, passed to the workers as descriptors: opening a file may hang."""
        self._filtered: list[TextIO] = []
        self._tails: list[TailLog] = []

        def tail(files: dict[int, str], target: TextIO, needles: Sequence[str] = ()) -> None:
            def keeps(line: str) -> bool:
                return any(needle in line for needle in needles)

            if files:
                chosen: dict[str, Any] = {"log_line_filter": keeps} if needles else {}  # torch 2.8 copies all lines
                self._tails.append(TailLog(args.role, files, target, prefixes, **chosen))

        dest = self.destinations
        tail(dest.tee_stdouts, _forward_to(sys.stdout))
        tail(dest.tee_stderrs, _forward_to(sys.stderr))
        for needles, stream in ((args.duplicate_stdout_filters, "stdout"), (args.duplicate_stderr_filters, "stderr")):
            if needles:
                target = getattr(dest, f"filtered_{stream}")
                file = open(target, mode="w", errors="replace", buffering=1, opener=open_private)  # noqa: SIM115  closed by stop()
                self._filtered.append(file)
                tail(getattr(dest, f"tee_{stream}s"), file, needles)

    def outputs_of(self, local_rank: int) -> tuple[int | None, int | None]:
        """Return the descriptors of a worker's stdout and stderr; ``None``: the console."""
        dest = self.destinations
        stdout, stderr = (self._outputs.get(files.get(local_rank) or "") for files in (dest.stdouts, dest.stderrs))
        return None if stdout is None else stdout.fileno(), None if stderr is None else stderr.fileno()

    def start(self) -> None:
        """Start copying; called after the workers have their descriptors."""
        self._close_outputs()
        for tail in self._tails:
            tail.start()

    def stop(self, *, wait: bool) -> None:
        """Copy the rest and end; in the background unless ``wait``, as a tail polls only every 0.1 s."""
        self._close_outputs()
        if not self._tails and not self._filtered:
            return
        thread = threading.Thread(target=self._stop, name="outlast-log-tails", daemon=True)
        thread.start()
        if wait:
            thread.join(2.0)

    def _close_outputs(self) -> None:
        outputs, self._outputs = self._outputs, {}

        def close() -> None:
            for file in outputs.values():
                file.close()

        if outputs:
            begin(close)  # a close on a network file system waits until the workers' output is stored

    def _stop(self) -> None:
        for tail in self._tails:
            tail.stop()
        for file in self._filtered:
            file.close()
        for stream in (sys.stdout, sys.stderr):
            if (writer := writer_of(stream)) is not None:
                writer.flush()


def _forward_to(stream: TextIO) -> TextIO:
    """Return the queued writer of a stream, so that a blocked terminal or pipe does not block a tail's thread."""
    return cast("TextIO", writer_of(stream) or stream)
