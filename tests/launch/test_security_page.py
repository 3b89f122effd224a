"""docs/security.md is complete: its tables have every socket at which a real job listens, and every file that it
writes."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from outlast import clock
from outlast.errors import RendezvousError
from outlast.runtime.addresses import is_loopback, own_address
from outlast.testing import Cluster
from outlast.testing.ranks import free_port

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).parent / "job_that_uses_all.py"
PAGE = Path(__file__).parents[2] / "docs" / "security.md"
PATIENCE_S = 250
GREETING = b"OLw1"
"""The first bytes of a server that requires the proof of a key (runtime/wire.py)."""


@dataclass(frozen=True)
class Listener:
    """A socket at which a process of the job receives."""

    role: str
    """``agent``, ``writer``, ``rank`` or another process's name."""
    address: str
    """For a Unix socket its name, with ``@`` in place of the leading zero."""
    port: int = 0


def tables() -> dict[str, list[list[str]]]:
    """Return the rows of the page's tables, by the title of the first column."""
    found: dict[str, list[list[str]]] = {}
    title = ""
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            title = ""
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not title:
            title = cells[0]
            found[title] = []
        elif not set(line) <= set("|- "):
            found[title].append(cells)
    return found


def role_of(process: psutil.Process) -> str:
    line = process.cmdline()
    for module, role in (("outlast.checkpoint.writer", "writer"), ("outlast.runtime.agent_process", "agent process")):
        if module in line:
            return role
    if str(SCRIPT) not in line:
        return next((word for word in line if word.startswith("outlast.")), "fork server")
    return "agent" if "run" in line[: line.index(str(SCRIPT))] else "rank"


def listeners(processes: list[psutil.Process]) -> set[Listener]:
    """Return the sockets at which processes listen, from /proc."""
    sockets: dict[str, tuple[str, int]] = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == ("0A" if name.startswith("tcp") else "07"):
                text, port = fields[1].split(":")
                words = struct.pack(f"={len(text) // 8}I", *struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text)))
                family = socket.AF_INET6 if name.endswith("6") else socket.AF_INET
                sockets[fields[9]] = socket.inet_ntop(family, words), int(port, 16)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        is_receiver = int(fields[3], 16) & 0x10000 or fields[4] == "0002"  # listens, or takes datagrams
        if len(fields) > 7 and is_receiver:
            sockets[fields[6]] = fields[7], 0
    found = set()
    for process in processes:
        for name in os.listdir(f"/proc/{process.pid}/fd"):
            try:
                target = os.readlink(f"/proc/{process.pid}/fd/{name}")
            except FileNotFoundError:
                continue  # closed meanwhile
            match = re.fullmatch(r"socket:\[(\d+)\]", target)
            if match and match[1] in sockets:
                found.add(Listener(role_of(process), *sockets[match[1]]))
    return found


def rows_for(one: Listener, endpoint_port: int, store_port: int) -> Iterator[str]:
    """Yield the prefixes of the rows that may describe a listener."""
    match one.role:
        case "agent" if one.port == endpoint_port:
            yield "coordinator: the first agent"
        case "agent" if one.port == store_port:
            yield "ranks' store: the agent"
        case "writer":
            yield "replicas: the checkpoint writer"
        case "agent process":
            yield "agent processes of ranks"
        case "rank":
            yield "gloo and NCCL: each rank"
            yield "a call's store: each rank"


