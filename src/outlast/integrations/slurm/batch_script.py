"""Batch scripts that start a run, and requeue its job if that can help.

Rejected: ``--signal=B:...``, which signals only the batch shell, that has nothing to save; without ``B:`` all agents
get the signal. ``--kill-on-bad-exit=1``, with which the first failing worker ends the spares. A bash trap that
requeues, since it would also requeue a finished run. One output file for all nodes, since the lines of several nodes
would mix.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from outlast import env
from outlast.config.base import require
from outlast.integrations.run_command import check_run_command, is_nproc, split_command
from outlast.integrations.slurm.step_options import check_directives, check_step_options, name_of
from outlast.launch.run_parser import given_options

_NAME = re.compile(r"[A-Za-z0-9_.,\[\]@:+%-]+")
_PATH = re.compile(r"[A-Za-z0-9_./+=:@ -]+")
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|UNLIMITED")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """A job of a run: its Slurm resources and its command.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    command: tuple[str, ...]
    """Arguments after ``outlast run`` and its generated options: more options, the training script, its arguments."""
    run_id: str
    """Names the run; the same in each of its jobs."""
    run_dir: str
    """The run directory, an absolute path that all nodes can access."""
    nodes: int = 1
    """Nodes that train."""
    spares: int = 0
    """Additional nodes that wait for the slot of a lost one."""
    nproc_per_node: str = "auto"
    """Workers on a node: a number, ``auto``, ``gpu`` or ``cpu``."""
    job_name: str | None = None
    """``None`` = the run's id."""
    time: str | None = None
    """Time limit in Slurm's format (``90``, ``4:00:00``, ``2-00``); ``None`` = the partition's."""
    preempt_time: int = 60
    """Seconds before the time limit, and before a preemption with that notice, at which the workers must save and exit;
    Slurm may be up to a minute early. 0 = no signal."""
    num_job_retries_on_failure: int = 2
    """Failed jobs in a row, without progress in between, that are requeued."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: str | None = None
    """A number, or a type and a number (``h100:8``)."""
    cpus_per_task: int | None = None
    """CPUs of a node for its agent and workers together."""
    mem: str | None = None
    exclude: tuple[str, ...] = ()
    """Nodes to exclude; nodes that the run has quarantined are added at each requeue."""
    directives: tuple[str, ...] = ()
    """More ``#SBATCH`` options, each with its dashes (``--constraint=ib``); not those that the script sets."""
    srun: tuple[str, ...] = ()
    """More options of the ``srun`` that starts the agents, each as ``--name`` or ``--name=value``
    (``--container-image=/images/train.sqsh``, ``--cpu-bind=cores``); not those that the script sets."""
    setup: tuple[str, ...] = ()
    """Shell commands that run in the batch script, on the job's first node, before the job's step (``module load
    cuda``), one line each. A failing command ends the job with exit code 2; it is not requeued."""
    port: int = 0
    """Port of the agents' rendezvous on several nodes; 0 = one between 20000 and 29999, from the job's number."""
    outlast: str = "outlast"
    """The ``outlast`` command on every node: a name on ``PATH``, a path, or a command line (``uv run outlast``), which
    is split as a shell would, but nothing in it is expanded."""

    def __post_init__(self) -> None:
        require(bool(self.command), "there is no training script; name one, for example: -- train.py --lr 3e-4")
        require(self.nodes >= 1, f"nodes={self.nodes} must be at least 1")
        require(self.spares >= 0, f"spares={self.spares} must not be negative")
        require(
            self.preempt_time >= 0,
            f"preempt_time={self.preempt_time} must not be negative; 0 = no signal before the time limit",
        )
        require(self.preempt_time <= 65535, f"preempt_time={self.preempt_time} is more than Slurm takes; 65535 at most")
        retries = self.num_job_retries_on_failure
        require(retries >= 0, f"num_job_retries_on_failure={retries} must not be negative")
        require(0 <= self.port < 65536, f"port={self.port} is not a valid port; take one above 1023, or 0")
        require(self.cpus_per_task is None or self.cpus_per_task > 0, f"cpus_per_task={self.cpus_per_task} is not > 0")
        require(
            Path(self.run_dir).is_absolute(), f"run_dir={self.run_dir!r} must be an absolute path that all nodes see"
        )
        require(
            self.run_id != "none" and env.clean_name(self.run_id) == self.run_id,
            f"run_id={self.run_id!r} must consist of letters, digits, '.', '_' and '-', and not be 'none'",
        )
        require(
            self.time is None or _TIME.fullmatch(self.time) is not None,
            f"time={self.time!r} is not a valid time limit; write minutes, hours:minutes:seconds or days-hours",
        )
        for name in ("job_name", "partition", "account", "qos", "gpus_per_node", "mem"):
            value = getattr(self, name)
            require(
                value is None or _NAME.fullmatch(value) is not None,
                f"{name}={value!r} must consist of letters, digits and '_.,[]@:+%-'",
            )
        for node in self.exclude:
            require(
                _NAME.fullmatch(node) is not None,
                f"exclude: {node!r} is not a valid node name; use letters, digits and '_.,[]@:+%-'",
            )
        require(
            _PATH.fullmatch(self.run_dir) is not None,
            f"run_dir={self.run_dir!r} must consist of letters, digits, spaces and '/._+=:@-', as Slurm expands others",
        )
        check_directives(self.directives, self._directives)
        check_step_options(self.srun)
        _ = self._outlast_words
        nproc = self.nproc_per_node
        require(is_nproc(nproc), f"nproc_per_node={nproc!r} is not a number of workers, auto, gpu, xpu or cpu")
        for word in (*self.setup, *self.command):
            require("\n" not in word and "\0" not in word, f"{word!r} is more than one line; give each its own")
        check_run_command(self.command, _OURS)

    @property
    def _outlast_words(self) -> list[str]:
        words = split_command(self.outlast)
        for word in words:
            plain = word[:1] != "~" and not set(word) & set("$`\n;|&<>")
            require(
                plain, f"outlast={self.outlast!r} is taken as it stands, without a shell: {word!r} is not; write it out"
            )
        return words

    @property
    def warnings(self) -> tuple[str, ...]:
        """Possible problems on the cluster although Slurm accepts the script; one line each."""
        found = []
        given = {name_of(one) for one in (*self.directives, *self.srun)}
        if self.cpus_per_task is None and not given & {"cpus-per-gpu", "exclusive"}:
            found.append(
                "without cpus_per_task Slurm gives each node's agent one CPU and may bind it, and all of its workers, "
                "to one core; give the number of CPUs of a node"
            )
        options = dict(one[2:].partition("=")[::2] for one in self.srun)
        if "container-image" in options or "container-name" in options:
            mounts = [one.split(":") for one in options.get("container-mounts", "").split(",") if one]
            targets = [Path(one[1] if len(one) > 1 else one[0]) for one in mounts]
            if not any(Path(self.run_dir).is_relative_to(target) for target in targets):
                found.append(
                    f"the run directory {self.run_dir} is in none of --container-mounts; mount it under the same path "
                    "unless the container has it"
                )
        return tuple(found)

    def render(self) -> str:
        """Return the script."""
        run_dir, ours = shlex.quote(self.run_dir), shlex.join(self._outlast_words)
        directives = "".join(f"#SBATCH {line}\n" for line in (*self._directives, *self.directives))
        setup = "".join(f"{{\n{line}\n}} || setup_failed $? {shlex.quote(line)}\n" for line in self.setup)
        if setup:
            failed = "the setup command failed with exit code $1, and the job ends: $2"
            setup = f'setup_failed() {{ echo "outlast: {failed}" >&2; exit 2; }}\n{setup}\n'
        step = "--ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0"
        step += " --no-kill" if self.spares else ""
        # Since Slurm 22.05, srun does not inherit this option from the job.
        step += f" --cpus-per-task={self.cpus_per_task}" if self.cpus_per_task is not None else ""
        if self._num_nodes > 1:
            output = shlex.quote(f"{self.run_dir}/slurm-%j-%n-%N.log")
            step += f" \\\n  --output={output} --open-mode=append"
        if self.srun:
            step += f" \\\n  {shlex.join(self.srun)}"
        nnodes = f"{self.nodes}:{self._num_nodes}" if self.spares else str(self.nodes)
        options = [f"--nnodes={nnodes}", f"--nproc-per-node={self.nproc_per_node}"]
        meeting = ""
        has_endpoint = "rdzv_endpoint" in given_options(self.command)
        if self._num_nodes > 1 and not has_endpoint:
            port = str(self.port or "$((20000 + SLURM_JOB_ID % 10000))")
            meeting = (
                "# Where the agents meet: the first of these that lives hosts it.\n"
                'endpoints=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 3 | '
                f'sed "s/$/:{port}/" | paste -sd, -)\n\n'
            )
            options.append('--rdzv-endpoint="$endpoints"')
        options += [f"--rdzv-id={self.run_id}", f"--run-dir={run_dir}"]
        agent = shlex.quote(f'exec {ours} run --node-name="$SLURMD_NODENAME" "$@"')
        retries = self.num_job_retries_on_failure
        return f"""#!/usr/bin/env bash
# Made by `outlast slurm script`. Each node runs one agent. The time limit, and a preemption, are announced to the
# agents' step; the workers then save, and the job ends with exit code 75.
# Before sbatch: mkdir -p {run_dir} (Slurm opens the output file before this script runs).
{directives}
{setup}{meeting}srun {step} \\
  bash -c {agent} outlast \\
  {" ".join(options)} \\
  {shlex.join(self.command)}
code=$?

# Shutdown requested (75, or 128 and a signal): back to the queue. A failure: at most {retries} times without progress.
# Finished (0), and what needs a person (2, 17, 93): never.
{ours} slurm requeue --run-dir={run_dir} --exit-code="$code" --num-job-retries-on-failure={retries}
exit "$code"
"""

    @property
    def _num_nodes(self) -> int:
        return self.nodes + self.spares

    @property
    def _directives(self) -> list[str]:
        """The generated options of ``#SBATCH`` lines."""
        output = f"{self.run_dir}/slurm-%j.log"
        lines = [
            f"--job-name={self.job_name or self.run_id}",
            f"--nodes={self._num_nodes}",
            "--ntasks-per-node=1",
            "--requeue",
            "--open-mode=append",
            f'--output="{output}"' if " " in output else f"--output={output}",
        ]
        if self.preempt_time:
            lines.append(f"--signal=TERM@{self.preempt_time}")
        if self.spares:
            lines.append("--no-kill")
        if self.exclude:
            lines.append(f"--exclude={','.join(self.exclude)}")
        options = ("time", "partition", "account", "qos", "gpus_per_node", "cpus_per_task", "mem")
        lines += [
            f"--{name.replace('_', '-')}={value}" for name in options if (value := getattr(self, name)) is not None
        ]
        return lines


_OURS = {
    "nnodes": "nodes and spares",
    "nproc_per_node": "nproc_per_node",
    "rdzv_id": "run_id",
    "run_dir": "run_dir",
    "node_name": "Slurm's own names",
}
"""Options of ``outlast run`` that the script sets, and their sources."""
