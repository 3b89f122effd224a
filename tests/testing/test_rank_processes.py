"""Plain rank processes of a script: their environment, signals, input and output, and their cleanup."""

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
def test_ranks_receive_their_rank_variables(script: Path, tmp_path: Path) -> None:
    """Each rank receives the variables of its rank, counted per node where node names are given; its output is kept."""
    with RankProcesses(script, "end", world_size=3, directory=tmp_path / "out", nodes=["a", "b", "a"]) as ranks:
        assert ranks.wait(timeout_s=300) == [0, 0, 0]
    places = [(tmp_path / "out" / f"rank-{rank}.log").read_text().strip() for rank in range(3)]
    assert places == [
        "place 0 0 2 3 a 127.0.0.1 end",
        "place 1 0 1 3 b 127.0.0.1 end",
        "place 2 1 2 3 a 127.0.0.1 end",
    ]


@pytest.mark.process
def test_ranks_and_their_children_end_with_the_block(script: Path) -> None:
    """Ranks, including stopped ones, and the children that they started in other sessions end with the block."""
    ranks = RankProcesses(script, "leave-child", world_size=2)
    with pytest.raises(KeyError):
        fail_inside_the_block(ranks)
    assert not ranks.processes()


def fail_inside_the_block(ranks: RankProcesses) -> None:
    with ranks:
        ranks.wait_for("waiting", timeout_s=300, ranks=range(2))
        ranks.stop(1)
        assert len(ranks.processes()) == 4
        raise KeyError


@pytest.mark.process
def test_signals_reach_one_rank_and_failed_waits_show_output(script: Path) -> None:
    """A signal reaches one rank only; a wait that cannot succeed fails with the output of all ranks."""
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
def test_failed_start_ends_the_started_ranks(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank cannot be started, the ranks that were started before are killed."""
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


def test_number_of_nodes_must_match_the_ranks() -> None:
    """A list of nodes whose length is not the number of ranks is rejected."""
    with pytest.raises(ValueError, match="names 1 nodes for 2 ranks"):
        RankProcesses("x.py", world_size=2, nodes=["a"])


def test_contradicting_arguments_are_rejected() -> None:
    """A wrong number of environments, and a program that is both a module and code, are rejected."""
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
def test_ranks_exchange_lines_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank receives only its own input, and each line of its output is returned once and complete. Its
    environment has the launcher's variables, the common ones and its own; ``None`` removes a variable, and variables
    of an outer launcher are removed."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of whoever runs the tests")
    monkeypatch.setenv("SPARE", "x")
    common = {"GREETING": "hello", "SPARE": None}
    per_rank = [{"MASTER_PORT": "7"}, {"GREETING": "hi", "MASTER_PORT": None}]
    with RankProcesses(
        TALKS, "SPARE", world_size=2, code=True, stdin=True, environment=common, environments=per_rank
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
def test_wait_until_gone_reports_remaining_processes(script: Path) -> None:
    """If a child outlives the ranks, the error contains its command."""
    with RankProcesses(script, "end", "leave-child", world_size=1) as ranks:
        ranks.wait(60)
        with pytest.raises(DeadlineExceeded, match=r"(?s)still run after 0.2 s: \d+ \([\w-]+\) sleep 600.*rank 0"):
            ranks.wait_until_gone(0.2)


def test_free_ports_are_outside_the_ephemeral_range() -> None:
    """No port is in the range of outgoing connections, each can be bound, and repeated calls rarely return the same
    port."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(20)]
    assert all(1024 < port < low or high < port < 1 << 16 for port in ports)
    assert len(set(ports)) > 15
    for port in set(ports):
        socket.create_server(("", port)).close()


@pytest.fixture
def only_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the one port that ``free_port`` can return before it asks the kernel for another one."""
    port = free_port()
    os.close(reaping.claims.pop())
    monkeypatch.setattr(reaping, "FIRST_PORT", port)
    monkeypatch.setattr(reaping, "ephemeral_ports", lambda: (port + 1, 65535))
    return port


def test_two_processes_never_get_the_same_port(only_port: int) -> None:
    """A port is reserved for its process, even if unused, and is available again once that process has exited."""
    choice = f"r.FIRST_PORT, r.ephemeral_ports = {only_port}, lambda: ({only_port + 1}, 65535)"
    ask = f"import outlast.testing.ranks as r; {choice}; print(r.free_port(), flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ask], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == only_port
        assert free_port() != only_port
        other.communicate("\n", timeout=300)
    assert free_port() == only_port


def test_a_port_in_use_is_not_returned(only_port: int) -> None:
    """A port with a listener is skipped; if the preferred range has no free port, the kernel chooses one."""
    with socket.create_server(("", only_port)):
        assert free_port() != only_port
    assert free_port() == only_port