def requires_proof(one: Listener) -> bool:
    """Return whether a client must prove a key."""
    with socket.create_connection((one.address, one.port), 60) as connection:
        return connection.recv(len(GREETING), socket.MSG_WAITALL) == GREETING


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(PATIENCE_S + 50)
def test_sockets_and_files_match_the_security_page(tmp_path: Path) -> None:
    """Two nodes with replication and a wrapped function: each listening socket has its row, with its owner, an
    address of this node only, and a key proof if the row has one; each file has the mode of its row."""
    try:
        address = own_address("192.0.2.1")  # the default route's
    except RendezvousError:
        address = "127.0.0.1"
    port = free_port()
    shared_before = set(os.listdir("/dev/shm"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "key").write_text("a key of enough bytes\n")
    run_dir = tmp_path / "run"
    old_mask = os.umask(0)  # private files must not depend on the umask
    try:
        with Cluster(
            SCRIPT,
            str(tmp_path),
            "0",
            run_dir=run_dir,
            num_nodes=2,
            nproc_per_node=1,
            options=[f"--rdzv-endpoint={address}:{port}", f"--run-key-file={tmp_path / 'key'}", "--tee=3"],
            environment={"TMPDIR": str(temporary)},
        ) as cluster:
            end_s = clock.now_s() + PATIENCE_S
            while not all((tmp_path / f"ready-0-{rank}").exists() for rank in range(2)):
                assert clock.now_s() < end_s, cluster.tails()
                assert all(agent.running for agent in cluster.agents), cluster.tails()
                time.sleep(0.05)
            found = listeners(cluster.processes())
            store_port = int((tmp_path / "ready-0-0").read_text())
            proofs = {
                one: requires_proof(one)
                for one in found
                if one.port and (one.role in ("writer", "agent process") or one.port == port)
            }
            (tmp_path / "go-0").touch()
            assert cluster.wait(timeout_s=PATIENCE_S) == [0, 0], cluster.tails()
    finally:
        os.umask(old_mask)
    page = tables()
    assert {one.role for one in found} >= {"agent", "writer", "rank"}
    for one in found:
        if one.address.startswith("@"):
            names = {
                "agent": r"@outlast-[0-9a-f]{16}-agent|@[0-9a-f]{5}|@outlast-relay-[0-9a-f]{32}",
                "agent process": r"@outlast-agent-[0-9a-f]{32}-0",
                "writer": r"@[0-9a-f]{5}",
                "rank": r"@outlast-[0-9a-f]{16}-\d+",
            }
            assert re.fullmatch(names[one.role], one.address), one
            assert any(row[0].split(":")[0].endswith(one.role) or one.role in row[0] for row in page["who receives"])
            continue
        # Never 0.0.0.0 or ::. Gloo takes the address of the machine's name.
        assert one.address == address or (one.role == "rank" and is_loopback(one.address)), one
        prefixes = tuple(rows_for(one, port, store_port))
        rows = [row for row in page["who listens"] if row[0].startswith(prefixes)]
        assert rows, f"{one} is not on the page"
        assert all(("proves" in row[2]) == proofs.get(one, False) for row in rows), one
    private = {".key", "journal", "logs", "failures", "stacks", "diagnoses", "owner", "ladder.json"}
    (row,) = [row for row in page["what"] if "journal/" in row[0]]
    assert row[1] == "0600, in folders of 0700"
    assert set(re.findall(r"`([^`/]+)/?`", row[0])) == private - {".key"}
    is_open = {name for row in page["what"] if "umask" in row[1] for name in re.findall(r"`([^`/]+)/?`", row[0])}
    for path in run_dir.iterdir():
        if path.name == "agents":
            continue  # the cluster's own
        assert path.name in private | is_open, f"{path} is not on the page"
        if path.name in private:
            assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path
            assert {oct(mode_of(below)) for below in path.rglob("*") if below.is_file()} <= {"0o600"}, path
    for folder in (tmp_path / "global", *tmp_path.glob("local-*/*")):
        for path in folder.rglob("*"):
            below_owner = "owner" in path.relative_to(folder).parts
            if below_owner:
                assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path
            elif path.suffix in (".distcp", ".safetensors"):
                assert mode_of(path) == 0o644, path
            else:
                assert mode_of(path) == (0o777 if path.is_dir() else 0o666), path
    assert list(temporary.rglob("*")) == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared_before if name.startswith("outlast")} == set()
