"""The process environment: the only module that reads ``os.environ``.

:func:`read_worker` detects whether ``outlast run``, ``torchrun``, ``srun`` or plain ``python`` started this worker, and
returns its place in the same form for each. Slurm's short forms, node lists such as ``gpu[07-09,12],login1`` and counts
such as ``4(x2),3``, are expanded here.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from outlast.decoding import parse_json
from outlast.errors import ConfigError

RUN_ID = "OUTLAST_RUN_ID"
"""Identifies the run; the same in every job of the run."""
RUN_DIR = "OUTLAST_RUN_DIR"
"""The run directory, an absolute path."""
RESUME_OTHER = "OUTLAST_RESUME_FROM_OTHER_RUN"
"""``1``: the run may continue from checkpoints of another run, overriding the script's config; set by an agent only."""
NAMES = "OUTLAST_RUN_NAMES"
"""JSON list of the names that the user gave to the run (its id, its directory), may be empty; set by an agent only."""
JOB = "OUTLAST_JOB"
"""Identifies the job (one allocation, or one ``outlast run``)."""
AGENT_STARTED = "OUTLAST_AGENT_STARTED"
"""Start time of the node's agent in seconds since the epoch; set by an agent only."""
CYCLE = "OUTLAST_CYCLE"
"""Number of the cycle, from 0."""
NODE = "OUTLAST_NODE"
"""Name of the node, unique in the job."""
DEVICE = "OUTLAST_DEVICE"
"""Identifies the hardware of this node's ranks if it has no identifier (no GPU); the node's name if not set."""
BOARD = "OUTLAST_BOARD"
"""Path of the node's heartbeat memory; set by an agent only."""
CONFIG = "OUTLAST_FAULT_TOLERANCE"
"""The fields given to the agent's ``FaultToleranceConfig``, as JSON, so that worker and agent use the same timeouts."""
CONFIG_FILE = "OUTLAST_CONFIG_FILE"
"""The config file of ``outlast run``, empty without one; set by its agents only."""
RUN_KEY = "OUTLAST_RUN_KEY"
"""The run key, with which all connections of a run are authenticated; an agent sets it for its workers."""
WRITER = "OUTLAST_WRITER"
"""Address of the node's checkpoint writer (an abstract Unix socket, without its leading zero); set by an agent only."""
RELAY = "OUTLAST_RELAY"
"""Address of the agent's relay between the processes of wrapped functions and the coordinator (an abstract Unix socket,
without its leading zero); set by an agent only."""
UNTRUSTED = "OUTLAST_UNTRUSTED"
"""JSON list of the checkpoint copies that must not be loaded; set by an agent only."""
DURABLE_ITERATION = "OUTLAST_DURABLE_ITERATION"
"""Newest iteration whose checkpoint survives the end of the job, if no newer one can have been committed since; set by
an agent only."""
POSTMORTEM = "OUTLAST_POSTMORTEM"
"""Path of the memory file that records how this worker ended; set by an agent only."""
REPLAY = "OUTLAST_REPLAY"
"""JSON of the steps that the ranks of this cycle replay first; set by an agent only."""
INJECTIONS = "OUTLAST_INJECTIONS"
"""JSON of the faults to inject at injection points of this process; see ``outlast.runtime.injection``."""
FAULT_PLAN = "OUTLAST_FAULT_PLAN"
"""Path of the fault plan that replaces the one in the config; ``outlast chaos run`` sets it."""
INTERFACE = "OUTLAST_INTERFACE"
"""``NAME[,NAME]``: the network interface of this node's processes; ``--interface`` sets it."""
PORT_RANGE = "OUTLAST_PORT_RANGE"
"""``LOW-HIGH``: the ports on which the processes of this node listen; ``--port-range`` sets it."""
METRICS_PORT = "OUTLAST_METRICS_PORT"
"""Port of each agent's Prometheus metrics endpoint; 0 = a free port. ``--metrics-port`` takes precedence."""
METRICS_ADDRESS = "OUTLAST_METRICS_ADDRESS"
"""Address of the metrics endpoint; ``--metrics-address`` takes precedence."""
LOG_LEVEL = "OUTLAST_LOG_LEVEL"
"""Minimum log level: ``debug``, ``info``, ``warning`` or ``error``; ``--log-level`` of ``outlast run`` sets it."""
LOG = "OUTLAST_LOG"
"""Log format: ``text`` or ``json``."""
ANY_VERSION = "OUTLAST_ANY_VERSION"
"""``1``: the processes of a run may use different versions of the package."""
FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"
"""Path of a file to create when a run has finished; NeMo-Run's job scripts set the variable and look for the file."""


