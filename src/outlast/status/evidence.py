"""Gather the evidence on a run: the end of its journal, ``ladder.json``, its processes, and its coordinator.

Read-only. A journal of months on hundreds of nodes is not read whole: of each file of the newest job the end is read,
within a fixed budget. A job's state follows from the files of agents and coordinator, which are short; the end of the
ranks' files shows their progress.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from outlast.decoding import MAX_STATE_BYTES, from_json, read_file
from outlast.errors import ConfigError, RendezvousError
from outlast.incidents import Event, EventKind
from outlast.journal import JournalFile, list_files, read_ends
from outlast.launch.control import ask
from outlast.launch.protocol import AskStatus, LiveStatus
from outlast.policy.lease import LeaseOwner, Process
from outlast.policy.recovery_policy import RecoveryState
from outlast.policy.run_view import JobView, RunView
from outlast.runtime.addresses import Endpoint, is_loopback, parse_endpoint, parse_endpoints
from outlast.runtime.injection import reach
from outlast.runtime.lease import FOLDER, FolderRecords, decode_owner
from outlast.runtime.processes import is_alive, machine_id
from outlast.runtime.run_key import RunKey, find_known_keys

MAX_FILES = 20_000
"""Newest files of the journal that are considered."""
HEAD_BYTES = 64 * 2**10
MAIN_BYTES = 4 * 2**20
"""Bytes read from the end of an agent's or coordinator's file."""
RANKS_BYTES = 64 * 2**20
"""Bytes read of all ranks' files together."""
RANK_MIN_BYTES, RANK_MAX_BYTES = 32 * 2**10, 4 * 2**20
NUM_EARLIER = 8
"""Files of rank 0 in earlier jobs that are read for their saves."""
NUM_READERS = 16
ASK_TIMEOUT_S = 2.0
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^/:\s]+):[0-9]+")


def endpoint_of(target: str) -> Endpoint | None:
    """Return the coordinator's address if a target is an address; ``None`` = it is a run directory."""
    return parse_endpoint(target) if _ENDPOINT.fullmatch(target) and not os.path.lexists(target) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProcess:
    """A process of the job that the journal lists."""

    node: str
    rank: int | None
    """``None`` = the node's agent."""
    process: Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The input of :func:`outlast.status.facts.judge`."""

    run_dir: str | None = None
    job: str = ""
    view: RunView = field(default_factory=RunView)
    """The journal of the newest job, and the saves of earlier ones."""
    recovery_state: RecoveryState | None = None
    living: Mapping[JobProcess, bool | None] = field(default_factory=dict)
    """Whether a process is running; ``None`` = not visible from here."""
    live: LiveStatus | None = None
    renewed_ns: int = 0
    """When the owner of the run directory last renewed its record, by the file system's clock; 0 = not known."""
    unreachable: str | None = None
    """Why the coordinator did not respond; ``None`` = it did, or was not queried."""
    problems: tuple[str, ...] = ()
    """Sources that could not be read."""


def gather(
    run_dir: Path, *, live: LiveStatus | None = None, asks: bool = True, key_file: str | None = None
) -> Evidence:
    """Gather the evidence on the newest job in a run directory.

    Args:
        run_dir: The run directory.
        live: The coordinator's status, if it was queried already.
        asks: Query the coordinator if it may know more than the journal.
        key_file: File of the run key, if the key is not in the environment or the directory.

    Raises:
        ConfigError: The path is not a run directory, or cannot be read.

    Blocks: while files are read, and up to 4 s for each address of a queried coordinator.
    """
    files = _list_journal(run_dir)
    problems: list[str] = []
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="outlast-status") as pool:
        job, view = _read(files, pool, problems)
    if view.newest is None:
        why = f": {problems[0]}" if problems else ""
        raise ConfigError(
            f"the journal in {run_dir} holds no event{why}; the job has not begun yet, or its files are damaged"
        )
    newest = view.job(job)
    living = {one: is_alive(one.process) for one in processes_in(newest)}
    unreachable = None
    if live is not None and live.job != job:
        live = None
    elif live is None and asks and _is_worth_asking(newest, living):
        live, unreachable = ask_job(newest, find_known_keys(run_dir, key_file=key_file))
    return Evidence(
        run_dir=str(run_dir),
        job=job,
        view=view,
        recovery_state=_read_recovery_state(run_dir, problems),
        living=living,
        live=live,
        renewed_ns=_read_renewal(run_dir),
        unreachable=unreachable,
        problems=tuple(dict.fromkeys(problems)),
    )


