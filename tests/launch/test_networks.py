"""Addresses in real network namespaces: two machines with only IPv6, or with a second interface.

Each namespace is a machine. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.extended]
MAIN = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())")
TRAIN = """
import os, pathlib, torch, torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = os.environ["LAN"]
dist.init_process_group("gloo")
one = torch.ones(1); dist.all_reduce(one); dist.barrier()
def listening():
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                yield words[1]
print("sum", one.item(), "master", os.environ["MASTER_ADDR"], flush=True)
if dist.get_rank() == 0:
    print("sockets", *listening(), flush=True)
dist.barrier()
"""
PORTS = range(41000, 41050)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=300)


class Machines:
    """Two namespaces, connected by the interfaces lan0 and lan1."""

    def __init__(self) -> None:
        self.names = [f"ol{os.getpid()}{end}" for end in "ab"]

    def __enter__(self) -> Machines:
        try:
            for name in self.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            for link in ("lan0", "lan1"):
                first, second = self.names
                ip("link", "add", link, "netns", first, "type", "veth", "peer", "name", link, "netns", second)
                for name in self.names:
                    ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=300)

    def assign_addresses(self, link: str, *addresses: str) -> None:
        """Assign an address on a link to each machine."""
        for name, address in zip(self.names, addresses, strict=True):
            extra = ["nodad"] if ":" in address else []
            ip("-n", name, "addr", "add", address, "dev", link, *extra)

    def run(self, folder: Path, hosts: list[str], *options: str, lan: str = "lan0") -> list[tuple[int, str]]:
        """Run two agents, each with its own ``/etc/hosts``, and return exit code and output of each."""
        (folder / "train.py").write_text(TRAIN)
        agents = []
        for node, (name, text) in enumerate(zip(self.names, hosts, strict=True)):
            private_files = folder / f"hosts{node}"
            private_files.write_text(text)
            arguments = ["run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=net", f"--run-dir={folder / 'run'}"]
            arguments += [f"--node-name=n{node}", f"--node-rank={node}", *options, "train.py"]
            script = f'mount --bind "{private_files}" /etc/hosts && exec "$@"'
            agents.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", script, "sh", *MAIN, *arguments],
                    cwd=folder,
                    env={**os.environ, "LAN": lan},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            return [(agent.wait(), output) for agent in agents for output in [agent.communicate(timeout=200)[0]]]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Return two machines that can reach each other; the test is skipped where namespaces are not permitted."""
    if os.geteuid() != 0 or subprocess.run(["ip", "netns"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    with Machines() as two_machines:
        yield two_machines


def check_trained(ends: list[tuple[int, str]], master: str) -> None:
    """Check that both nodes finished with a sum over both ranks and with this master address."""
    for code, output in ends:
        assert code == 0, ends
        assert f"sum 2.0 master {master}" in output, ends


def listening(ends: list[tuple[int, str]]) -> list[tuple[str, int]]:
    """Return the address as the kernel writes it and the port of each listening socket on the first machine."""
    line = next(line for _, output in ends for line in output.splitlines() if "sockets " in line)
    return [(word.split(":")[0], int(word.split(":")[1], 16)) for word in line.split("sockets ")[1].split()]


@pytest.mark.extended
def test_two_nodes_train_over_ipv6_alone(machines: Machines, tmp_path: Path) -> None:
    """A network without IPv4 is sufficient for a run of two nodes, and no socket listens on all IPv6 addresses."""
    machines.assign_addresses("lan0", "fd00::1/64", "fd00::2/64")
    ends = machines.run(tmp_path, ["::1 localhost\n"] * 2, "--rdzv-endpoint=[fd00::1]:29400")
    check_trained(ends, "fd00::1")
    found = listening(ends)
    own_sockets = [address for address, _ in found if len(address) == 32]
    assert len(own_sockets) >= 2, found
    assert all(set(address) != {"0"} for address in own_sockets), found


def test_interface_and_port_range_are_used(machines: Machines, tmp_path: Path) -> None:
    """--interface overrides the route to the endpoint, and all listening ports are within --port-range."""
    machines.assign_addresses("lan0", "10.9.0.1/24", "10.9.0.2/24")
    machines.assign_addresses("lan1", "10.8.0.1/24", "10.8.0.2/24")
    options = ("--rdzv-endpoint=10.9.0.1:29400", "--interface=nosuch0,lan1", f"--port-range={PORTS[0]}-{PORTS[-1]}")
    ends = machines.run(tmp_path, ["127.0.0.1 localhost\n"] * 2, *options, lan="lan1")
    check_trained(ends, "10.8.0.1")
    found = listening(ends)
    assert any(address == "0100080A" and port in PORTS for address, port in found), found


@pytest.mark.extended
def test_a_host_name_of_loopback_is_not_used_for_peers(machines: Machines, tmp_path: Path) -> None:
    """With Debian's 127.0.1.1 for the host name the peers use the address of the default route."""
    machines.assign_addresses("lan0", "10.9.0.1/24", "10.9.0.2/24")
    hosts = ["127.0.0.1 localhost\n127.0.1.1 head\n", "127.0.0.1 localhost\n10.9.0.1 head\n"]
    for name in machines.names:
        ip("-n", name, "route", "add", "default", "dev", "lan0")
    check_trained(machines.run(tmp_path, hosts, "--rdzv-endpoint=head:29400"), "10.9.0.1")