def environ() -> dict[str, str]:
    return dict(os.environ)


def postmortem_path() -> str | None:
    """Return the path for the record of this worker's end; ``None`` without ``outlast run``."""
    return os.environ.get(POSTMORTEM) or None


def finished_flag_file() -> str | None:
    """Return the path of the file to create when the run has finished; ``None`` = none."""
    return os.environ.get(FINISHED_FLAG) or None


def fault_plan() -> str | None:
    """Return the path of the fault plan that replaces the one in the config; ``None`` = use the config's."""
    return os.environ.get(FAULT_PLAN) or None


def any_version() -> bool:
    """Return whether the processes of a run may use different versions of the package."""
    return os.environ.get(ANY_VERSION) == "1"


def interface() -> str | None:
    """Return the network interface of this node; ``None`` = the one that routes to the endpoint."""
    return os.environ.get(INTERFACE) or None


def port_range() -> str | None:
    """Return the ports on which this node's processes listen, as ``LOW-HIGH``; ``None`` = any."""
    return os.environ.get(PORT_RANGE) or None


def metrics_endpoint() -> tuple[str | None, str | None]:
    """Return address and port of the agent's metrics endpoint, as given; ``None`` = not set."""
    return os.environ.get(METRICS_ADDRESS) or None, os.environ.get(METRICS_PORT) or None


def hostname() -> str:
    """Return this machine's name without its domain."""
    return socket.gethostname().split(".")[0] or "localhost"


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """Return this node's name: in Slurm the name of the Slurm node, otherwise the host name.

    Args:
        environment: Variables to read instead of the environment of this process.
    """
    values = os.environ if environment is None else environment
    return values.get("SLURMD_NODENAME") or hostname()


