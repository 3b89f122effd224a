"""Pods without Kubernetes: processes in separate namespaces, with the host names of a headless service.

A pod runs the command of a manifest after the kubelet's expansion. Its main process has pid 1 in its namespace, as
in a container. Host names are those of published pods, and an address is never reused. Needs root.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUTLAST = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())")
LIMIT_S = 240.0


def can_create() -> bool:
    """Return whether pods can be created on this machine."""
    if os.geteuid() != 0:
        return False
    checks = (["ip", "netns"], ["unshare", "--mount", "--pid", "--fork", "--kill-child", "true"])
    return not any(subprocess.run(arguments, check=False, capture_output=True).returncode for arguments in checks)


def expand(arguments: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a command after the kubelet's expansion: ``$(NAME)`` of a known variable is replaced, ``$$`` becomes
    ``$``."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else values.get(found[1], found[0])

    return [re.sub(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)", one, word) for word in arguments]


class Pods:
    """The pods of one indexed job on one network.

    Args:
        folder: A folder that all pods share, as the volume of the run directory.
        manifest: A JobSet.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.name = manifest["metadata"]["name"]
        self.job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        self._tag = f"{os.getpid() % 10000}{random.randrange(100)}"
        self._switch = f"olw{self._tag}"
        self._num_started = 0
        self._namespaces: list[str] = []
        self._names: dict[str, str] = {}
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "nsswitch").write_text("hosts: files\n")
        self._hosts: list[tuple[Path, str]] = []

    def __enter__(self) -> Pods:
        try:
            self._ip("netns", "add", self._switch)
            self._namespaces.append(self._switch)
            self._ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            self._ip("-n", self._switch, "link", "set", "br0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            pod.kill()
            pod.wait()
        for name in reversed(self._namespaces):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=300)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=300)

    def start(self, index: int, machine: str) -> None:
        """Start a pod, or a replacement for one that has ended; its name is not published yet."""
        self._num_started += 1
        number = self._num_started
        namespace, address, host = f"olp{self._tag}x{number}", f"10.9.0.{number}", f"{self.name}-node-0-{index}"
        self._ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        self._ip("-n", namespace, "link", "set", "lo", "up")
        peer = ("type", "veth", "peer", "name", f"p{number}", "netns", self._switch)
        self._ip("link", "add", "eth0", "netns", namespace, *peer)
        self._ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        self._ip("-n", namespace, "link", "set", "eth0", "up")
        self._ip("-n", self._switch, "link", "set", f"p{number}", "master", "br0", "up")
        hosts = self.folder / f"hosts-{number}"
        self._hosts.append((hosts, f"127.0.0.1 localhost\n{address} {host}.{self.name}.default.svc {host}\n"))
        (container,) = self.job["template"]["spec"]["containers"]
        values = {"NODE_NAME": machine, "JOB_COMPLETION_INDEX": str(index)}
        command = expand([*container["command"], *container["args"]], values)
        assert command[0] == "outlast"
        shell = 'mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/nsswitch.conf && hostname "$3" && shift 3 && '
        shell += 'exec "$@"'
        inside = ["sh", "-c", shell, "sh", str(hosts), str(self.folder / "nsswitch"), host, *OUTLAST, *command[1:]]
        self._write_hosts()
        new_namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.log(index), "ab") as log:
            self.pods[index] = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *new_namespaces, *inside],
                cwd=self.folder,
                env={**os.environ, **values, "GLOO_SOCKET_IFNAME": "eth0"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._published = {**getattr(self, "_published", {}), index: f"{address} {host}.{self.name}\n"}

    def publish(self) -> None:
        """Publish the names of all pods, each with its newest address."""
        self._names = {str(index): line for index, line in self._published.items()}
        self._write_hosts()

    def _write_hosts(self) -> None:
        for path, own in self._hosts:
            path.write_text(own + "".join(self._names.values()))

    def log(self, index: int) -> Path:
        return self.folder / f"pod-{index}.log"

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')}" for path in self.folder.glob("pod-*.log")
        )

    def main(self, index: int) -> int:
        """Return the pid of a pod's main process outside its namespace."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    arguments = (folder / "cmdline").read_bytes().split(b"\0")
                    status = (folder / "status").read_text()
                except OSError:
                    continue
                ids = re.search(r"^NSpid:\s+\d+\s+1$", status, re.MULTILINE)
                host = f"{self.name}-node-0-{index}"
                if ids and b"run" in arguments and self._host_of(int(folder.name)) == host:
                    return int(folder.name)
            time.sleep(0.05)
        raise AssertionError(f"pod {index} has no main process\n{self.logs()}")

    @staticmethod
    def _host_of(pid: int) -> str:
        arguments = ["nsenter", "--target", str(pid), "--uts", "hostname"]
        return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=300).stdout.strip()

    def wait_for(self, text: str, index: int, *, times: int = 1) -> None:
        """Wait until a pod's log contains a text ``times`` times."""
        end_s = time.monotonic() + LIMIT_S
        while self.log(index).read_text(errors="replace").count(text) < times:
            assert time.monotonic() < end_s, f"no {text!r} in the log of pod {index}\n{self.logs()}"
            time.sleep(0.05)

    def wait_for_any(self, text: str) -> int:
        """Return the first pod whose log contains a text."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            for index in self.pods:
                if text in self.log(index).read_text(errors="replace"):
                    return index
            assert time.monotonic() < end_s, f"no {text!r} in any log\n{self.logs()}"
            time.sleep(0.05)

    def wait(self, *indices: int) -> dict[int, int]:
        """Return the exit codes of pods once they have ended."""
        try:
            return {index: self.pods[index].wait(LIMIT_S) for index in indices}
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a pod did not end\n{self.logs()}") from None
