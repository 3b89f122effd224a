"""Network namespaces of this machine as hosts, each with an address, joined by one bridge.

The bridge has no address and no uplink, so that neither this machine's network nor another run's is affected. A cut
host is detached from the bridge: its packets are dropped silently, as behind a dead switch. Names contain the id of the
process that made them; the remains of killed processes are removed at the next start.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from outlast.errors import ConfigError

log = logging.getLogger(__name__)
INTERFACE = "eth0"
"""Name of each host's interface."""
_NAME = re.compile(r"outlast-chaos-(\d+)-\d+")
_FOLDER = Path("/var/run/netns")
_BRIDGE = re.compile(r"olb(\d+)")
_TOOLS = ("ip", "tc", "nsenter")
_MAX_HOSTS = 200
_TIMEOUT_S = 20.0


class NodeNetwork:
    """Make hosts; a context manager, which removes them.

    Args:
        num_hosts: Number of hosts.
        needs_netem: Whether delay and loss must be possible.

    Raises:
        ConfigError: This user, machine or kernel does not permit it; the message says what is missing.

    Blocks: some milliseconds per host.
    """

    def __init__(self, num_hosts: int, *, needs_netem: bool = False) -> None:
        if os.geteuid() != 0:
            raise ConfigError("--netns needs root, to make network namespaces; run it as root, or leave --netns out")
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise ConfigError(f"--netns needs {' and '.join(missing)}; install iproute2 and util-linux")
        if num_hosts > _MAX_HOSTS:
            raise ConfigError(f"{num_hosts} nodes are too many for --netns; give at most {_MAX_HOSTS}")
        self._num_hosts, self._needs_netem = num_hosts, needs_netem
        self._bridge = f"olb{os.getpid()}"

    def __enter__(self) -> NodeNetwork:
        clear_namespaces()
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for host in range(self._num_hosts):
                self._make(host)
            if self._needs_netem:
                self._try_netem()
        except OSError as error:
            self.close()
            raise ConfigError(f"--netns: {error}; leave --netns out on this machine") from None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"198.18.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one on a host, in the same process."""
        return ["nsenter", f"--net={_FOLDER / self._name(host)}", "--", *command]

    def cut(self, host: int) -> None:
        """Drop all packets to and from a host. Raises: OSError."""
        _run("ip", "link", "set", self._port(host), "nomaster")

    def join(self, host: int) -> None:
        """Undo :meth:`cut`. Raises: OSError."""
        _run("ip", "link", "set", self._port(host), "master", self._bridge)

    def impair(self, host: int, *, delay_s: float = 0.0, share: float = 0.0) -> None:
        """Delay a host's packets, or lose a share of them.

        Args:
            host: Number of the host.
            delay_s: Delay of each packet in seconds.
            share: Share of lost packets, up to 1.

        Raises:
            OSError: The kernel has no netem.
        """
        delay = ["delay", f"{delay_s * 1000:.3f}ms"] if delay_s > 0 else []
        loss = ["loss", f"{share * 100:.4f}%"] if share > 0 else []
        self._tc(host, "replace", "netem", *delay, *loss)

    def repair(self, host: int) -> None:
        """Undo :meth:`impair`. Raises: OSError."""
        self._tc(host, "del")

    def close(self) -> None:
        """Remove all hosts. Idempotent."""
        _remove(os.getpid())

    def _make(self, host: int) -> None:
        name, port = self._name(host), self._port(host)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _run("ip", "link", "set", port, "master", self._bridge, "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _try_netem(self) -> None:
        try:
            self.impair(0, delay_s=0.001)
            self.repair(0)
        except OSError:
            raise ConfigError(
                "this kernel has no netem (sch_netem): delay and loss cannot be caused; leave them out of the plan"
            ) from None

    def _tc(self, host: int, verb: str, *words: str) -> None:
        _run(*self.command(host, ["tc", "qdisc", verb, "dev", INTERFACE, "root", *words]))

    def _name(self, host: int) -> str:
        return f"outlast-chaos-{os.getpid()}-{host}"

    def _port(self, host: int) -> str:
        return f"olv{os.getpid()}x{host}"


def clear_namespaces() -> None:
    """Remove the hosts of processes that no longer exist."""
    owners = {int(match[1]) for name in _names() if (match := _NAME.fullmatch(name))}
    owners |= {int(match[1]) for path in Path("/sys/class/net").iterdir() if (match := _BRIDGE.fullmatch(path.name))}
    for owner in owners:
        if not Path(f"/proc/{owner}").exists():
            log.info("removing the network namespaces of process %d, which is gone", owner)
            _remove(owner)


def _names() -> list[str]:
    return [path.name for path in _FOLDER.iterdir()] if _FOLDER.is_dir() else []


def _remove(owner: int) -> None:
    """Remove one process's hosts: ports first, as those in a namespace are removed some time after it."""
    commands = [
        *(["ip", "link", "del", path.name] for path in Path("/sys/class/net").glob(f"olv{owner}x*")),
        *(["ip", "netns", "del", name] for name in _names() if name.startswith(f"outlast-chaos-{owner}-")),
        *(["ip", "link", "del", path.name] for path in Path("/sys/class/net").glob(f"olb{owner}")),
    ]
    for command in commands:
        try:
            _run(*command)
        except OSError as error:
            log.debug("%s", error)


def _run(*command: str) -> None:
    """Run a command. Raises: OSError: it failed; the text is its stderr."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(command)} did not end within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise OSError(f"{' '.join(command)}: {said}")