def scheduler_start_ns(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the start time of this process's scheduler job in nanoseconds since the epoch; ``None`` = not known.

    Args:
        environment: Variables to read instead of the environment of this process.
    """
    text = (os.environ if environment is None else environment).get("SLURM_JOB_START_TIME", "")
    return int(text) * 1_000_000_000 if text.isdecimal() else None


def clean_name(name: str) -> str:
    """Return ``name`` with each character that is unsafe in a file name replaced by ``_``."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "_"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnv:
    """A worker's place in the run."""

    global_rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    run_id: str = "default"
    job: str = "job"
    cycle: int = 0
    node: str = "localhost"
    device: str | None = None
    """Identifies the hardware of this node's ranks if it has no identifier; ``None`` = the node's name."""
    run_dir: str | None = None
    board: str | None = None
    """Path of the node's heartbeat memory; ``None`` without ``outlast run``."""
    launcher: str = "python"
    """``outlast``, ``torchrun``, ``srun`` or ``python``."""
    fault_tolerance: str | None = None
    """The fields given to the agent's fault tolerance settings, as JSON."""
    config_file: str | None = None
    """The config file of ``outlast run``, empty without one; ``None`` = started by another launcher."""
    writer: str | None = None
    """Address of the agent's checkpoint writer; ``None`` without ``outlast run``."""
    relay: str | None = None
    """Address of the agent's relay for in-process restarts; ``None`` without ``outlast run``."""
    master_addr: str | None = None
    """Host of the ranks' TCPStore; ``None`` with a single rank."""
    untrusted: str | None = None
    """Checkpoint copies that must not be loaded, as JSON; ``None`` = none known."""
    durable_iteration: int | None = None
    """Newest iteration whose checkpoint survives the end of the job, over all cycles and jobs before this cycle;
    :data:`~outlast.policy.recovery_point.NONE_DURABLE` = none was committed; ``None`` = not known for certain."""
    replay: str | None = None
    """Steps to replay first, as JSON of :class:`outlast.policy.rerun.Replay`; ``None`` = none."""
    names: tuple[str, ...] = ()
    """The names that the user gave to the run, such as ``id a`` and ``directory /a``; they identify the run."""
    allocation: str | None = None
    """The scheduler's id of the job; ``None`` without a scheduler."""
    requeues: int = 0
    """Number of times that the scheduler has requeued the job."""
    resumes_other: bool = False
    """The run may continue from checkpoints of another run: an option of ``outlast run``."""
    call: int = 0
    """Number of the wrapped function's call in this process, from 0."""

    @property
    def replaces_dead_ranks(self) -> bool:
        """Whether the launcher's agents report that they replace dead ranks, as those of ``outlast run`` do."""
        return self.config_file is not None

    @property
    def is_first(self) -> bool:
        """Whether this rank logs for all ranks and the whole job: rank 0, in the job's first cycle."""
        # Under srun and plain python each cycle is a job with a separate log.
        return self.global_rank == 0 and (self.cycle == 0 or self.launcher in ("srun", "python"))


def read_worker(environment: Mapping[str, str] | None = None) -> WorkerEnv:
    """Read this worker's place from the environment.

    Args:
        environment: Variables to read instead of the environment of this process.

    Raises:
        ConfigError: A variable is not a number, or Slurm's node list is malformed.
    """
    env = os.environ if environment is None else environment
    number = partial(read_number, env)
    if RUN_ID in env and BOARD in env:
        launcher = "outlast"
    elif "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env):
        launcher = "torchrun"
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and number(*_STEP_TASKS, default=1) > 1:
        # Without a step this is the batch shell, to which Slurm gives the variables of the first task.
        launcher = "srun"
    else:
        launcher = "python"
    if launcher == "srun":
        rank, world_size = number("SLURM_PROCID", default=0), number(*_STEP_TASKS, default=1)
        local_rank, node_rank = number("SLURM_LOCALID", default=0), number("SLURM_NODEID", default=0)
        num_nodes = number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1)
        per_node = _tasks_per_node(env, world_size)
        even = world_size // max(1, num_nodes)
        local_world_size = max(per_node[node_rank] if node_rank < len(per_node) else even, local_rank + 1)
    else:
        rank, world_size = number("RANK", default=0), number("WORLD_SIZE", default=1)
        local_rank = number("LOCAL_RANK", default=0)
        local_world_size = number("LOCAL_WORLD_SIZE", default=world_size)
        node_rank = number("GROUP_RANK", default=0)
    # If a worker starts torchrun, the nested workers inherit this worker's variables but are not ranks of this run.
    is_own = launcher == "outlast" and env.get("TORCHELASTIC_RUN_ID", env[RUN_ID]) == env[RUN_ID]
    run_id = env.get(RUN_ID) or env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID") or "default"
    return WorkerEnv(
        global_rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        run_id=run_id,
        job=env.get(JOB) or env.get("SLURM_JOB_ID") or "job",
        cycle=number(CYCLE, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", default=0),
        node=env.get(NODE) or node_name(env),
        device=env.get(DEVICE) or None,
        run_dir=env.get(RUN_DIR) or None,
        board=env.get(BOARD) or None,
        launcher=launcher,
        fault_tolerance=env.get(CONFIG) or None,
        config_file=env.get(CONFIG_FILE),
        writer=env.get(WRITER) or None,
        relay=(is_own and env.get(RELAY)) or None,
        master_addr=srun_host(env) if launcher == "srun" else env.get("MASTER_ADDR") or None,
        untrusted=env.get(UNTRUSTED) or None,
        durable_iteration=number(DURABLE_ITERATION, default=-1) if env.get(DURABLE_ITERATION) else None,
        replay=env.get(REPLAY) or None,
        names=_names(env, launcher),
        resumes_other=env.get(RESUME_OTHER) == "1",
        allocation=env.get("SLURM_JOB_ID") or None,
        requeues=int(text) if (text := env.get("SLURM_RESTART_COUNT", "")).isdecimal() else 0,
    )


def srun_host(values: Mapping[str, str]) -> str:
    """Return the rendezvous host of an ``srun`` step: ``MASTER_ADDR``, else the step's first node.

    Raises:
        ConfigError: The step's node list is not in Slurm's form.
    """
    nodes = values.get("SLURM_STEP_NODELIST") or values.get("SLURM_JOB_NODELIST") or "localhost"
    return values.get("MASTER_ADDR") or expand_nodes(nodes)[0]


def read_number(values: Mapping[str, str], *names: str, default: int) -> int:
    """Return the number in the first of some variables that is set and not empty.

    Raises:
        ConfigError: The value is not a number.
    """
    for name in names:
        if text := values.get(name):
            try:
                return int(text)
            except ValueError:
                raise ConfigError(f"environment variable {name}={text!r} is not a number; unset it") from None
    return default


def read_counts(values: Mapping[str, str], name: str) -> tuple[int, ...]:
    """Expand a variable with :func:`expand_counts`; return ``()`` if the variable is not set.

    Raises:
        ConfigError: The value is not in Slurm's form.
    """
    try:
        return expand_counts(text) if (text := values.get(name)) else ()
    except ConfigError as error:
        raise ConfigError(f"environment variable {name}: {error}; unset it") from None


def name_of_run(run_id: str | None) -> tuple[str, ...]:
    """Return a run's id as a name, or ``()`` if the user did not choose the id.

    A number (a job id or a random one) and the UUID of ``torchrun --standalone`` change with each start.
    """
    if not run_id or run_id == "none" or run_id.isdigit() or _DRAWN.fullmatch(run_id):
        return ()
    return (f"id {run_id}",)


_DRAWN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _names(env: Mapping[str, str], launcher: str) -> tuple[str, ...]:
    if launcher == "outlast":
        try:
            return tuple(str(name) for name in parse_json(env.get(NAMES) or "[]"))
        except ValueError:
            raise ConfigError(f"environment variable {NAMES}={env[NAMES]!r} is not a JSON list; unset it") from None
    return name_of_run(env.get("TORCHELASTIC_RUN_ID")) if launcher == "torchrun" else ()


_STEP_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _tasks_per_node(env: Mapping[str, str], world_size: int) -> tuple[int, ...]:
    """Return the number of tasks on each node of this step, or ``()`` if not known. Raises: ConfigError."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        counts = read_counts(env, name)
        if counts and sum(counts) == world_size:  # otherwise the value describes another step, or the whole job
            return counts
    return ()


def replace_environ(values: Mapping[str, str]) -> None:
    """Replace the whole environment of this process; for a forked worker before its script runs."""
    os.environ.clear()
    os.environ.update(values)


class _NotedEnviron(os._Environ[str]):
    reads: ClassVar[set[str]] = set()

    def __getitem__(self, key: str) -> str:
        self.reads.add(key)
        return super().__getitem__(key)

    # Iterating over all variables is not a read: tqdm does so, for its own prefix, when torch imports tqdm.

    def copy(self) -> dict[str, str]:
        return {os.fsdecode(name): os.fsdecode(value) for name, value in self._data.items()}  # type: ignore[attr-defined]

    def items(self) -> ItemsView[str, str]:
        return self.copy().items()

    def values(self) -> ValuesView[str]:
        return self.copy().values()


@contextmanager
def noting_reads() -> Iterator[set[str]]:
    """Yield a set that collects the names of the variables that Python code looks up meanwhile.

    Thread: one at a time in the process.
    """
    own, _NotedEnviron.reads = type(os.environ), set()
    os.environ.__class__ = _NotedEnviron
    try:
        yield _NotedEnviron.reads
    finally:
        os.environ.__class__ = own


def set_default(name: str, value: str) -> None:
    """Set a variable of this process (and its children) unless it is set."""
    os.environ.setdefault(name, value)


def update(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables of this process, unset those that are ``None``, and return the previous values in this form."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_BRACKETS = re.compile(r"(?:[^\[\]]|\[[^\[\]]*\])*")
_PART = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])*)(?:,|\Z)")
_MAX_NODES = 1_000_000


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand a list of counts to one number for each node.

    Args:
        text: As in ``SLURM_TASKS_PER_NODE``: ``4``, ``4(x2)``, ``4(x2),3``.

    Raises:
        ConfigError: The text is malformed.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MAX_NODES:
            raise ConfigError(f"{text!r} is not a list of counts such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the names in a node list, in order.

    Args:
        text: As in ``SLURM_JOB_NODELIST``: ``n1``, ``n[1-3,7]``, ``gpu[07-09],login1``, ``rack[1-2]n[01-16]``.

    Raises:
        ConfigError: The text is malformed.
    """
    names: list[str] = []
    if _BRACKETS.fullmatch(text) is None:
        raise ConfigError(f"{text!r} is not a node list: its brackets do not match")
    for part in [*_PART.finditer(text.strip())][:-1]:  # the last match is the empty end
        names += _expand(part[1].strip(), text)
        if len(names) > _MAX_NODES:
            raise ConfigError(f"{text!r} names more than {_MAX_NODES} nodes")
    return tuple(names)


def _expand(part: str, whole: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not head and not bracket:
        raise ConfigError(f"{whole!r} is not a node list: a name is empty")
    if not bracket:
        return [part]
    inner, _, tail = rest.partition("]")
    middles: list[str] = []
    for piece in inner.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise ConfigError(f"{whole!r} is not a node list: {piece!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < _MAX_NODES:
            raise ConfigError(f"{whole!r} is not a node list: {piece!r} is not a range")
        middles += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    tails = _expand(tail, whole) if tail else [""]
    return [f"{head}{middle}{end}" for middle in middles for end in tails]
