"""The run directory's owner: the job that runs in it, for which the coordinator's agent speaks.

Agents of one job are told from another job by where they meet: the same id at the same endpoints. The first of them
takes the directory before anything else is done, the others enter it beside that one; whichever hosts the coordinator
leads, and renews the lease. An agent whose node has a run directory of its own leads it alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from outlast import env
from outlast.errors import ConfigError
from outlast.launch.options import RunOptions
from outlast.policy.lease import LeaseOwner
from outlast.runtime.addresses import parse_endpoints
from outlast.runtime.lease import FolderRecords, InUse, Lease
from outlast.runtime.processes import this_process

__all__ = ["RunOwner"]

log = logging.getLogger(__name__)


class RunOwner:
    """Own a run directory, before anything else of the job is begun.

    Args:
        options: The launcher's options.

    Raises:
        ConfigError: Another job runs in it; one line with who, and the remedy.

    Blocks: where only time can tell whether a job on another machine still runs, 10 s.
    """

    def __init__(self, options: RunOptions) -> None:
        self.on_lost: Callable[[str], None] | None = None
        """Called once, in a thread, with why nothing may be written there any more."""
        self._lease = Lease(FolderRecords(options.run_dir), _describe(options), on_lost=self._lose)
        try:
            self._lease.acquire()
        except InUse as error:
            raise ConfigError(
                f"run directory {error}; wait until that job has ended, or name another directory (--run-dir)"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--run-dir={options.run_dir} cannot be taken ({error.strerror or error}); name one that is writable"
            ) from None

    def lead(self) -> None:
        """Speak for the job from now on: this agent hosts its coordinator.

        Raises:
            OutlastError: Another job has taken the directory.
            OSError: It cannot be written to.
        """
        self._lease.acquire(leads=True)

    def may_write(self) -> bool:
        """Return whether the directory is still this job's, for what is kept for its next job."""
        try:
            self._lease.check()
        except InUse as error:
            log.debug("what the run has learned is not written: %s", error)
            return False
        except OSError as error:  # whoever writes is going to say so
            log.debug("the run directory does not answer: %s", error)
        return True

    def withdraw(self) -> None:
        """Leave no trace in the directory: the job was refused before it began. Blocks: as :meth:`release`."""
        self._lease.withdraw()

    def release(self) -> None:
        """Let go of the directory. Blocks: up to 2 s where the file system does not answer."""
        self._lease.release()

    def _lose(self, lost: InUse) -> None:
        if self.on_lost is not None:
            self.on_lost(f"run directory {lost}; this job writes nothing more there; end one of the two")


def _describe(options: RunOptions) -> LeaseOwner:
    """Return what this agent's job says of itself."""
    values, endpoints = env.environ(), parse_endpoints(options.endpoints)
    has_nodes = any(one.port for one in endpoints)  # others may come to it, if only to wait as spares
    # An endpoint such as localhost is another place on each machine.
    here = env.hostname() if any(one.host in ("localhost", "127.0.0.1", "::1") for one in endpoints) else ""
    return LeaseOwner(
        token="",
        process=this_process(),
        run=options.run_id,
        names=options.names,
        script=os.path.realpath(options.torchrun.training_script),
        job=f"{options.run_id} {options.endpoints} {here}" if has_nodes else None,
        allocation=values.get("SLURM_JOB_ID") or None,
        requeues=_number(values.get("SLURM_RESTART_COUNT")),
        outlives=options.max_nodes > 1,
        shares=has_nodes,
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
