"""Records in the run directory for an agent that cannot reach the coordinator: another endpoint, or the job's end.

If the nodes share the run directory, the record of its owner lists the endpoints of the agent that hosts the
coordinator, so that an agent that knows only a dead host's endpoint finds the successor. The record is only an address:
a coordinator found through it must prove the run key like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from outlast import env
from outlast.errors import OutlastError
from outlast.launch import protocol as m
from outlast.launch.recovery_state_file import describe_last_job, load_recovery_state
from outlast.policy.lease import LeaseOwner
from outlast.policy.recovery_policy import RecoveryState, find_later_outcome
from outlast.runtime.addresses import Endpoint, is_loopback, parse_endpoints
from outlast.runtime.files import in_time
from outlast.runtime.lease import FolderRecords, newest_owner

log = logging.getLogger(__name__)


def describe_places(endpoints: Sequence[Endpoint]) -> tuple[str, ...]:
    """Return where agents of a job meet, for the record of its run directory."""
    # A loopback endpoint is another place on each machine.
    return tuple(f"{one} {env.hostname()}" if is_loopback(one.host) else str(one) for one in endpoints if one.port)


class RunRecords:
    """Read the records of a run directory for an agent.

    Args:
        run_dir: The run directory.
        own: The record of this agent.
        last_job: The run's last job when this agent began.

    Blocks: each method up to 2 s if the file system does not respond.
    Thread: any.
    """

    def __init__(self, run_dir: Path, own: LeaseOwner, *, last_job: str) -> None:
        self._run_dir, self._own, self._last_job = run_dir, own, last_job

    def find_endpoints(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """Return the given endpoints together with those of the agent that hosts the coordinator."""
        try:
            owner = in_time(self._run_dir, partial(newest_owner, FolderRecords(self._run_dir)))
        except (OSError, OutlastError) as error:
            log.debug("the owner of %s cannot be read: %s", self._run_dir, error)
            return list(endpoints)
        listed = _parse_places(owner.meets_at) if owner is not None and owner.is_of_job(self._own) else []
        if new := [str(one) for one in listed if one not in endpoints]:
            log.info("the run directory names more endpoints of the coordinator: %s", ", ".join(new))
        if set(endpoints) <= set(listed):
            return listed  # in the order in which the other agents try them
        return [*endpoints, *(one for one in listed if one not in endpoints)]

    def find_end(self, job: str | None, known: RecoveryState | None) -> m.Stop | None:
        """Return how a job ended without this agent; ``None``: it did not, as far as the run directory shows.

        Args:
            job: The job; ``None``: any that has ended since this agent began.
            known: The recovery policy's state as this agent knows it.
        """
        try:
            state = in_time(self._run_dir, partial(load_recovery_state, self._run_dir))
        except (OSError, OutlastError) as error:
            log.debug("how the job ended cannot be read from %s: %s", self._run_dir, error)
            return None
        if job is None:
            return describe_last_job(state, self._last_job)
        outcome = find_later_outcome(state, known) if state.job == job else None
        if outcome is None:
            return None
        code, reason = outcome
        return m.Stop(exit_code=code, reason=f"job {job} has ended without this node: {reason}")


def _parse_places(places: Sequence[str]) -> list[Endpoint]:
    listed: list[Endpoint] = []
    for place in places:
        text, _, machine = place.partition(" ")
        if machine in ("", env.hostname()):
            listed += parse_endpoints(text)
    return listed
