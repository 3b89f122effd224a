"""Owns the processes of a Slurm cluster: starts and kills daemons, powers nodes off, ends everything when stdin
closes.

Run as a program. The keeper is a subreaper, so job steps, which Slurm's daemons detach, stay among its children:
none of them outlives the keeper, and the keeper does not outlive the holder of its stdin.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36


class Keeper:
    def __init__(self, folder: Path) -> None:
        self.folder, self.me = folder, psutil.Process()
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def power_on(self, node: str) -> None:
        self.start(node, ["slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf")])

    def kill_daemon(self, node: str) -> None:
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def power_off(self, node: str) -> None:
        self.kill_daemon(node)
        mark = f"SLURMD_NODENAME={node}".encode()
        for process in self.me.children(recursive=True):
            if mark in environ_of(process).split(b"\0"):
                step_daemons = [one for one in process.parents() if one.name().startswith("slurmstepd")]
                kill([*step_daemons, process])

    def reap(self) -> None:
        known = {daemon.pid for daemon in self.daemons.values()}
        for process in self.me.children():
            if process.pid not in known and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)

    def close(self) -> None:
        while children := self.me.children(recursive=True):  # killing a parent brings its children here
            kill(children)
            self.reap()
            for name in [name for name, daemon in self.daemons.items() if daemon.poll() is not None]:
                del self.daemons[name]


def environ_of(process: psutil.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return b""


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=1)


def main() -> None:
    folder, nodes = Path(sys.argv[1]), sys.argv[2].split(",")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the holder of stdin
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    keeper = Keeper(folder)
    try:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        paths = [f"--{option}={folder / name}" for option, name in files.items()]
        keeper.start("munged", ["munged", "--foreground", "--force", "--num-threads=2", *paths])
        keeper.start("slurmctld", ["slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf")])
        for node in nodes:
            keeper.power_on(node)
        while True:
            readable, _, _ = select.select([0], [], [], 0.5)
            keeper.reap()
            if readable:
                order, _, node = os.read(0, 1000).decode().strip().partition(" ")
                if not order:
                    return
                {"power_off": keeper.power_off, "kill_daemon": keeper.kill_daemon}[order](node)
                os.write(1, b"done\n")
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
