"""Where workers' output goes: torch's log specs, and tails that never delay a restart."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.run import _get_logs_specs_class

__all__ = ["CycleLogs", "make_logs_specs"]


def make_logs_specs(args: argparse.Namespace, run_dir: Path) -> LogsSpecs:
    """Return torch's log specs as torchrun's options ask for; the default folder is ``<run_dir>/logs``."""
    ranks = {int(rank) for rank in args.local_ranks_filter.split(",")} if args.local_ranks_filter else None
    return _get_logs_specs_class(args.logs_specs)(
        log_dir=args.log_dir or str(run_dir / "logs"),
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=ranks,
    )


class CycleLogs:
    """The log files of one cycle on one node, and the threads that copy them to the console.

    Args:
        specs: torch's log specs.
        envs: Local rank to its environment; torch adds the path of the error file.
        args: torchrun's options.
        prefixes: Local rank to the prefix of its lines, or ``None`` for torch's own.
    """

    def __init__(
        self,
        specs: LogsSpecs,
        envs: dict[int, dict[str, str]],
        args: argparse.Namespace,
        prefixes: dict[int, str] | None,
    ) -> None:
        self.destinations: LogsDest = specs.reify(envs)
        self._filtered: list[TextIO] = []
        self._tails: list[TailLog] = []
        dest = self.destinations
        self._tail(args.role, dest.tee_stdouts, sys.stdout, prefixes)
        self._tail(args.role, dest.tee_stderrs, sys.stderr, prefixes)
        for needles, files, target in (
            (args.duplicate_stdout_filters, dest.tee_stdouts, dest.filtered_stdout),
            (args.duplicate_stderr_filters, dest.tee_stderrs, dest.filtered_stderr),
        ):
            if needles:
                file = open(target, mode="w", errors="replace", buffering=1)  # noqa: SIM115  closed by stop()
                self._filtered.append(file)
                self._tail(args.role, files, file, prefixes, _contains_any(needles))

    def _tail(
        self,
        name: str,
        files: dict[int, str],
        target: TextIO,
        prefixes: dict[int, str] | None,
        keep: Callable[[str], bool] | None = None,
    ) -> None:
        if files:
            self._tails.append(TailLog(name, files, target, prefixes, log_line_filter=keep or (lambda line: True)))

    def start(self) -> None:
        """Start copying."""
        for tail in self._tails:
            tail.start()

    def stop(self, *, wait: bool) -> None:
        """Copy what is left and end, in the background unless ``wait``: a tail looks only every 0.1 s."""
        if not self._tails and not self._filtered:
            return
        thread = threading.Thread(target=self._stop, name="outlast-log-tails")
        thread.start()
        if wait:
            thread.join(2.0)

    def _stop(self) -> None:
        for tail in self._tails:
            tail.stop()
        for file in self._filtered:
            file.close()


def _contains_any(needles: list[str]) -> Callable[[str], bool]:
    return lambda line: any(needle in line for needle in needles)