def ask_coordinator(endpoint: Endpoint, key: RunKey | None = None) -> LiveStatus:
    """Query the status of the job whose coordinator listens at an endpoint.

    Args:
        endpoint: Address of the coordinator.
        key: The run key; ``None`` = read it from where the coordinator says.

    Raises:
        RendezvousError: The host is not known, nothing responds there, or the responder is not an outlast coordinator
            or belongs to a run whose key this process does not have.

    Blocks: up to 4 s.
    """
    answer = ask(endpoint, AskStatus(), run_id=None, key=key, timeout_s=ASK_TIMEOUT_S)
    if not isinstance(answer, LiveStatus):
        raise RendezvousError(f"the coordinator at {endpoint} is of another version; use the outlast that runs it")
    return answer


def processes_in(job: JobView) -> list[JobProcess]:
    """Return the processes on which a job depends: its agents or, without agents, its ranks."""
    begun: Mapping[str, Event] | Mapping[int, Event] = job.agents or job.sessions
    found = []
    for event in begun.values():
        pid, started, machine = (event.data.get(name) for name in ("pid", "pid_started", "machine"))
        if not isinstance(pid, int) or not isinstance(started, int) or not isinstance(machine, str):
            pid, started, machine = 0, 0, ""  # written by an earlier version
        process = Process(host=event.node, machine=machine, pid=pid, started=started)
        found.append(JobProcess(node=event.node, rank=None if job.agents else event.rank, process=process))
    return found


# -- the journal -----------------------------------------------------------------------------------------------


def _list_journal(run_dir: Path) -> list[JournalFile]:
    """Return the journal's files, newest first."""
    folder = run_dir / "journal"
    try:
        files = list_files(run_dir)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(_no_run_directory(run_dir)) from None
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read ({error.strerror}); run this as the user who runs the job, or make the folder "
            "readable"
        ) from None
    if not files:
        raise ConfigError(f"{folder} is empty: no job has started in this run directory yet; try again in a moment")
    return sorted(files, key=lambda file: -file.modified_ns)[:MAX_FILES]


def _no_run_directory(run_dir: Path) -> str:
    remedy = "give the --run-dir of outlast run (without it: outlast-runs/<run id>)"
    if not run_dir.exists():
        return f"there is no {run_dir}; {remedy}, or HOST:PORT of its --rdzv-endpoint"
    if not run_dir.is_dir():
        return f"{run_dir} is a file, not a run directory; {remedy}"
    try:
        runs = [path for path in run_dir.iterdir() if (path / "journal").is_dir()]
        runs.sort(key=lambda path: -(path / "journal").stat().st_mtime_ns)
    except OSError:
        runs = []
    if runs:
        number = "1 run directory" if len(runs) == 1 else f"{len(runs)} run directories"
        return f"{run_dir} holds {number}; name one, such as {runs[0]}"
    if (owner := _find_owner(run_dir)) is not None:
        return (
            f"{run_dir} has no journal, and {owner.describe()} uses it: that job is starting, or the directory was "
            "removed or emptied while it ran; try again in a moment, or specify HOST:PORT of its --rdzv-endpoint"
        )
    return f"{run_dir} is not a run directory, since it has no journal; {remedy}"


def _find_owner(run_dir: Path) -> LeaseOwner | None:
    """Return the owner of a run directory unless it has released the directory."""
    records = FolderRecords(run_dir)
    try:
        owner = decode_owner(records.read(max(records.numbers(), default=0)))
    except OSError:
        return None
    return owner if owner is not None and not owner.released else None


