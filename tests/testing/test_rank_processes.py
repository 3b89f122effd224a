"""Plain ranks of a script: what they are told, what can be done to them, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.errors import DeadlineExceeded
from outlast.testing import RankProcesses
from outlast.testing import ranks as reaping
from outlast.testing.ranks import free_port

SCRIPT = """
import os, signal, subprocess, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "OUTLAST_NODE", "MASTER_ADDR")
print("place", *(os.environ.get(name) for name in names), *sys.argv[1:])
if "leave-child" in sys.argv:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if "end" not in sys.argv:
    print("waiting")
    signal.pause()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.process
def test_ranks_are_told_their_places(script: Path, tmp_path: Path) -> None:
    """Each rank gets the variables of its rank, counted on its own node where nodes are named; output stays."""
    with RankProcesses(script, "end", world_size=3, directory=tmp_path / "out", nodes=["a", "b", "a"]) as ranks:
        assert ranks.wait(timeout_s=300) == [0, 0, 0]
    places = [(tmp_path / "out" / f"rank-{rank}.log").read_text().strip() for rank in range(3)]
    assert places == [
        "place 0 0 2 3 a 127.0.0.1 end",
        "place 1 0 1 3 b 127.0.0.1 end",
        "place 2 1 2 3 a 127.0.0.1 end",
    ]


@pytest.mark.process
def test_nothing_of_the_ranks_is_left(script: Path) -> None:
    """Ranks, stopped ones too, and what they started in sessions of their own end with the block."""
    ranks = RankProcesses(script, "leave-child", world_size=2)
    with pytest.raises(KeyError):
        look_and_fail(ranks)
    assert not ranks.processes()


def look_and_fail(ranks: RankProcesses) -> None:
    with ranks:
        ranks.wait_for("waiting", timeout_s=300, ranks=range(2))
        ranks.stop(1)
        assert len(ranks.processes()) == 4
        raise KeyError


@pytest.mark.process
def test_one_rank_is_killed_and_the_others_are_not(script: Path) -> None:
    """A signal goes to one rank alone; a wait that cannot end says so, with everybody's output."""
    with RankProcesses(script, world_size=2) as ranks:
        ranks.wait_for("waiting", timeout_s=300, ranks=range(2))
        ranks.kill(0)
        assert ranks.wait(timeout_s=300, ranks=[0]) == [-signal.SIGKILL]
        ranks.stop(1)
        ranks.resume(1)
        assert ranks.running(1)
        with pytest.raises(DeadlineExceeded, match=r"(?s)rank 1 still runs.*rank 0 \(ended with -9\).*waiting"):
            ranks.wait(timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match="ranks ended without 'more' from ranks"):
            ranks.wait_for("more", timeout_s=300, ranks=[0])


