"""The Slurm job in which a process runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from outlast import env
from outlast.env import expand_nodes, read_counts, read_number
from outlast.wording import count

log = logging.getLogger(__name__)
_logged: set[tuple[str, int]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class SLURMInfo:
    """A Slurm job, as its processes see it."""

    job_id: str
    """Number of the job, unchanged when it is requeued."""
    job_name: str = ""
    node_list: str = ""
    """The job's nodes in Slurm's short form; :attr:`nodes` has their names."""
    num_nodes: int = 1
    ntasks_per_node: int = 1
    """Tasks on a node; the maximum if they differ."""
    restart_count: int = 0
    """How often the job was requeued."""
    partition: str = ""
    array_task_id: str | None = None
    """``None`` unless the job is part of an array."""
    tasks_per_node: tuple[int, ...] = ()
    """Tasks of each node, in the order of :attr:`nodes`; empty = not known."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the job's nodes."""
        return expand_nodes(self.node_list)

    @property
    def is_requeued(self) -> bool:
        """Whether the job ran before and was requeued."""
        return self.restart_count > 0

    def describe(self) -> str:
        """Return one line for people."""
        array = f", array task {self.array_task_id}" if self.array_task_id is not None else ""
        again = f", re-queued {count(self.restart_count, 'time')}" if self.is_requeued else ""
        where = f"{count(self.num_nodes, 'node')} ({self.node_list})"
        per_node = f"{count(self.ntasks_per_node, 'task')} each"
        partition = f", partition {self.partition}" if self.partition else ""
        return f"Slurm job {self.job_id} {self.job_name!r}{array}: {where}, {per_node}{partition}{again}"


def get_slurm_info(environment: Mapping[str, str] | None = None) -> SLURMInfo | None:
    """Return the Slurm job of this process; ``None`` outside of Slurm.

    Args:
        environment: Read instead of the environment of this process.

    Raises:
        ConfigError: A variable of Slurm has an invalid value.
    """
    values = env.environ() if environment is None else environment
    job_id = values.get("SLURM_JOB_ID") or values.get("SLURM_JOBID")
    if not job_id:
        return None
    node_list = values.get("SLURM_JOB_NODELIST") or values.get("SLURM_NODELIST") or ""
    per_node = read_counts(values, "SLURM_TASKS_PER_NODE")
    wished = read_counts(values, "SLURM_NTASKS_PER_NODE") or read_counts(values, "SLURM_STEP_TASKS_PER_NODE")
    num_named = len(expand_nodes(node_list)) or 1
    return SLURMInfo(
        job_id=job_id,
        job_name=values.get("SLURM_JOB_NAME", ""),
        node_list=node_list,
        num_nodes=read_number(values, "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=num_named),
        ntasks_per_node=max(wished or per_node, default=1),
        restart_count=read_number(values, "SLURM_RESTART_COUNT", default=0),
        partition=values.get("SLURM_JOB_PARTITION", ""),
        array_task_id=values.get("SLURM_ARRAY_TASK_ID") or None,
        tasks_per_node=per_node,
    )


def is_requeued(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process's Slurm job ran before and was requeued; ``False`` outside of Slurm."""
    info = get_slurm_info(environment)
    return info is not None and info.is_requeued


def log_job_info(environment: Mapping[str, str] | None = None) -> SLURMInfo | None:
    """Log the Slurm job in one line, once per start of the job: by global rank 0, in the job's first cycle.

    A session calls this when it is created; another call in the same process logs nothing.

    Args:
        environment: Read instead of the environment of this process.

    Returns:
        The job; ``None`` outside of Slurm.

    Raises:
        ConfigError: A variable of Slurm has an invalid value.
    """
    info = get_slurm_info(environment)
    if info is not None and (start := (info.job_id, info.restart_count)) not in _logged:
        place = env.read_worker(environment)
        if place.is_first:
            _logged.add(start)
            log.info("%s", info.describe())
    return info