def _read(files: list[JournalFile], pool: ThreadPoolExecutor, problems: list[str]) -> tuple[str, RunView]:
    """Return the newest job's name, and a view of its events and of the saves of earlier jobs."""
    num_torn = 0

    def read(files: Sequence[JournalFile], end_bytes: int, head_bytes: int = 0) -> Iterator[list[Event]]:
        nonlocal num_torn

        def read_one(file: JournalFile) -> tuple[list[Event], int, str | None]:
            reach("journal.read", path=file.path)
            try:
                return *read_ends(file.path, head_bytes=head_bytes, end_bytes=end_bytes), None
            except OSError as error:
                return [], 0, f"{file.path} cannot be read: {error.strerror}"

        for events, num_bad, problem in pool.map(read_one, files):
            num_torn += num_bad
            problems.extend([problem] if problem else [])
            yield events

    heads = [file for file in files if file.is_of_agent] or [file for file in files if file.rank == 0] or files
    began: dict[str, int] = {}
    for events in read(heads, 0, HEAD_BYTES):
        for event in events[:1]:
            began[event.job] = min(began.get(event.job, event.wall_ns), event.wall_ns)
    job, num_torn = max(began, key=lambda name: began[name], default=""), 0
    agents = [file for file in files if file.is_of_job(job) and file.is_of_agent]
    ranks = [file for file in files if file.is_of_job(job) and not file.is_of_agent]
    share = min(RANK_MAX_BYTES, max(RANK_MIN_BYTES, RANKS_BYTES // max(1, len(ranks))))
    found = [*read(agents, MAIN_BYTES, HEAD_BYTES), *read(ranks, share)]
    if num_torn:
        lines = "1 line of the journal is" if num_torn == 1 else f"{num_torn} lines of the journal are"
        problems.append(f"{lines} torn or unreadable")
    others = [file for file in files if file.rank == 0 and not file.is_of_job(job)][:NUM_EARLIER]
    num_problems = len(problems)
    saved = [event for events in read(others, RANK_MIN_BYTES * 8) for event in events if event.job != job]
    del problems[num_problems:]  # unreadable files of earlier jobs do not matter
    view = RunView()
    for event in sorted(saved, key=lambda event: event.wall_ns):
        if event.kind == EventKind.SAVE_COMMITTED:
            view.take(event)
    of_job = [event for events in found for event in events if event.job == job]
    for event in sorted(of_job, key=lambda event: event.wall_ns):
        view.take(event)
    return job, view if of_job else RunView()


def _read_renewal(run_dir: Path) -> int:
    """Return when the owner's record was last written; a living owner writes it every few seconds."""
    try:
        with os.scandir(run_dir / FOLDER) as entries:
            return max((entry.stat(follow_symlinks=False).st_mtime_ns for entry in entries), default=0)
    except OSError:
        return 0  # a run of an earlier version, or without agents


def _read_recovery_state(run_dir: Path, problems: list[str]) -> RecoveryState | None:
    try:
        return from_json(read_file(run_dir / "ladder.json", max_bytes=MAX_STATE_BYTES), RecoveryState)
    except FileNotFoundError:
        return RecoveryState()  # nothing was decided yet
    except OSError as error:
        problems.append(f"ladder.json cannot be read: {error.strerror}")
    except msgspec.DecodeError as error:
        problems.append(f"ladder.json cannot be used: {error}")
    return None


# -- the coordinator -------------------------------------------------------------------------------------------


def may_have_coordinator(job: JobView, living: Mapping[JobProcess, bool | None]) -> bool:
    """Return whether an agent that hosts the coordinator may be alive."""
    return any(
        one.rank is None and alive is not False and one.node not in job.ended_agents for one, alive in living.items()
    )


def _is_worth_asking(job: JobView, living: Mapping[JobProcess, bool | None]) -> bool:
    """Return whether the coordinator may know more than the journal and the processes of this machine show."""
    runs = job.newest_cycle is not None and not job.newest_cycle.ends
    is_unseen = any(alive is None and one.node not in job.ended_agents for one, alive in living.items())
    return may_have_coordinator(job, living) and (is_unseen or not runs)


def ask_job(job: JobView, keys: Sequence[RunKey]) -> tuple[LiveStatus | None, str | None]:
    """Query the coordinator of a job; return its status, or the reason why there is none.

    Blocks: up to 4 s for each of its addresses.
    """
    reason = None
    for endpoint, key in itertools.product(_endpoints(job), keys or (None,)):
        try:
            live = ask_coordinator(endpoint, key)
        except RendezvousError as error:
            reason = reason or str(error)
            continue
        if live.job == job.name:
            return live, None
        reason = reason or f"the coordinator at {endpoint} is that of another job, {live.job}"
    return None, reason


def _endpoints(job: JobView) -> list[Endpoint]:
    """Return the addresses at which the coordinator may be reachable from this machine."""
    found: dict[Endpoint, None] = {}
    for event in reversed(job.agents.values()):
        for text in event.data.get("endpoints") or ():
            try:
                (endpoint,) = parse_endpoints(text)
            except ValueError:
                continue
            machine = event.data.get("machine")
            if not is_loopback(endpoint.host) or (machine and machine == machine_id()):
                found[endpoint] = None
    return list(found)[:4]
