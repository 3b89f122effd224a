"""Checks of user-supplied options of ``srun`` and ``#SBATCH`` lines in a batch script.

An option that ``srun`` does not know fails only after the job has waited in the queue, so unknown names are refused
when the script is created. Options of site plug-ins are known where ``srun`` is installed, from its help.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from functools import cache

from outlast.config.base import nearest, require

_SHORT_NAMES = """
A=account B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency E=preserve-env e=error F=nodefile
G=gpus H=hold h=help I=immediate i=input J=job-name K=kill-on-bad-exit k=no-kill L=licenses l=label M=clusters
m=distribution N=nodes n=ntasks O=overcommit o=output p=partition Q=quiet q=qos r=relative S=core-spec s=oversubscribe
T=threads t=time u=unbuffered V=version v=verbose W=wait w=nodelist X=disable-status x=exclude Z=no-allocate
"""
_OF_SRUN = """
accel-bind acctg-freq bcast bcast-exclude chdir comment compress container container-id core-spec cores-per-socket
cpu-bind cpu-freq cpus-per-gpu disable-status distribution epilog error exact exclusive export export-file
extra-node-info gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint immediate input
interactive job-name label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi msg-timeout network oom-kill-step overcommit
overlap oversubscribe preserve-env profile prolog propagate quiet quit-on-interrupt resv-ports send-libs slurmd-debug
sockets-per-node task-epilog task-prolog thread-spec threads threads-per-core time treewidth tres-bind tres-per-task
unbuffered verbose x11
"""
"""Step options of Slurm 22.05 to 25.05."""
_OF_PYXIS = """
container-image container-mounts container-workdir container-name container-save container-image-save
container-mount-home no-container-mount-home container-remap-root no-container-remap-root container-entrypoint
no-container-entrypoint container-entrypoint-log container-writable container-readonly container-env
"""
_OTHER_TASKS = """
exclude het-group jobid multi-prog no-allocate nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
ntasks-per-socket pty relative signal
"""
_OF_THE_JOB = """
account bb bbf begin cluster-constraint clusters constraint contiguous deadline delay-boot dependency gid hold licenses
mail-type mail-user mcs-label nice partition power prefer priority qos reboot reservation segment spread-job switches
time-min tmp uid use-min-nodes wckey
"""
_SHORT = dict(one.split("=") for one in _SHORT_NAMES.split())
_ACCEPTED = frozenset((*_OF_SRUN.split(), *_OF_PYXIS.split()))
_STEP = "the script starts one agent on each node of the job"
_OURS = "the script sets it"
_REFUSED = {
    **dict.fromkeys(("kill-on-bad-exit", "no-kill", "ntasks-per-node", "open-mode", "output", "wait"), _OURS),
    "cpus-per-task": "the script sets it from cpus_per_task",
    **dict.fromkeys(_OTHER_TASKS.split(), _STEP),
    **dict.fromkeys(("help", "test-only", "usage", "version"), "with it srun starts nothing"),
    **dict.fromkeys(_OF_THE_JOB.split(), "it is an option of the job; write it in directives (--directive)"),
}
"""Options of ``srun`` that a script cannot take, and why."""
_OF_JOB = {
    "ntasks": _STEP,
    "cpus-per-task": "srun does not take it from the job; use cpus_per_task",
    "exclude": "use exclude, to which the run's excluded nodes are added",
    "no-requeue": "the script sets --requeue",
    "wrap": "the script has a command",
    "array": "the jobs of an array would share a run directory; submit one job for each run",
}
"""Options of ``sbatch`` that a script cannot take although it does not set them, and why."""


def check_step_options(options: Iterable[str]) -> None:
    """Check options that are added to the script's ``srun``.

    Raises:
        ConfigError: An option is not an option of ``srun``, or the script cannot take it; the message names it.

    Blocks: up to 10 s, if an option is unknown and ``srun --help`` is read.
    """
    given = dict[str, str]()
    for option in options:
        require(
            re.fullmatch(r"-[A-Za-z].*|--[a-z0-9-]+(=[^\n\0]+)?", option) is not None,
            f"the srun option {option!r} is not in the form --name or --name=value",
        )
        if option[1] != "-":
            long = _SHORT.get(option[1])
            hint = f"--{long}" if long is not None else "--label"
            require(False, f"the srun option {option!r} is not a long option; write its long name, such as {hint}")
        name = option[2:].partition("=")[0]
        require(name not in _REFUSED, f"the srun option --{name} cannot be added: {_REFUSED.get(name)}")
        require(name not in given, f"the srun option --{name} is given twice; leave one out")
        given[name] = option
        if name not in _ACCEPTED and name not in installed_options():
            known = _ACCEPTED | installed_options()
            close = nearest(name, known)
            hint = close.replace("'", "--", 1).replace("'", "") if close.startswith("did you mean") else ""
            where = "an option of a plug-in is known only where srun is installed"
            require(False, f"--{name} is not an option of srun; {hint or where}")


def check_directives(lines: Iterable[str], own: Iterable[str]) -> None:
    """Check ``#SBATCH`` lines that are added to a script.

    Raises:
        ConfigError: A line changes an option that the script sets or needs; the message names it.
    """
    taken = {name_of(line) for line in own}
    for line in lines:
        require(line.startswith("-") and "\n" not in line, f"{line!r} is not an option of sbatch; write it with dashes")
        name = name_of(line)
        why = _OF_JOB.get(name) or (_OURS if name in taken else None)
        require(why is None, f"the directive {line!r} cannot be added: {why}")


def name_of(option: str) -> str:
    """Return the long name of an option of Slurm, without dashes."""
    if option.startswith("--"):
        return re.split(r"[=\s]", option[2:], maxsplit=1)[0]
    return _SHORT.get(option[1:2], option[1:2])


@cache
def installed_options() -> frozenset[str]:
    """Return the options in the help of the installed ``srun``, plug-ins included; empty without ``srun``."""
    try:
        done = subprocess.run(["srun", "--help"], capture_output=True, text=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(re.findall(r"^ *(?:-\w, +)?--([a-z0-9-]+)", done.stdout, re.MULTILINE))