@pytest.mark.process
def test_failed_start_leaves_nobody(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a rank cannot be started, those before it are ended."""
    started = []
    start = subprocess.Popen

    def fail_second(*args: object, **options: object) -> object:
        if started:
            raise OSError("no more processes")
        started.append(start(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", fail_second)
    with pytest.raises(OSError, match="no more"), RankProcesses(script, world_size=2):
        pass
    assert started[0].returncode == -signal.SIGKILL


def test_nodes_must_be_as_many_as_ranks() -> None:
    """A list of nodes of another length is refused."""
    with pytest.raises(ValueError, match="names 1 nodes for 2 ranks"):
        RankProcesses("x.py", world_size=2, nodes=["a"])


def test_what_cannot_be_meant_is_refused() -> None:
    """So are environments of another number, and a program that is a module too."""
    with pytest.raises(ValueError, match="environments has 1 entries for 2 ranks"):
        RankProcesses("x.py", world_size=2, environments=[{}])
    with pytest.raises(ValueError, match="module and code exclude each other"):
        RankProcesses("x", world_size=1, module=True, code=True)


TALKS = """
import os, subprocess, sys
print(*(os.environ.get(name) for name in ("RANK", "MASTER_PORT", "GREETING", "TORCHELASTIC_RUN_ID", *sys.argv[1:])))
for line in sys.stdin:
    print("noise")
    print("heard", line.strip(), end="", flush=True)
    print()
if os.environ["GREETING"] == "hello":
    subprocess.Popen(["sleep", "0.3"], start_new_session=True)
print("no end of line", end="")
"""


@pytest.mark.process
def test_a_test_talks_with_ranks_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank hears what it is sent and no other; of what it prints, each line is given once and whole. Its variables
    are the launcher's, the test's for all, and its own, of which ``None`` removes one; no others of a launcher."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of whoever runs the tests")
    monkeypatch.setenv("SPARE", "x")
    common = {"GREETING": "hello", "SPARE": None}
    own = [{"MASTER_PORT": "7"}, {"GREETING": "hi", "MASTER_PORT": None}]
    with RankProcesses(
        TALKS, "SPARE", world_size=2, code=True, stdin=True, environment=common, environments=own
    ) as ranks:
        assert ranks.next_line(0, 60) == "0 7 hello None None"
        assert ranks.next_line(1, 60) == "1 None hi None None"
        for word in ("one", "two"):
            ranks.send(0, word)
            assert ranks.next_line(0, 60, containing="heard") == f"heard {word}"
        with pytest.raises(
            DeadlineExceeded, match=r"(?s)0.05 s passed without a line with 'heard' from rank 1.*rank 0"
        ):
            ranks.next_line(1, 0.05, containing="heard")
        for rank in range(2):
            ranks.end_input(rank)
        assert ranks.next_line(0, 60) == "no end of line"
        with pytest.raises(DeadlineExceeded, match="it ended without a line with ''"):
            ranks.next_line(0, 60)
        assert ranks.output(0).count("noise") == 2
        assert ranks.wait_until_gone(60) == [0, 0]
        assert not ranks.processes()


@pytest.mark.process
def test_wait_until_gone_names_what_still_runs(script: Path) -> None:
    """The ranks have ended, and what one of them started has not: that is said, with its command."""
    with RankProcesses(script, "end", "leave-child", world_size=1) as ranks:
        ranks.wait(60)
        with pytest.raises(DeadlineExceeded, match=r"(?s)still run after 0.2 s: \d+ \([\w-]+\) sleep 600.*rank 0"):
            ranks.wait_until_gone(0.2)


def test_free_ports_are_those_that_the_kernel_gives_to_nobody() -> None:
    """None is in the range of outgoing connections, each can be bound, and two askers rarely get the same."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(20)]
    assert all(1024 < port < low or high < port < 1 << 16 for port in ports)
    assert len(set(ports)) > 15
    for port in set(ports):
        socket.create_server(("", port)).close()


@pytest.fixture
def only_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the one port that is drawn before the kernel is asked for another."""
    port = free_port()
    os.close(reaping._claims.pop())
    monkeypatch.setattr(reaping, "_FIRST_PORT", port)
    monkeypatch.setattr(reaping, "_ephemeral_ports", lambda: (port + 1, 65535))
    return port


def test_no_two_processes_are_given_the_same_port(only_port: int) -> None:
    """What one process was given, no other is, though nobody listens there; once that process is gone, another is."""
    choice = f"r._FIRST_PORT, r._ephemeral_ports = {only_port}, lambda: ({only_port + 1}, 65535)"
    ask = f"import outlast.testing.ranks as r; {choice}; print(r.free_port(), flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ask], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == only_port
        assert free_port() != only_port
        other.communicate("\n", timeout=300)
    assert free_port() == only_port


def test_a_port_in_use_is_not_free(only_port: int) -> None:
    """A port on which somebody listens is passed over; where the kernel's range leaves none, one of that is taken."""
    with socket.create_server(("", only_port)):
        assert free_port() != only_port
    assert free_port() == only_port
