"""A real Slurm of three nodes on this machine, in a temporary folder."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from outlast.testing.ranks import free_port

NODES = ("n1", "n2", "n3")
KEEPER = Path(__file__).with_name("slurm_keeper.py")
CONF = """\
ClusterName=outlast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# How long a re-queued job waits before it starts again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=5
InactiveLimit=0
KillWait=10
MinJobAge=3600
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Commands, power-offs, and waiting for jobs."""

    def __init__(self, folder: Path, keeper: subprocess.Popen[bytes]) -> None:
        self.folder, self._keeper = folder, keeper
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        dropped = ("SLURM_", "SBATCH_", "OUTLAST_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        self.env = {**inherited, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command; return its output. It must succeed."""
        done = subprocess.run(command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return Slurm's record of a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def power_off(self, node: str) -> None:
        """Kill the daemon of a node and all processes on it."""
        self._order(f"power_off {node}")

    def kill_daemon(self, node: str) -> None:
        """Kill the daemon of a node; its other processes continue."""
        self._order(f"kill_daemon {node}")

    def running_on(self, node: str) -> list[str]:
        """Return the processes of job steps on a node."""
        found = []
        for process in psutil.Process(self._keeper.pid).children(recursive=True):
            try:
                if process.environ().get("SLURMD_NODENAME") == node:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            except psutil.Error:
                continue  # the process has just ended
        return found

    def _order(self, line: str) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(f"{line}\n".encode())
        self._keeper.stdin.flush()
        assert self._keeper.stdout.readline() == b"done\n"

    def wait_until(self, holds: Callable[[], bool], timeout_s: float, told: Callable[[], str] = str) -> None:
        """Poll ten times per second until ``holds()``; fail with the text of ``told()``."""
        until = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < until, f"not within {timeout_s:g} s: {told()}\n{self.log()}"
            assert self._keeper.poll() is None, self.log()
            time.sleep(0.1)

    def wait_for_end(self, job_id: str, timeout_s: float = 300, told: Callable[[], str] = str) -> dict[str, str]:
        """Wait until a job has ended and is not requeued; return Slurm's record of the job."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_until(
            lambda: self.job(job_id)["JobState"] in over, timeout_s, lambda: f"{self.job(job_id)}\n{told()}"
        )
        return self.job(job_id)

    def log(self) -> str:
        """Return the end of the controller's log."""
        return "\n".join((self.folder / "slurmctld.log").read_text(errors="replace").splitlines()[-30:])


@contextmanager
def run_slurm() -> Iterator[SlurmCluster]:
    """Start a cluster, and end all of its processes."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=_path()) is None]
    assert not missing, f"{', '.join(missing)} not found; install slurm-wlm and munge (Debian), or: make slurm"
    folder = Path(tempfile.mkdtemp(prefix="outlast-slurm-"))
    try:
        folder.chmod(0o755)  # clients of munged need access to its socket
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        user = pwd.getpwuid(os.geteuid()).pw_name
        host = socket.gethostname().split(".")[0]
        conf = CONF.format(host=host, user=user, folder=folder, ports=free_ports(4))
        (folder / "slurm.conf").write_text(conf)
        with subprocess.Popen(
            [sys.executable, str(KEEPER), str(folder), ",".join(NODES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PATH": _path()},
        ) as keeper:
            cluster = SlurmCluster(folder, keeper)
            try:
                cluster.wait_until(lambda: _is_up(cluster), 180)
                yield cluster
            finally:
                assert keeper.stdin is not None
                keeper.stdin.close()
                keeper.wait(timeout=300)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(num: int) -> list[int]:
    """Return unused ports."""
    ports: set[int] = set()
    while len(ports) < num:
        ports.add(free_port())
    return [*ports]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin"])


def _is_up(cluster: SlurmCluster) -> bool:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode == 0 and done.stdout.split() == ["idle"] * len(NODES)
